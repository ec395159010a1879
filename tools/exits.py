"""From errors to exit status and one line on stderr: the only place that knows both."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

OK, ERROR, USAGE, NOT_FOUND, AUTHENTICATION, INTEGRITY, CAPACITY = range(7)


class CommandError(Exception):
    """A command's own refusal, with its exit status."""

    def __init__(self, message: str, status: int = ERROR) -> None:
        super().__init__(message)
        self.status = status


def not_utf8(arguments: argparse.Namespace) -> int | None:
    """Refuses what the daemon's JSON, a manifest or a registry cannot carry; None when all of it can be.

    Paths of our own, which stay on this side, may be of any bytes.
    """
    if arguments.command not in ("cache", "catalog", "env", "group", "image", "mount"):
        return None
    for name, value in vars(arguments).items():
        for text in _texts(value):
            if not _is_utf8(text):
                shown = os.fsencode(text)[:200].decode("utf-8", "backslashreplace")
                option = "the command" if name == "argv" else name
                error = CommandError(f"{option}: expected UTF-8, received {shown!r}; pass other bytes through a file or stdin")
                return report(error, getattr(arguments, "status_of_refusal", USAGE))
    return None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def guarded(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command; an error that somebody announced becomes a line and a status.

    Others keep their traceback: they are defects.
    """
    try:
        status = command(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except BaseExceptionGroup as group:
        error = first(group)
        status_of = status_for(error)
        if status_of is None:
            raise
        return report(error, status_of)
    except Exception as error:
        status_of = status_for(error)
        if status_of is None:
            raise
        return report(error, status_of)


def report(error: BaseException, status: int) -> int:
    print(f"weenv: {describe(error)}", file=sys.stderr)
    return status


def first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    from envlet.errors import EnvletError

    if isinstance(error, EnvletError):
        return describe_envlet(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def describe_envlet(error: BaseException) -> str:
    """The daemon's sentence, and for a failed init command what it printed."""
    text = str(getattr(error, "message", error))
    output = (getattr(error, "data", None) or {}).get("output_tail")
    return f"{text}\n{output}" if output and output.strip() not in text else text


def status_for(error: BaseException) -> int | None:
    """The exit status of an announced error; None for a defect."""
    from envlet import errors as envlet_errors
    from envlet.catalog import CatalogError
    from layerformat.errors import FormatError, LayerError
    from registry import AuthenticationFailed, IntegrityError, InvalidReference, NoSpace, NotFound, RegistryError
    from weefs.core import CoreError, DamagedError
    from weefs.errors import LayerRefused, WeefsError

    if isinstance(error, CommandError):
        return error.status
    if isinstance(error, envlet_errors.EnvletError):
        codes = {
            envlet_errors.NOT_FOUND: NOT_FOUND,
            envlet_errors.REFERENCE_NOT_FOUND: NOT_FOUND,
            envlet_errors.AUTHENTICATION: AUTHENTICATION,
            envlet_errors.INTEGRITY: INTEGRITY,
            envlet_errors.CAPACITY: CAPACITY,
            envlet_errors.INVALID_PARAMS: USAGE,
        }
        return codes.get(error.code, ERROR)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CAPACITY
    table: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
        ((InvalidReference,), USAGE),
        ((NotFound, FileNotFoundError), NOT_FOUND),
        ((NoSpace,), CAPACITY),
        ((AuthenticationFailed,), AUTHENTICATION),
        ((CatalogError, IntegrityError, FormatError, DamagedError, LayerRefused), INTEGRITY),
        ((LayerError, RegistryError, WeefsError, CoreError, envlet_errors.ConnectionLost, OSError), ERROR),
    )
    return next((status for kinds, status in table if isinstance(error, kinds)), None)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, as an exception: what was begun is undone on its way out."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask this process to end, besides ^C; not one that it was started to ignore, as nohup does with SIGHUP."""
    return tuple(number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as ^C does, so that no partial file stays; the exit status is 143 or 129.

    One is enough: the end of a session may say SIGHUP twice, and the second would break the cleaning off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ending = False

    def terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise Terminated(128 + number)

    before = [(number, signal.signal(number, terminate)) for number in ending_signals()]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
