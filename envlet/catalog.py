"""The catalog of a data set's tasks, as rollout servers read it: the types of its lines, a reader that believes nothing, and the
lines' encoding. docs/catalog.md is normative.

A catalog is JSON Lines: a header, then one task a line, in the order of the data set. It is read as a stream; what is kept in
memory is one task and the ids seen so far.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import attrs
import msgspec
from msgspec import Meta

VERSION = 1
MAX_LINE_BYTES = 32 << 20
MAX_COMMAND_BYTES = 131_000
"""Of one init command in shell words: what one argument of a program may hold, with some room."""

Argv = Annotated[tuple[str, ...], Meta(min_length=1, max_length=4096)]
Commands = Annotated[tuple[Argv, ...], Meta(max_length=256)]

S = TypeVar("S", bound=msgspec.Struct)


@attrs.frozen
class Form:
    """What a string must look like, for a machine and in words."""

    pattern: re.Pattern[str]
    words: str

    def check(self, field: str, *values: str | None) -> None:
        """ValueError for the first that does not; None is none to look at."""
        for value in values:
            if value is not None and not self.pattern.fullmatch(value):
                raise ValueError(f"{field}: expected {self.words}, received {value[:100]!r}")


PINNED = Form(re.compile(r"[^\x00-\x1f]{1,900}@sha256:[0-9a-f]{64}"), "REF@sha256:… with 64 hexadecimal digits")
TASK_ID = Form(re.compile(r"[!-~]{1,256}"), "1 to 256 characters of ASCII without spaces")
OBJECT_ID = Form(re.compile(r"[0-9a-f]{40}"), "a whole name of git, 40 hexadecimal digits")
HEX_SHA256 = Form(re.compile(r"[0-9a-f]{64}"), "64 hexadecimal digits")
WITHOUT_NUL = Form(re.compile(r"[^\0]*"), "text without NUL")


class CatalogError(Exception):
    """A file that is not a whole catalog: the file, the line, what was expected and what was received."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that a reader does not know are ignored: a change that would mislead it comes with another version."""


class Header(_Line, frozen=True, kw_only=True):
    """The first line.

    catalog       the version of the format
    tasks         how many lines follow
    tasks_sha256  of the file of tasks that it was made from, hexadecimal
    harnesses     groups that a task can be run with, by name
    """

    catalog: int
    tasks: Annotated[int, Meta(ge=0)]
    tasks_sha256: str
    harnesses: dict[str, str] = {}

    def __post_init__(self) -> None:
        HEX_SHA256.check("tasks_sha256", self.tasks_sha256)
        PINNED.check("harnesses", *self.harnesses.values())


class Groups(_Line, frozen=True, kw_only=True):
    """A task's groups by role. `base`: the lowest first. No evaluator: the evaluation brings its files itself."""

    base: Annotated[tuple[str, ...], Meta(min_length=1, max_length=64)]
    task: str
    evaluator: str | None = None

    def __post_init__(self) -> None:
        PINNED.check("base", *self.base)
        PINNED.check("task", self.task)
        PINNED.check("evaluator", self.evaluator)


class Evaluation(_Line, frozen=True, kw_only=True):
    """How a solution is judged, in a fresh environment that it was applied to: `init` first, then `command`, whose exit status
    and output are the verdict.
    """

    command: Argv
    init: Commands = ()

    def __post_init__(self) -> None:
        WITHOUT_NUL.check("command", *self.command)
        WITHOUT_NUL.check("init", *_words(self.init))

    def init_commands(self) -> list[str]:
        """`init` as the daemon takes it: shell commands."""
        return [shlex.join(argv) for argv in self.init]


class Task(_Line, frozen=True, kw_only=True):
    """One task.

    commit    of the repository, before the mutation
    init      what brings a fresh environment of `groups.base` and `groups.task` to the task's state, in order, as root
    tree      git's name of that state, when it was verified
    metadata  of the data set, as it was
    """

    id: str
    repository: str
    commit: str
    groups: Groups
    init: Commands
    eval: Evaluation
    tree: str | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        TASK_ID.check("id", self.id)
        OBJECT_ID.check("commit", self.commit)
        OBJECT_ID.check("tree", self.tree)
        WITHOUT_NUL.check("init", *_words(self.init))

    def init_commands(self) -> list[str]:
        """`init` as the daemon takes it: shell commands."""
        return [shlex.join(argv) for argv in self.init]

    def execution_plan(self, *above: str) -> list[str]:
        """The groups of an environment to work in, the lowest first. `above`: a harness."""
        return [*self.groups.base, self.groups.task, *above]

    def evaluation_plan(self) -> list[str]:
        """The groups of an environment to judge in, the lowest first."""
        return self.execution_plan(*([self.groups.evaluator] if self.groups.evaluator is not None else []))


def _words(commands: Iterable[Iterable[str]]) -> Iterator[str]:
    for argv in commands:
        yield from argv


def read_header(path: Path) -> Header:
    """The first line of a catalog. CatalogError, OSError."""
    with path.open("rb") as file:
        return _header(path, file)


def read_catalog(path: Path) -> Iterator[Task]:
    """The tasks in order, each checked. CatalogError, also at the end of a file that holds fewer or more than its header says;
    OSError.
    """
    with path.open("rb") as file:
        header = _header(path, file)
        seen: dict[str, int] = {}
        for number, line in numbered_lines(file, start=2):
            task = _decoded(line, Task, path, number)
            if (first := seen.setdefault(task.id, number)) != number:
                raise CatalogError(f"{path}: line {number}: id: expected one of its own, received '{task.id}', as in line {first}")
            yield task
    if len(seen) != header.tasks:
        raise CatalogError(f"{path}: expected {header.tasks} tasks, as its header says, received {len(seen)}")


def encode_line(value: Header | Task) -> bytes:
    """A line of a catalog, with its end."""
    return msgspec.json.encode(value) + b"\n"


def numbered_lines(file: BinaryIO, limit_bytes: int = MAX_LINE_BYTES, start: int = 1) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. One that is too long comes cut, one byte longer than allowed, and ends the reading."""
    for number, line in enumerate(iter(lambda: file.readline(limit_bytes + 1), b""), start):
        yield number, line
        if len(line) > limit_bytes:
            return


def decode_line(line: bytes, kind: type[S], limit_bytes: int = MAX_LINE_BYTES) -> S:
    """A JSON object as a value. ValueError says which field is wrong, what was expected and what was received."""
    if len(line) > limit_bytes:
        raise ValueError(f"expected at most {limit_bytes} bytes, received more; what comes after it is not read")
    if not line.strip():
        raise ValueError("expected a JSON object, received an empty line")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(in_our_words(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error


def in_our_words(error: msgspec.ValidationError) -> str:
    """The field first, then what was expected and what was received."""
    what, _, where = str(error).partition(" - at ")
    field = where.strip("`").removeprefix("$").removeprefix(".")
    sentence = what[:1].lower() + what[1:].replace(", got ", ", received ")
    return f"{field}: {sentence}" if field else sentence


def _header(path: Path, file: BinaryIO) -> Header:
    line = file.readline(MAX_LINE_BYTES + 1)
    header = _decoded(line, Header, path, 1)
    if header.catalog != VERSION:
        raise CatalogError(f"{path}: line 1: catalog: expected version {VERSION}, received {header.catalog}")
    return header


def _decoded(line: bytes, kind: type[S], path: Path, number: int) -> S:
    try:
        return decode_line(line, kind)
    except ValueError as error:
        raise CatalogError(f"{path}: line {number}: {error}") from error
