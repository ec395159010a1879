"""The commands of a catalog: what brings a fresh environment to a task's state, and what brings an evaluation's files.

The state of a task is a commit with a mutation on it. Other commits, and the state before the mutation, are what the task's
answer could be read from: the last command drops them. It makes the mutated state a commit without parents, removes refs and
reflogs, and packs anew what is reachable: the others' packs are deleted in the environment.

Texts travel as arguments. One that is too long for an argument is written in pieces.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from envlet.catalog import MAX_COMMAND_BYTES

Command = tuple[str, ...]

_ROOM_BYTES = 1000 + 4 * 4096
"""Beside a text: the script, and a path quoted at its worst."""
APPLY_OPTIONS = ("--whitespace=nowarn",)
_STATE_MESSAGE = "The state of the task"

_APPLY = 'printf %s "$1" | git -c safe.directory="$0" -C "$0" apply --index --whitespace=nowarn -'
_APPLY_FILE = 'git -c safe.directory="$0" -C "$0" apply --index --whitespace=nowarn "$1" && rm "$1"'
_WRITE = 'mkdir -p "${0%/*}/" && printf %s "$1" > "$0"'
_APPEND = 'printf %s "$1" >> "$0"'
_GIT = """cd "$0"
g() { git -c safe.directory="$0" -c core.logAllRefUpdates=false -c user.name=weenv -c user.email=weenv@localhost "$@"; }
"""
_COMMIT = f"""export GIT_AUTHOR_DATE='@0 +0000' GIT_COMMITTER_DATE='@0 +0000'
tree=$(g write-tree)
commit=$(g commit-tree -m '{_STATE_MESSAGE}' "$tree")
g update-ref --no-deref HEAD "$commit"
"""
_DROP = """refs=$(g for-each-ref --format='delete %(refname)')
[ -z "$refs" ] || printf '%s\\n' "$refs" | g update-ref --stdin
rm -rf .git/logs .git/ORIG_HEAD .git/FETCH_HEAD
g repack -a -d -n -q --window=0
g prune --expire=now
"""


def init_commands(path: str, commit: str, mutation: str | None, *, seal: bool) -> tuple[Command, ...]:
    """What brings the repository at `path` to a task's state. `seal`: and drops all that is not of it."""
    checkout = ("git", "-c", f"safe.directory={path}", "-c", "core.logAllRefUpdates=false", "-C", path)
    commands: list[Command] = [(*checkout, "checkout", "--quiet", "--force", "--detach", commit)]
    if mutation is not None:
        commands += _apply(path, mutation)
    if seal:
        commands.append(("sh", "-e", "-c", _GIT + (_COMMIT if mutation is not None else "") + _DROP, path))
    return tuple(commands)


def _apply(path: str, mutation: str) -> Iterator[Command]:
    pieces = _pieces(mutation)
    if len(pieces) == 1:
        yield ("sh", "-c", _APPLY, path, mutation)
        return
    patch = f"{path.rstrip('/')}/.git/weenv-mutation"
    yield from _write(patch, pieces)
    yield ("sh", "-c", _APPLY_FILE, path, patch)


def write_file(path: str, text: str) -> tuple[Command, ...]:
    """What writes a file, and makes the directories above it."""
    return tuple(_write(path, _pieces(text)))


def _write(path: str, pieces: Sequence[str]) -> Iterator[Command]:
    for number, piece in enumerate(pieces):
        yield ("sh", "-c", _APPEND if number else _WRITE, path, piece)


def _pieces(text: str) -> list[str]:
    """A text cut so that each piece fits into a command, however it is quoted; at least one."""
    limit = MAX_COMMAND_BYTES - _ROOM_BYTES
    pieces, start, size = [], 0, 0
    if _quoted_size(text) <= limit:
        return [text]
    for position, character in enumerate(text):
        width = _quoted_size(character)
        if size + width > limit:
            pieces.append(text[start:position])
            start, size = position, 0
        size += width
    return [*pieces, text[start:]]


def _quoted_size(text: str) -> int:
    """Bytes as a shell word, but for the quotes around it."""
    return len(text.encode()) + 4 * text.count("'")


def fits(commands: Sequence[Command]) -> bool:
    """Whether a daemon takes them as one environment's init."""
    return len(commands) <= 256 and all(len(shlex.join(argv).encode()) <= MAX_COMMAND_BYTES for argv in commands)
