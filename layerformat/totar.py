"""Writes a layer as a tar whose extraction leaves what the original's would.

Two orders matter. Lower links come first, because a hard link to `a` must be made before the layer's own `a` takes that
name: those above them in the tree precede them and are repeated in their place. Then the tree, each directory before
what it holds. Directories without an entry of their own (IMPLICIT) get none here either, so that those of a lower layer
keep their attributes. A further name of an inode states its attributes again, for the extractors that set them from a
link's header; of a link into a lower layer a layer does not know them.
"""

from __future__ import annotations

import graphlib
import stat
from collections.abc import Iterator
from typing import BinaryIO

from . import spec
from .decoder import Layer
from .errors import UnsupportedEntry
from .model import Entry, Kind
from .tarwriter import TarWriter

_COPY_BYTES = 1024 * 1024


def export_tar(layer: Layer, file: BinaryIO) -> int:
    """Writes the layer to `file` as a tar; returns the number of entries.

    FormatError for a damaged chunk, UnsupportedEntry for what a tar cannot say.
    """
    return _Exporter(layer, file).run()


class _Exporter:
    def __init__(self, layer: Layer, file: BinaryIO) -> None:
        self._layer = layer
        self._writer = TarWriter(file)
        self._entries = 0
        self._paths: dict[int, bytes] = {}  # of files with several names: the first that was written

    def run(self) -> int:
        self._export_lower_links()
        for path, number in self._layer.walk():
            if number is None:
                parent, slash, name = path.rpartition(b"/")
                self._add(Entry(path=parent + slash + spec.WHITEOUT_PREFIX + name, kind=Kind.REGULAR, mode=0))
            elif self._paths.get(number) != path:
                self._export(path, number)
        self._writer.close()
        return self._entries

    def _add(self, entry: Entry, data: Iterator[bytes] | None = None) -> None:
        self._writer.add(entry, data if data is not None else ())
        self._entries += 1

    # Lower links

    def _export_lower_links(self) -> None:
        """One name of each; the other names follow with the tree, as hard links to that one."""
        names: dict[int, list[bytes]] = {}
        for path, number in self._layer.walk():
            if number is not None and self._layer.inode(number).is_lower_link:
                names.setdefault(number, []).append(path)
        targets = {number: self._layer.toc.target(number) for number in names}
        firsts = {number: min(paths, key=lambda path: _takes(path, targets[number])) for number, paths in names.items()}
        above: set[bytes] = set()
        for number in _ordered(firsts, targets):
            path = self._paths[number] = firsts[number]
            self._export_above(path, above)
            self._add(Entry(path=path, kind=Kind.HARD_LINK, target=targets[number]))

    def _export_above(self, path: bytes, done: set[bytes]) -> None:
        """The directories above a lower link, those that have entries."""
        for place in _above(path):
            if place not in done:
                done.add(place)
                number = self._layer.lookup(place)
                assert number is not None
                self._export(place, number)

    # Entries

    def _export(self, path: bytes, number: int) -> None:
        inode = self._layer.inode(number)
        if inode.is_directory:
            self._export_directory(path, number)
            return
        if inode.nlink > 1:
            first = self._paths.setdefault(number, path)
            if first != path:
                self._add(self._link(path, number, first))
                return
        if inode.is_regular:
            self._export_regular(path, number)
        else:
            self._add(self._entry(path, number))

    def _export_directory(self, path: bytes, number: int) -> None:
        flags = self._layer.inode(number).flags
        if not flags & spec.IMPLICIT:
            self._add(self._entry(path or b".", number))
        if flags & spec.OPAQUE:
            marker = path + b"/" + spec.OPAQUE_MARKER if path else spec.OPAQUE_MARKER
            self._add(Entry(path=marker, kind=Kind.REGULAR, mode=0))

    def _export_regular(self, path: bytes, number: int) -> None:
        segments = self._layer.toc.segments(number)

        def data() -> Iterator[bytes]:
            for segment in segments:
                for done in range(0, segment.length, _COPY_BYTES):
                    yield self._layer.read_stream(segment.stream_offset + done, min(_COPY_BYTES, segment.length - done))

        self._add(self._entry(path, number), data())

    def _link(self, path: bytes, number: int, first: bytes) -> Entry:
        inode = self._layer.inode(number)
        if inode.is_lower_link:
            return Entry(path=path, kind=Kind.HARD_LINK, target=first)
        return Entry(
            path=path,
            kind=Kind.HARD_LINK,
            mode=stat.S_IMODE(inode.mode),
            uid=inode.uid,
            gid=inode.gid,
            mtime_ns=inode.total_mtime_ns,
            target=first,
        )

    def _entry(self, path: bytes, number: int) -> Entry:
        inode = self._layer.inode(number)
        sparse = None
        if inode.flags & spec.SPARSE:
            sparse = tuple((part.file_offset, part.length) for part in self._layer.toc.segments(number))
        return Entry(
            path=path,
            kind=Kind(stat.S_IFMT(inode.mode) >> 12),
            mode=stat.S_IMODE(inode.mode),
            uid=inode.uid,
            gid=inode.gid,
            mtime_ns=inode.total_mtime_ns,
            rdev=inode.rdev,
            size=inode.size if inode.is_regular else 0,
            target=self._layer.toc.target(number) if inode.is_symlink else b"",
            xattrs=self._layer.toc.xattrs(number),
            sparse=sparse,
        )


def _takes(path: bytes, target: bytes) -> bool:
    """Whether making `path` puts something else in the place of `target`: itself, or a directory above it."""
    return (path + b"/").startswith(target + b"/")


def _above(path: bytes) -> list[bytes]:
    """The directories above a path, but for the root."""
    return [path[:index] for index, byte in enumerate(path) if byte == 0x2F]


def _ordered(firsts: dict[int, bytes], targets: dict[int, bytes]) -> Iterator[int]:
    """The lower links so that each is made before what it names is replaced: by another of them, there or above it, or by a directory
    above another.
    """
    users: dict[bytes, list[int]] = {}
    for number, target in targets.items():
        users.setdefault(target, []).append(number)
    made = {path: number for number, path in firsts.items()}
    before: dict[int, list[int]] = {
        number: [user for place in _above(path) for user in users.get(place, ())] for number, path in firsts.items()
    }
    for target, numbers in users.items():
        for place in (*_above(target), target):
            if place in made:
                before[made[place]] += [user for user in numbers if user != made[place]]
    try:
        return iter(list(graphlib.TopologicalSorter(before).static_order()))
    except graphlib.CycleError as error:
        raise UnsupportedEntry(
            firsts[error.args[1][0]], "a lower link whose place is needed before it can be made: a tar has no order for it"
        ) from None
