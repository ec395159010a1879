"""`weenv group diff`: what differs between the merged views of two groups, and what a node that has one must fetch of
the other.

Metadata decides as far as it can: contents are the same where the same bytes of equal chunks stand at the same place,
and different where whole chunks that stand for each other have different digests. What is left undecided (a file whose
chunks were cut otherwise, a small file gathered with others) is read, the chunks that hold it and no more, so the
answer is exact.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from tools import exits, output, settings

if TYPE_CHECKING:
    from layerformat import Layer
    from registry import Group
    from weefs.merge import Directory, File, View

PIECE_BYTES = 1 << 20
LOWER_LINK = "link to a lower group"
_KINDS = {
    stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "symlink", stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", 0: LOWER_LINK,
}  # fmt: skip


def register(sub: Any) -> None:
    diff = sub.add_parser(
        "diff",
        help="what differs between two groups, and what a node that has the first must fetch of the second",
        description="A: only in REF2; D: only in REF1; M: in both, with what differs. Exit status 0, also when they differ.",
    )
    diff.add_argument("reference", metavar="REF1")
    diff.add_argument("other", metavar="REF2")
    diff.add_argument("--summary", action="store_true", help="numbers only, no paths")
    output.add_format(diff)
    diff.set_defaults(run=run)


@attrs.frozen
class Change:
    """A path that differs. `what` says in which respects: for M one or more of type, contents, mode, owner, mtime,
    xattrs, target, device, links; for A and D empty."""

    kind: Literal["A", "D", "M"]
    path: bytes
    what: tuple[str, ...] = ()


@attrs.frozen
class Summary:
    """Numbers of a difference.

    *_files, *_bytes  regular files, each once however many names it has, and their sizes: those that only the one group
                      has, and those of both whose contents differ (bytes: as the second has them)
    fetch_*           what a node that has the first must fetch of the second, stored bytes: chunks with a SHA-256 that
                      the first has not, TOCs of layers that it has not
    size_bytes        all of the second
    """

    added_paths: int
    removed_paths: int
    modified_paths: int
    added_files: int
    added_bytes: int
    removed_files: int
    removed_bytes: int
    modified_files: int
    modified_bytes: int
    fetch_chunks: int
    fetch_chunk_bytes: int
    fetch_toc_bytes: int
    size_bytes: int

    @property
    def fetch_bytes(self) -> int:
        return self.fetch_chunk_bytes + self.fetch_toc_bytes


def run(arguments: argparse.Namespace) -> int:
    from registry import resolve_group
    from registry.tocs import open_groups

    credentials = settings.credentials()
    old, new = (resolve_group(one, credentials=credentials) for one in (arguments.reference, arguments.other))
    with open_groups((old, new), credentials) as (ranges, (old_layers, new_layers)):
        difference = compare(old_layers, new_layers)
        summary = summarise(difference, old, new, old_layers, new_layers)
        read_bytes = ranges.bytes
    if arguments.format == "json":
        output.print_json(_as_json(old, new, difference, summary, with_changes=not arguments.summary))
        return exits.OK
    if not arguments.summary:
        _print_changes(difference.changes)
    _print_summary(summary)
    output.say(f"read to know it: {output.size(read_bytes)}")
    return exits.OK


# ---- comparing ----


@attrs.frozen
class Difference:
    """Changes by path, and the views that they are between; `modified` are the files whose contents differ."""

    changes: tuple[Change, ...]
    old: dict[bytes, File | Directory]
    new: dict[bytes, File | Directory]


def compare(old_layers: Sequence[Layer], new_layers: Sequence[Layer]) -> Difference:
    """What differs between two merged views. Chunks are read where metadata does not decide. RegistryError, FormatError."""
    old_view, new_view = _view(old_layers), _view(new_layers)
    old, new = dict(old_view.walk()), dict(new_view.walk())
    old_links, new_links = _links(old), _links(new)
    contents = _Contents(old_view, new_view)
    changes = [Change("D", path) for path in old.keys() - new.keys()] + [Change("A", path) for path in new.keys() - old.keys()]
    for path in contents.in_order(old, new):
        what = _respects(old_view, new_view, old[path], new[path], contents)
        if old_links.get(path) != new_links.get(path):
            what.append("links")
        if what:
            changes.append(Change("M", path, tuple(what)))
    return Difference(tuple(sorted(changes, key=lambda change: change.path)), old, new)


def _view(layers: Sequence[Layer]) -> View:
    """Hard links to files of lower groups stay what they are: such a group has no whole view of its own."""
    from weefs.merge import PlanRefused, View

    def accept(_refusal: PlanRefused) -> None:
        return None

    return View(layers, refused=accept)


def _links(nodes: dict[bytes, File | Directory]) -> dict[bytes, tuple[bytes, ...]]:
    """Of each path whose file has several names: all of them."""
    from weefs.merge import File

    names: dict[int, list[bytes]] = {}
    for path, node in nodes.items():
        if isinstance(node, File) and node.names > 1:
            names.setdefault(id(node), []).append(path)
    return {path: tuple(sorted(paths)) for paths in names.values() for path in paths}


def _respects(
    old_view: View, new_view: View, old: File | Directory, new: File | Directory, contents: _Contents
) -> list[str]:
    """In which respects two nodes of one path differ."""
    before, after = old.inode, new.inode
    if stat.S_IFMT(before.mode) != stat.S_IFMT(after.mode):
        return ["type"]
    what = []
    if before.is_regular and contents.differ(old, new):
        what.append("contents")
    if (before.is_symlink or before.is_lower_link) and _target(old_view, old) != _target(new_view, new):
        what.append("target")
    if before.rdev != after.rdev:
        what.append("device")
    if stat.S_IMODE(before.mode) != stat.S_IMODE(after.mode):
        what.append("mode")
    if (before.uid, before.gid) != (after.uid, after.gid):
        what.append("owner")
    if before.total_mtime_ns != after.total_mtime_ns:
        what.append("mtime")
    if _xattrs(old_view, old) != _xattrs(new_view, new):
        what.append("xattrs")
    return what


def _target(view: View, node: File | Directory) -> bytes:
    return view.layers[node.layer].toc.target(node.number)


def _xattrs(view: View, node: File | Directory) -> dict[bytes, bytes]:
    return view.layers[node.layer].toc.xattrs(node.number)


# ---- contents ----


@attrs.frozen
class Piece:
    """A run of a file's data: `length` bytes at `file_offset` are those at `chunk_offset` of the chunk with a digest."""

    file_offset: int
    length: int
    chunk_offset: int
    sha256: bytes
    is_whole: bool
    """It is all of the chunk."""

    @property
    def end(self) -> int:
        return self.file_offset + self.length


class _Contents:
    """Compares files of two views; each pair of inodes once."""

    def __init__(self, old: View, new: View) -> None:
        self._old = old
        self._new = new
        self._starts = {id(layer): [chunk.stream_offset for chunk in layer.toc.chunks] for layer in (*old.layers, *new.layers)}
        self._known: dict[tuple[int, int, int, int], bool] = {}

    def in_order(self, old: dict[bytes, File | Directory], new: dict[bytes, File | Directory]) -> list[bytes]:
        """The paths of both, in the order of the new contents: chunks that hold many files are then read once."""

        def place(path: bytes) -> tuple[int, int]:
            node = new[path]
            segments = self._new.layers[node.layer].toc.segments(node.number) if node.inode.is_regular else ()
            return node.layer, segments[0].stream_offset if segments else 0

        return sorted(old.keys() & new.keys(), key=place)

    def differ(self, old: File | Directory, new: File | Directory) -> bool:
        """Whether two regular files have different contents. FormatError, RegistryError: a chunk cannot be read."""
        before, after = self._old.layers[old.layer], self._new.layers[new.layer]
        if old.inode.size != new.inode.size:
            return True
        if before is after and old.number == new.number:
            return False
        key = (old.layer, old.number, new.layer, new.number)
        if key not in self._known:
            self._known[key] = self._differ(before, old.number, after, new.number)
        return self._known[key]

    def _differ(self, old: Layer, old_number: int, new: Layer, new_number: int) -> bool:
        before, after = self.pieces(old, old_number), self.pieces(new, new_number)
        if before == after:
            return False
        by_place = {(piece.file_offset, piece.length): piece.sha256 for piece in before if piece.is_whole}
        for piece in after:
            if piece.is_whole and by_place.get((piece.file_offset, piece.length), piece.sha256) != piece.sha256:
                return True
        return any(
            old.read(old_number, offset, size) != new.read(new_number, offset, size)
            for offset, size in undecided(before, after)
        )

    def pieces(self, layer: Layer, number: int) -> list[Piece]:
        """A file's data by chunks; what is not there is zero."""
        starts = self._starts[id(layer)]
        found = []
        for segment in layer.toc.segments(number):
            stop = segment.stream_offset + segment.length
            index = max(0, bisect.bisect_right(starts, segment.stream_offset) - 1)
            while index < len(starts) and starts[index] < stop:
                chunk = layer.toc.chunks[index]
                first = max(segment.stream_offset, chunk.stream_offset)
                last = min(stop, chunk.stream_offset + chunk.raw_size)
                if first < last:
                    is_whole = last - first == chunk.raw_size
                    at = segment.file_offset + first - segment.stream_offset
                    found.append(Piece(at, last - first, first - chunk.stream_offset, chunk.sha256, is_whole))
                index += 1
        return found


def undecided(before: Sequence[Piece], after: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """The ranges of a file, offset and size, of which the pieces of two versions do not say that they are the same."""
    cuts = sorted({edge for piece in (*before, *after) for edge in (piece.file_offset, piece.end)})
    source_of = _locator(before), _locator(after)
    for begin, end in itertools.pairwise(cuts):
        if source_of[0](begin) != source_of[1](begin):
            yield from ((at, min(PIECE_BYTES, end - at)) for at in range(begin, end, PIECE_BYTES))


def _locator(pieces: Sequence[Piece]) -> Callable[[int], tuple[bytes, int] | None]:
    """From an offset in the file to the chunk's digest and the place in it; None in a hole."""
    starts = [piece.file_offset for piece in pieces]

    def locate(offset: int) -> tuple[bytes, int] | None:
        index = bisect.bisect_right(starts, offset) - 1
        if index < 0 or offset >= pieces[index].end:
            return None
        return pieces[index].sha256, pieces[index].chunk_offset + offset - pieces[index].file_offset

    return locate


# ---- numbers ----


def summarise(
    difference: Difference, old: Group, new: Group, old_layers: Sequence[Layer], new_layers: Sequence[Layer]
) -> Summary:
    """The numbers of a difference."""
    from registry.tocs import stored_chunks

    def files(nodes: dict[bytes, File | Directory], kind: str) -> tuple[int, int]:
        chosen = (nodes[one.path] for one in difference.changes if one.kind == kind and (kind != "M" or "contents" in one.what))
        sizes = {id(node): node.inode.size for node in chosen if node.inode.is_regular}
        return len(sizes), sum(sizes.values())

    kinds = [change.kind for change in difference.changes]
    (added, added_bytes), (removed, removed_bytes), (modified, modified_bytes) = (
        files(difference.new, "A"), files(difference.old, "D"), files(difference.new, "M")
    )  # fmt: skip
    known = stored_chunks(old_layers).keys()
    missing = {digest: size for digest, size in stored_chunks(new_layers).items() if digest not in known}
    held = {layer.digest for layer in old.layers}
    tocs = {
        layer.digest: opened.footer.toc_stored_size
        for layer, opened in zip(new.layers, new_layers, strict=True)
        if layer.digest not in held
    }
    return Summary(
        added_paths=kinds.count("A"),
        removed_paths=kinds.count("D"),
        modified_paths=kinds.count("M"),
        added_files=added,
        added_bytes=added_bytes,
        removed_files=removed,
        removed_bytes=removed_bytes,
        modified_files=modified,
        modified_bytes=modified_bytes,
        fetch_chunks=len(missing),
        fetch_chunk_bytes=sum(missing.values()),
        fetch_toc_bytes=sum(tocs.values()),
        size_bytes=sum({layer.digest: layer.size_bytes for layer in new.layers}.values()),
    )


# ---- showing ----


def _as_json(old: Group, new: Group, difference: Difference, summary: Summary, *, with_changes: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"from": old.reference, "to": new.reference}
    if with_changes:
        result["changes"] = [_change_as_json(change, difference) for change in difference.changes]
    return result | {"summary": attrs.asdict(summary) | {"fetch_bytes": summary.fetch_bytes}}


def _change_as_json(change: Change, difference: Difference) -> dict[str, Any]:
    nodes = [side.get(change.path) for side in (difference.old, difference.new)]
    kinds = [None if node is None else _KINDS[stat.S_IFMT(node.inode.mode)] for node in nodes]
    return {"kind": change.kind, "path": _shown(change.path), "what": list(change.what), "from": kinds[0], "to": kinds[1]}


def _shown(path: bytes) -> str:
    from layerformat import printable

    return printable(path, whole=True) or "/"


def _print_changes(changes: Sequence[Change]) -> None:
    for change in changes:
        print(f"{change.kind} {_shown(change.path)}" + (f"  {', '.join(change.what)}" if change.what else ""))


def _print_summary(summary: Summary) -> None:
    def files(number: int, size: int) -> str:
        return f"{number} files, {output.size(size)}"

    print(f"added     {summary.added_paths} paths, of them {files(summary.added_files, summary.added_bytes)}")
    print(f"removed   {summary.removed_paths} paths, of them {files(summary.removed_files, summary.removed_bytes)}")
    print(f"modified  {summary.modified_paths} paths; contents of {files(summary.modified_files, summary.modified_bytes)}")
    print(
        f"to fetch  {output.size(summary.fetch_bytes)} of {output.size(summary.size_bytes)} "
        f"({output.share(summary.fetch_bytes, summary.size_bytes)}): {summary.fetch_chunks} chunks of "
        f"{output.size(summary.fetch_chunk_bytes)}, metadata {output.size(summary.fetch_toc_bytes)}"
    )
