"""Where other tools show another tree than weefs, as predicates: what the differential tests keep out, and no more.

Each has its paragraph in docs/decisions/0002-merging-corner-cases.md and, in the tests that use it, an example that
shows the difference.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import attrs
from layer_model import Row as ModelRow
from layer_model import expected
from strategies import Layer, Member, plain_paths
from weefs_harness import Row, open_layers

from layerformat import Entry, Kind, encode, read_tar, spec
from weefs.merge import Directory, File, PlanRefused, View

NS_PER_S = 1_000_000_000
EARLIEST_S = -(2**31)
CHUNK_SIZE = 8192


# Members, for examples


def file(path: bytes, data: bytes = b"data", mode: int = 0o644, **fields: object) -> Member:
    return Member(Entry(path=path, kind=Kind.REGULAR, mode=mode, size=len(data), **fields), data)  # type: ignore[arg-type]


def directory(path: bytes, mode: int = 0o755, **fields: object) -> Member:
    return Member(Entry(path=path, kind=Kind.DIRECTORY, mode=mode, **fields))  # type: ignore[arg-type]


def symlink(path: bytes, target: bytes, mode: int = 0o777) -> Member:
    return Member(Entry(path=path, kind=Kind.SYMLINK, mode=mode, target=target))


def link(path: bytes, target: bytes) -> Member:
    return Member(Entry(path=path, kind=Kind.HARD_LINK, target=target))


def whiteout(path: bytes) -> Member:
    """Hides `path`."""
    parent, slash, name = path.rpartition(b"/")
    return Member(Entry(path=parent + slash + b".wh." + name, kind=Kind.REGULAR))


def opaque(path: bytes) -> Member:
    """Makes the directory `path` opaque."""
    return Member(Entry(path=path + b"/.wh..wh..opq", kind=Kind.REGULAR))


def converted(tar: bytes) -> bytes:
    """The layer of an archive. UnsupportedEntry, SourceError."""
    blob = io.BytesIO()
    encode(read_tar(io.BytesIO(tar)), blob, chunk_size=CHUNK_SIZE)
    return blob.getvalue()


# Rows


def on_disk(row: Row) -> Row:
    """ext4 begins in 1901 (-2^31 s) and cuts the fraction off in its first second; weefs does not."""
    if row.mtime_ns // NS_PER_S == EARLIEST_S:
        return attrs.evolve(row, mtime_ns=EARLIEST_S * NS_PER_S)
    return row


def without_attributes(row: Row) -> Row:
    """What is left of a directory of which only the names and the type are to be compared."""
    return attrs.evolve(row, mode=row.mode & ~0o7777, uid=0, gid=0, mtime_ns=0, xattrs=())


# Of a merged view


def is_implicit(node: File | Directory) -> bool:
    """Its attributes come from no entry of any layer."""
    return bool(node.inode.flags & spec.IMPLICIT)


def is_hollow(node: File | Directory) -> bool:
    """A directory that no entry of a file or directory asks for, only whiteouts below it (or nothing any more)."""
    pending = [node]
    while pending:
        node = pending.pop()
        if not isinstance(node, Directory) or not is_implicit(node):
            return False
        pending += node.children.values()
    return True


# Of a stack


def retypes_a_directory(stack: list[Layer]) -> bool:
    """A layer whose archive has one path first as something else and then as a directory, above a layer that has it."""
    below: set[bytes] = set()
    for layer in stack:
        others: set[bytes] = set()
        for member in layer:
            path = plain(member.entry.path)
            if member.entry.kind is not Kind.DIRECTORY:
                others.add(path)
            elif path in others and any(known == path or known.startswith(path + b"/") for known in below):
                return True
        below |= plain_paths(layer)
    return False


def removed_and_implied(stack: list[Layer]) -> set[bytes]:
    """Directories that a layer has a whiteout for and no entry of their own, only something below them."""
    result: set[bytes] = set()
    for layer in stack:
        model = expected(layer)
        for member in layer:
            parent, slash, name = plain(member.entry.path).rpartition(b"/")
            row = model.get(parent + slash + name.removeprefix(b".wh."))
            if name.startswith(b".wh.") and row is not None and row.implicit:
                result.add(parent + slash + name.removeprefix(b".wh."))
    return result


def plain(path: bytes) -> bytes:
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))


def goes_through_a_lower_symlink(blobs: list[bytes]) -> bool:
    """A layer has something below a name that a layer below it has as a symlink; of layers that fit, as far as they
    do.
    """
    layers = open_layers(blobs)
    for index in range(1, len(layers)):
        try:
            below = dict(View(layers[:index]).walk())
        except PlanRefused:
            return False
        for path, number in layers[index].walk():
            if number is None or not layers[index].inode(number).flags & spec.IMPLICIT:
                continue
            node = below.get(path)
            if isinstance(node, File) and node.inode.is_symlink:
                return True
    return False


def makes_the_root_opaque(stack: list[Layer]) -> bool:
    """A layer above the base hides everything below it."""
    return any(expected(layer)[b""].opaque for layer in stack[1:])


def has_a_whiteout_below_a_file(stack: list[Layer]) -> bool:
    """A layer has a whiteout below a path that a layer below it has as something else than a directory."""
    others: set[bytes] = set()
    for layer in stack:
        for path, row in expected(layer).items():
            parents = [path[:position] for position, byte in enumerate(path) if byte == ord("/")]
            if row.kind == "whiteout" and not others.isdisjoint(parents):
                return True
        others |= {path for path, row in expected(layer).items() if row.kind not in ("directory", "whiteout")}
    return False


def topmost_is_implicit(models: list[dict[bytes, ModelRow]], path: bytes) -> bool:
    """The highest layer that has the directory has no entry for it."""
    for model in reversed(models):
        row = model.get(path)
        if row is not None and row.kind == "directory":
            return row.implicit
    return False


def models_of(stack: list[Layer]) -> list[dict[bytes, ModelRow]]:
    return [expected(layer) for layer in stack]


@attrs.frozen
class Difference:
    """A path that only one of the two shows (`what` is ""), or an attribute of `Row` that they do not agree on."""

    path: bytes
    what: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        if not self.what:
            return f"{self.path!r}: only {'they show' if self.ours is None else 'weefs shows'} it"
        return f"{self.path!r}: {self.what}: weefs {self.ours!r:.300}, they {self.theirs!r:.300}"


def compare(wanted: dict[bytes, Row], shown: dict[bytes, Row]) -> Iterator[Difference]:
    """What weefs and another tool do not show alike."""
    for path in sorted(wanted.keys() | shown.keys()):
        ours, theirs = wanted.get(path), shown.get(path)
        if ours is None or theirs is None:
            yield Difference(path, "", ours, theirs)
            continue
        for name in attrs.fields_dict(Row):
            if getattr(ours, name) != getattr(theirs, name):
                yield Difference(path, name, getattr(ours, name), getattr(theirs, name))


KINDS = [
    [
        directory(b".", 0o751, mtime_ns=5_000_000_001),
        directory(b"d", 0o1777, uid=1000, gid=70_000, mtime_ns=-1_500_000_000, xattrs={b"user.note": b"\0\xff"}),
        file(b"d/set", b"x" * 9000, 0o4755, uid=1, gid=2, mtime_ns=1_700_000_000_123_456_789),
        symlink(b"d/s", b"../nowhere", 0o640),
        link(b"d/again", b"d/set"),
    ],
    [directory(b"d", 0o700, mtime_ns=7), file(b"d/empty", b""), whiteout(b"d/s"), file(b"new\xff", b"y" * 5000)],
]
"""A named stack with one of each kind, which every tool shows alike: each directory but the root has its entry."""
