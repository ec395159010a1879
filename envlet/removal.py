"""Removes directory trees that strangers filled: of any depth, with paths of any length.

A program in an environment may nest directories thousands deep. `shutil.rmtree` recurses and works with whole paths,
so it ends at Python's recursion limit or at PATH_MAX. Here the walk holds one open directory, goes down by name and up
by "..", and keeps its place as a list. Rejected: an open descriptor per level (they run out), and renaming deep
directories to the top (writes that only fail where the disk is full). Nothing may move directories meanwhile; a ".."
that is not the directory that was left is an error, so that nothing outside is ever touched.
"""

import os
from pathlib import Path

import attrs

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SHOWN_CHARACTERS = 300


@attrs.frozen
class _Level:
    """A directory on the way down."""

    name: str
    identity: tuple[int, int]
    left: list[str]
    """Directories in it that are not removed yet."""


def remove_directories(*directories: Path) -> None:
    """Removes the trees; fine where there is none. Blocks. Raises OSError, which names the entry that stays."""
    for directory in directories:
        _remove_tree(directory)


def _remove_tree(directory: Path) -> None:
    levels: list[_Level] = []
    try:
        fd = os.open(directory, _FLAGS)
    except FileNotFoundError:
        return
    try:
        levels.append(_Level(str(directory), _identity(fd), _remove_files(fd)))
        while True:
            here = levels[-1]
            if here.left:
                name = here.left.pop()
                fd = _step(fd, name)
                levels.append(_Level(name, _identity(fd), _remove_files(fd)))
                continue
            if len(levels) == 1:
                break
            fd = _step(fd, "..")
            if _identity(fd) != levels[-2].identity:
                raise OSError(f"{here.name!r} was moved while the tree was removed")
            os.rmdir(here.name, dir_fd=fd)
            levels.pop()
        os.rmdir(directory)
    except OSError as error:
        place = "/".join(level.name for level in levels) or str(directory)
        if len(place) > _SHOWN_CHARACTERS:
            place = f"{place[:_SHOWN_CHARACTERS]}… ({len(levels)} directories deep)"
        raise OSError(error.errno, f"{error.strerror or error} (removing {error.filename or 'an entry'} below {place})") from error
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _step(fd: int, name: str) -> int:
    """Opens a neighbour of an open directory and closes that. After an error it is still open."""
    following = os.open(name, _FLAGS, dir_fd=fd)
    os.close(fd)
    return following


def _remove_files(fd: int) -> list[str]:
    """Removes what is no directory; the names of the directories."""
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=fd)
    return [name for name, is_directory in found if is_directory]
