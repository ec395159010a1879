"""TASKS.jsonl: a data set's tasks, one a line. docs/catalog.md is its manual.

A file is read as a stream and more than once: first to find everything that is wrong with it and which commits are needed, then
to verify and to write. That it is the same file each time is checked by its digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from attrs import Factory, define, frozen
from msgspec import Meta

from envlet.catalog import OBJECT_ID, TASK_ID, WITHOUT_NUL, Argv, decode_line, numbered_lines
from tools import exits
from tools.catalog.commands import Command, fits, init_commands, write_file
from tools.catalog.config import INSIDE, CatalogConfig

_SHOWN = 20
MAX_LINE_BYTES = 8 << 20
MAX_TEXT_BYTES = 1 << 20
"""Of a mutation, and of all files of an evaluator together: as commands, however they are quoted, both fit into one message to the
daemon.
"""
_DIFF_MARKS = ("diff --git ", "--- ", "Index: ")


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _MutationFile(_Section, frozen=True, kw_only=True):
    file: Annotated[str, Meta(min_length=1)]


class _Evaluator(_Section, frozen=True, kw_only=True):
    name: str | None = None
    command: Argv | None = None
    files: dict[str, str] = {}

    def __post_init__(self) -> None:
        WITHOUT_NUL.check("command", *(self.command or ()))
        INSIDE.check("files", *self.files)
        WITHOUT_NUL.check("files", *self.files.values())
        _check_size("files", *self.files.values())


class _TaskLine(_Section, frozen=True, kw_only=True):
    id: str
    repository: str
    evaluator: str | _Evaluator
    commit: str | None = None
    mutation: str | _MutationFile | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        TASK_ID.check("id", self.id)
        OBJECT_ID.check("commit", self.commit)


def _check_size(field: str, *texts: str) -> None:
    if (size := sum(len(text.encode()) for text in texts)) > MAX_TEXT_BYTES:
        raise ValueError(f"{field}: expected at most {MAX_TEXT_BYTES} bytes, received {size}")


@frozen
class TaskSource:
    """One task of a data set, checked as far as it can be without its repository.

    line       its number
    mutation   a diff that ends with a newline
    evaluator  the name of the one whose group it needs
    judging    the command that judges
    files      what it needs besides, by path
    """

    line: int
    id: str
    repository: str
    commit: str
    mutation: str | None
    evaluator: str | None
    judging: Command
    files: dict[str, str]
    metadata: dict[str, Any]

    def init(self, path: str, *, seal: bool) -> tuple[Command, ...]:
        """What brings the repository at `path` to the task's state. `seal`: and drops all that is not of it."""
        return init_commands(path, self.commit, self.mutation, seal=seal)

    def evaluation_init(self) -> tuple[Command, ...]:
        """What writes its files."""
        return tuple(command for path, text in self.files.items() for command in write_file(path, text))


@define
class Problems:
    """What is wrong with a data set: the first of it in words, and how much there is."""

    path: Path
    found: list[str] = Factory(list)
    count: int = 0

    def add(self, line: int, what: str) -> None:
        self.count += 1
        if len(self.found) < _SHOWN:
            self.found.append(f"{self.path}: line {line}: {what}")

    def check(self) -> None:
        """CommandError when there are any."""
        if self.count:
            more = [f"and {self.count - len(self.found)} more"] if self.count > len(self.found) else []
            raise exits.CommandError("\n".join([*self.found, *more, f"{_number(self.count, 'problem')}; nothing is built"]), exits.USAGE)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


@frozen
class Survey:
    """What a data set needs.

    commits     by repository: how many tasks begin at each
    evaluators  names of those whose groups are needed
    sha256      of the file
    """

    tasks: int
    commits: dict[str, Counter[str]]
    evaluators: frozenset[str]
    sha256: str


def survey_tasks(path: Path, config: CatalogConfig) -> Survey:
    """Reads all of it. CommandError with all that is wrong, OSError."""
    if not path.is_file():
        raise exits.CommandError(f"{path}: expected a file, which can be read more than once", exits.NOT_FOUND)
    problems, reader = Problems(path), TaskReader(path, config)
    commits: dict[str, Counter[str]] = {}
    evaluators: set[str] = set()
    count = 0
    for task in reader.tasks(problems):
        count += 1
        commits.setdefault(task.repository, Counter())[task.commit] += 1
        if task.evaluator is not None:
            evaluators.add(task.evaluator)
    problems.check()
    if not count:
        raise exits.CommandError(f"{path}: expected one task a line, received none", exits.USAGE)
    return Survey(count, commits, frozenset(evaluators), reader.sha256)


def reread_tasks(path: Path, config: CatalogConfig, survey: Survey) -> Iterator[TaskSource]:
    """The tasks once more. CommandError when the file is another one by now, also at its end."""
    problems, reader = Problems(path), TaskReader(path, config)
    for task in reader.tasks(problems):
        problems.check()
        yield task
    problems.check()
    if reader.sha256 != survey.sha256:
        raise exits.CommandError(f"{path}: expected sha256 {survey.sha256} as at first, received {reader.sha256}: it was changed meanwhile")


class TaskReader:
    """One reading of a file. `sha256` is of what was read so far."""

    def __init__(self, path: Path, config: CatalogConfig) -> None:
        self._path = path
        self._config = config
        self._hash = hashlib.sha256()
        self._seen: dict[str, int] = {}

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def tasks(self, problems: Problems) -> Iterator[TaskSource]:
        """Those that are right; what is wrong with the others goes to `problems`."""
        with self._path.open("rb") as file:
            for number, line in numbered_lines(file, MAX_LINE_BYTES):
                self._hash.update(line)
                try:
                    task = self._task(number, decode_line(line, _TaskLine, MAX_LINE_BYTES))
                except ValueError as error:
                    problems.add(number, str(error))
                else:
                    yield task

    def _task(self, number: int, line: _TaskLine) -> TaskSource:
        """ValueError."""
        if (first := self._seen.setdefault(line.id, number)) != number:
            raise ValueError(f"id: expected one of its own, received '{line.id}', as in line {first}")
        spec = self._config.repositories.get(line.repository)
        if spec is None:
            raise ValueError(f"repository: expected one of [repositories] of the configuration, received '{line.repository}'")
        if line.commit is None and line.mutation is None:
            raise ValueError("commit: expected 'commit', 'mutation' or both, received neither")
        commit = line.commit or spec.commit
        if commit is None:
            raise ValueError(f"commit: expected one, for repositories.{line.repository} of the configuration has none, received none")
        name, judging, files = self._evaluator(line.evaluator)
        task = TaskSource(
            line=number,
            id=line.id,
            repository=line.repository,
            commit=commit,
            mutation=self._mutation(line.mutation),
            evaluator=name,
            judging=judging,
            files=files,
            metadata=line.metadata,
        )
        if files and not fits(task.evaluation_init()):
            raise ValueError(f"evaluator.files: expected files that 256 commands can write, received {len(files)} files")
        return task

    def _mutation(self, given: str | _MutationFile | None) -> str | None:
        if given is None:
            return None
        text = self._read(given.file) if isinstance(given, _MutationFile) else given
        _check_size("mutation", text)
        WITHOUT_NUL.check("mutation", text)
        if not any(line.startswith(_DIFF_MARKS) for line in text.splitlines()):
            raise ValueError(f"mutation: expected a unified diff, received {text[:60]!r}")
        return text if text.endswith("\n") else f"{text}\n"

    def _read(self, name: str) -> str:
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts or "\0" in name:
            raise ValueError(f"mutation.file: expected a path below the directory of the tasks, without '..', received {name!r}")
        try:
            return (self._path.parent / relative).read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"mutation.file: {name}: expected UTF-8: {error}") from error
        except OSError as error:
            raise ValueError(f"mutation.file: expected a file, received {name!r}: {error.strerror}") from error

    def _evaluator(self, given: str | _Evaluator) -> tuple[str | None, Command, dict[str, str]]:
        """The name, the command that judges, and the files."""
        asked = _Evaluator(name=given) if isinstance(given, str) else given
        field = "evaluator" if isinstance(given, str) else "evaluator.name"
        known = self._config.evaluators.get(asked.name) if asked.name is not None else None
        if asked.name is not None and known is None:
            names = ", ".join(self._config.evaluators) or "none"
            raise ValueError(f"{field}: expected one of [evaluators] of the configuration ({names}), received '{asked.name}'")
        command = asked.command or (known.command if known is not None else None)
        if command is None:
            raise ValueError("evaluator.command: expected one, for [evaluators] of the configuration gives none, received none")
        group = asked.name if known is not None and known.group is not None else None
        return group, command, asked.files
