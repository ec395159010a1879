"""The templates in a recipe: Jinja2, sandboxed, where a name that is not defined is an error and nothing is random.

A recipe may be a stranger's. Jinja2's sandbox keeps a template from the machine's objects, not from its memory and time:
`{{ 'a' * 999999999 }}`, a loop in a loop, `{{ 9 ** (9 ** 9) }}` already when it is compiled, `{{ '%999999999d' % 1 }}`. A
list of what to forbid would have holes, so templates are carried out in a child process, whose memory and processor time
the kernel limits. It is forked, for a catalog renders thousands of recipes, and starting Python for each would take longer
than the rest.

The delimiters of comments are ones that no text has: `${#array[@]}` is shell, and `{#` would begin a comment in it.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import jinja2
import jinja2.sandbox

from tools import exits

_NO_COMMENT = ("\0{#", "#}\0")
_DELIMITERS = ("{{", "{%")
MAX_PROCESSOR_S = 5
"""Of all templates of a recipe."""
MAX_MEMORY_BYTES = 256 << 20
"""More than the process has before."""
MAX_TEXT_CHARACTERS = 8 << 20
"""Of one rendered text."""

_TEXT, _REFUSAL = b"t", b"r"


class RecipeError(exits.CommandError):
    """What is wrong with a recipe, and where in it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exits.USAGE)


class Renderer:
    """Templates over the variables of a recipe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        start, end = _NO_COMMENT
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined,
            comment_start_string=start,
            comment_end_string=end,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.globals.clear()  # `lipsum` is random, and the rest is for pages
        del self._environment.filters["random"]

    def render(self, text: str, where: str) -> str:
        """The text with its templates carried out. RecipeError names `where` it stands and what was expected."""
        return self.render_all([(where, text)])[0]

    def render_all(self, texts: Sequence[tuple[str, str]]) -> list[str]:
        """Pairs of where a text stands and the text, rendered together: the limits are those of all. RecipeError."""
        templates = [pair for pair in texts if _has_template(pair[1])]
        rendered = iter(self._render_apart(templates) if templates else ())
        return [next(rendered) if _has_template(text) else self._render(where, text) for where, text in texts]

    def _render_apart(self, templates: Sequence[tuple[str, str]]) -> list[str]:
        """In a child process, which is gone when this is left, however it is left."""
        fork = multiprocessing.get_context("fork")
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=self._run_child, args=(receiver, sender, templates), daemon=True)
        with receiver:
            with sender:
                child.start()
            try:
                return [_receive(receiver, child, where) for where, _text in templates]
            finally:
                child.kill()
                child.join()

    def _run_child(self, receiver: Connection, sender: Connection, templates: Sequence[tuple[str, str]]) -> None:
        receiver.close()  # so that sending fails when the parent is no more
        _limit_this_process()
        for where, text in templates:
            try:
                sender.send_bytes(_TEXT + self._render(where, text).encode())
            except RecipeError as error:
                sender.send_bytes(_REFUSAL + str(error).encode("utf-8", "backslashreplace"))
                return

    def _render(self, where: str, text: str) -> str:
        try:
            rendered = "".join(_limited(self._environment.from_string(text).generate(self._variables), where))
            rendered.encode()  # an escape in a template can make half of a character
        except RecipeError:
            raise
        except jinja2.UndefinedError as error:
            known = ", ".join(sorted(self._variables)) or "none"
            raise RecipeError(f"{where}: {error}; expected one of [variables]: {known}") from error
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"{where}: expected a Jinja2 template: line {error.lineno}: {error.message}") from error
        except MemoryError as error:
            raise RecipeError(f"{where}: expected templates that need at most {MAX_MEMORY_BYTES >> 20} MiB, received more") from error
        except Exception as error:  # whatever the methods that a template calls may raise
            raise RecipeError(f"{where}: the template failed: {error}") from error
        if "\0" in text + rendered:
            raise RecipeError(f"{where}: expected text without NUL, received {rendered[:100]!r}")
        return rendered


def _has_template(text: str) -> bool:
    return any(delimiter in text for delimiter in _DELIMITERS)


def _limited(pieces: Iterator[str], where: str) -> Iterator[str]:
    """RecipeError when there is more than a text may have."""
    left = MAX_TEXT_CHARACTERS
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise RecipeError(f"{where}: expected templates that make at most {MAX_TEXT_CHARACTERS:,} characters, received more")
        yield piece


def _limit_this_process() -> None:
    """Memory: allocations fail. Processor time: the kernel ends the process with SIGXCPU."""
    for number in (signal.SIGXCPU, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MAX_MEMORY_BYTES)
    _lower(resource.RLIMIT_CPU, MAX_PROCESSOR_S)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(which: int, limit: int) -> None:
    """Sets a soft limit, which is never above the hard one."""
    _soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _receive(receiver: Connection, child: BaseProcess, where: str) -> str:
    """The next text that the child rendered. RecipeError: its own, or what it was ended by."""
    try:
        message = receiver.recv_bytes()
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            why = f"expected templates that take at most {MAX_PROCESSOR_S} s of processor time, received more"
        else:
            why = f"the template failed: its process ended with status {child.exitcode}"
        raise RecipeError(f"{where}: {why}") from None
    text = message[1:].decode()
    if message[:1] == _REFUSAL:
        raise RecipeError(text)
    return text
