"""`[[files]]` of a recipe as a tar that an environment is made with.

What a checkout leaves to chance is not taken over: owners are those that the recipe gives, permissions are 0755 for
directories and for files that their owner may execute and 0644 for others, and all have one time. What goes where is
checked against the base groups first (destinations.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from attrs import evolve, frozen

from layerformat import Data, Entry, Kind, TarWriter, open_source, printable
from layerformat.errors import UnsupportedEntry
from tools import output
from tools.recipes.destinations import Destinations
from tools.recipes.recipe import FileSpec, Recipe, beside
from tools.recipes.templates import RecipeError

if TYPE_CHECKING:
    from weefs.merge import View

_COPY_BYTES = 1 << 20
_KINDS = (Kind.REGULAR, Kind.DIRECTORY, Kind.SYMLINK, Kind.HARD_LINK)


@frozen
class Tree:
    """A directory of this machine that is put in at the absolute path `to`, besides what the recipe names."""

    source: Path
    to: str


def write_files(recipe: Recipe, directory: Path, base: View, out: BinaryIO, trees: Sequence[Tree] = ()) -> None:
    """Writes the tar: the trees, and over them the recipe's files. A directory that the `base` groups have gets no entry: it
    stays as it is. RecipeError, LayerError, OSError.
    """
    destinations = Destinations(base)
    with TarWriter(out) as tar:
        for where, entries in _sources(recipe, directory, trees):
            for entry, data in entries:
                if destinations.take(entry, where):
                    tar.add(evolve(entry, mtime_ns=recipe.epoch * 1_000_000_000), data)


def _sources(recipe: Recipe, directory: Path, trees: Sequence[Tree]) -> Iterator[tuple[str, Iterator[tuple[Entry, Iterable[bytes]]]]]:
    """What is put in, in this order, and what names the place of each."""
    for tree in trees:
        yield f"the tree at {tree.to}", _directory(FileSpec(to=tree.to), tree.source, _inside(tree.to), tree.to)
    for number, spec in enumerate(recipe.files):
        yield f"files[{number}].to", _entries(spec, directory, f"files[{number}]")


def _inside(to: str) -> bytes:
    """An absolute path as an entry has it: from the root, empty for the root."""
    return b"/".join(part for part in os.fsencode(to).split(b"/") if part not in (b"", b"."))


def _entries(spec: FileSpec, directory: Path, where: str) -> Iterator[tuple[Entry, Iterable[bytes]]]:
    to = _inside(spec.to)
    if spec.source is not None:
        source = beside(directory, spec.source, f"{where}.from")
        if source.is_dir():
            try:
                yield from _directory(spec, source, to, where)
            except UnsupportedEntry as error:
                raise RecipeError(f"{where}.from: {error}") from error
            return
    if not to or spec.to.endswith(("/", "/.")):
        raise RecipeError(f"{where}.to: expected the path of a file, received '{spec.to}'")
    if spec.contents is not None:
        contents = spec.contents.encode()
        yield _file(spec, to, len(contents), executable=False), [contents]
    elif not source.is_file():
        raise RecipeError(f"{where}.from: expected a file or directory, received '{spec.source}', which is something else")
    else:
        with source.open("rb") as file:
            status = os.fstat(file.fileno())
            yield _file(spec, to, status.st_size, executable=bool(status.st_mode & 0o100)), iter(lambda: file.read(_COPY_BYTES), b"")


def _file(spec: FileSpec, path: bytes, size: int, *, executable: bool) -> Entry:
    uid, gid = spec.ids
    mode = int(spec.mode, 8) if spec.mode is not None else _mode(executable)
    return Entry(path=path, kind=Kind.REGULAR, mode=mode, uid=uid, gid=gid, size=size)


def _mode(executable: bool) -> int:
    return 0o755 if executable else 0o644


def _directory(spec: FileSpec, source: Path, to: bytes, where: str) -> Iterator[tuple[Entry, Iterable[bytes]]]:
    if spec.mode is not None:
        raise RecipeError(f"{where}.mode: expected none for the directory '{spec.source}', received '{spec.mode}'")
    uid, gid = spec.ids
    with open_source(source) as opened:
        for entry, data in opened.entries():
            if entry.kind not in _KINDS:
                received = f"a {entry.kind.name.lower()} at '{printable(entry.path)}'"
                below = spec.source or source
                raise RecipeError(f"{where}.from: expected files, directories and symlinks below '{below}', received {received}")
            moved = evolve(
                entry,
                path=_below(to, entry.path),
                target=_below(to, entry.target) if entry.kind is Kind.HARD_LINK else entry.target,
                mode=0o777 if entry.kind is Kind.SYMLINK else _mode(entry.kind is Kind.DIRECTORY or bool(entry.mode & 0o100)),
                uid=uid,
                gid=gid,
                xattrs={},
            )
            yield moved, _pieces(data) if entry.kind is Kind.REGULAR else ()
        for warning in opened.warnings.texts():
            output.say(f"weenv: {spec.source or source}: {warning}")


def _below(to: bytes, path: bytes) -> bytes:
    path = os.path.normpath(path)
    return to if path == b"." else os.path.join(to, path)


def _pieces(data: Data) -> Iterator[bytes]:
    while piece := data.read(_COPY_BYTES):
        yield piece
