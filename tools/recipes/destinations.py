"""Where the files of a recipe may go: not where they would take away, or write through, what the base groups have there.

An overlay would do it without a word: a file at `/usr` hides all of `/usr`, `.wh.x` removes `x`, and what is below `/proc` is
never seen. The kind of what is at a path decides: a directory stays one, and nothing else becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from layerformat import Entry, Kind, printable
from tools.check.filesystem import MOUNT_POINTS
from tools.recipes.layer import WHITEOUT
from tools.recipes.templates import RecipeError
from weefs.merge import Directory, View


@frozen
class _Found:
    """What is at a path.

    kept   a directory of the base groups, which stays as it is
    leads  a directory, or a symlink to one
    words  for an error
    """

    is_directory: bool
    kept: bool
    leads: bool
    words: str


_MADE = _Found(True, False, True, "a directory that the recipe makes")


class Destinations:
    """What is at each path: what was put in, else what the base groups have."""

    def __init__(self, base: View) -> None:
        self._base = base
        self._known: dict[bytes, _Found | None] = {}

    def take(self, entry: Entry, where: str) -> bool:
        """Notes that an entry is put in; whether it must be, for a directory that is there stays as it is.

        where  begins the message of the RecipeError for a place that the entry cannot have
        """
        path, is_directory = entry.path, entry.kind is Kind.DIRECTORY
        _check_path(path, is_directory, where)
        for parent in _parents(path):
            found = self._find(parent)
            if found is None:
                self._known[parent] = _MADE
            elif not found.is_directory:
                shown, received = printable(parent), printable(path)
                raise RecipeError(
                    f"{where}: expected a path through directories, received '/{received}', where '/{shown}' is {found.words}"
                )
        found = self._find(path)
        if found is not None:
            _check_kind(entry, found, where)
        if found is None or not found.kept:
            self._known[path] = _MADE if is_directory else _put(entry)
        return not is_directory or found is None or not found.kept

    def _find(self, path: bytes) -> _Found | None:
        if path not in self._known:
            self._known[path] = self._find_in_base(path)
        return self._known[path]

    def _find_in_base(self, path: bytes) -> _Found | None:
        node = self._base.lookup(path, follow=False)
        if node is None:
            return None
        if isinstance(node, Directory):
            return _Found(True, True, True, "a directory of the base groups")
        if node.inode.is_symlink:
            leads = isinstance(self._base.lookup(path), Directory)
            return _Found(False, False, leads, f"a symlink of the base groups to '{printable(self._base.target(node))}'")
        return _Found(False, False, False, "a file of the base groups")


def _check_path(path: bytes, is_directory: bool, where: str) -> None:
    parts = path.split(b"/")
    if any(part.startswith(WHITEOUT) for part in parts):
        message = "expected no name that begins with .wh., which would be a whiteout in the layer"
        raise RecipeError(f"{where}: {message}, received '/{printable(path)}'")
    if parts[0] in MOUNT_POINTS and not (is_directory and len(parts) == 1):
        message = "expected a path outside /proc, /sys and /dev, which every environment mounts over"
        raise RecipeError(f"{where}: {message}, received '/{printable(path)}'")


def _parents(path: bytes) -> Iterator[bytes]:
    """Those below the root, from there."""
    end = path.find(b"/")
    while end >= 0:
        yield path[:end]
        end = path.find(b"/", end + 1)


def _check_kind(entry: Entry, found: _Found, where: str) -> None:
    """A symlink may take the place of another: that is no more than another way to somewhere."""
    shown = printable(entry.path)
    if entry.kind is Kind.DIRECTORY:
        if not found.is_directory:
            raise RecipeError(f"{where}: expected the path of a directory, received '/{shown}', which is {found.words}")
    elif found.is_directory or (found.leads and entry.kind is not Kind.SYMLINK):
        raise RecipeError(f"{where}: expected the path of a file, received '/{shown}', which is {found.words}")


def _put(entry: Entry) -> _Found:
    words = f"a symlink of the recipe to '{printable(entry.target)}'" if entry.kind is Kind.SYMLINK else "a file of the recipe"
    return _Found(False, False, False, words)
