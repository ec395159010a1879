"""Our terminal joined to the terminal of a command in an environment: raw mode, window size, bytes both ways."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from typing import TypeVar

R = TypeVar("R")
_COPY_BYTES = 1 << 16


def run_on_terminal(run: Callable[[Callable[[int], None]], R]) -> R:
    """Calls `run` with a function that takes the terminal's master, copies until the command's side closes, and
    returns what `run` returns.
    """
    threads: list[threading.Thread] = []
    stop_read, stop_write = os.pipe()

    def attach(master: int) -> None:
        _copy_window_size(master)
        with contextlib.suppress(ValueError):  # not the main thread: the size stays what it is
            signal.signal(signal.SIGWINCH, lambda _number, _frame: _copy_window_size(master))
        thread = threading.Thread(target=_copy, args=(master, stop_read), daemon=True)
        thread.start()
        threads.append(thread)

    try:
        with _raw(sys.stdin.fileno()):
            result = run(attach)
            os.close(stop_write)
            for thread in threads:
                thread.join()
            return result
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        os.close(stop_read)
        with contextlib.suppress(OSError):
            os.close(stop_write)


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Every key goes to the command. Without a terminal on stdin: nothing to change."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _copy_window_size(master: int) -> None:
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(master, termios.TIOCSWINSZ, size)
            return


def _copy(master: int, stop: int) -> None:
    """stdin to the master, the master to stdout, until the other side of the terminal is closed or `stop` is, and
    all output has been shown.
    """
    sources = [master, stop, sys.stdin.fileno()]
    try:
        while True:
            readable, _, _ = select.select(sources, [], [])
            if master in readable:
                try:
                    data = os.read(master, _COPY_BYTES)
                except OSError:  # EIO: the last process closed its side
                    return
                if not data:
                    return
                _write_all(sys.stdout.fileno(), data)
            elif stop in readable:
                return
            elif sources[-1] in readable:
                data = os.read(sources[-1], _COPY_BYTES)
                if data:
                    _write_all(master, data)
                else:
                    _write_all(master, b"\x04")  # end of our input is ^D on the terminal
                    sources.pop()
    finally:
        os.close(master)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
