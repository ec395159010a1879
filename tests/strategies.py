"""The project's one file of hypothesis strategies: layers as lists of tar entries, stacks of layers, and archives in
several dialects.

A layer is drawn entry by entry beside a sketch of the tree so far (`_Sketch`): it knows just enough to choose parents,
link targets and names that collide on purpose, and to keep clear of what is refused. Names come from a small pool, so
that entries replace each other, and from a few awkward ones. `Member` is an entry with its data; a stack is a list of
such lists, base first, in which upper layers hide, replace, link to and change the type of what lower layers hold.

Knobs: `extractable` keeps to what GNU tar can extract onto a file system as root without failing (no file over a full
directory, times and ids that a file system holds); `one_spelling` to paths that GNU tar knows again: it sets a directory's
time when it sees an entry that is not spelled as one below it; `whiteouts` and `lower` bring in what only makes sense above
other layers.
"""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator

from attrs import evolve, field, frozen
from hypothesis import strategies as st

from layerformat import Data, Entry, Kind, TarWriter, encode

NS_PER_S = 1_000_000_000
SMALL_CHUNK = 8192


@frozen
class Member:
    """An entry with its data bytes (of a sparse file: the segments back to back)."""

    entry: Entry
    data: bytes = b""

    def content(self) -> bytes:
        """What the file reads as, holes filled with zeros."""
        if self.entry.sparse is None:
            return self.data
        result = bytearray(self.entry.size)
        position = 0
        for offset, length in self.entry.sparse:
            result[offset : offset + length] = self.data[position : position + length]
            position += length
        return bytes(result)


Layer = list[Member]

# Names, contents, attributes

_COMMON_NAMES = [b"a", b"b", b"c", b"d", b"lib", b"x.py"]
_AWKWARD_NAMES = [
    b"n" * 255,
    b"\xff\xfe-not-utf8",
    "größe-日本".encode(),
    b"two words\nand a line",
    b"percent%3D=equals",
    b"-rf",
    b"..x",
    b"q" * 101,
    b"wh.plain",
]


def names() -> st.SearchStrategy[bytes]:
    """A name of a directory entry."""
    return st.one_of(st.sampled_from(_COMMON_NAMES), st.sampled_from(_COMMON_NAMES + _AWKWARD_NAMES))


def contents() -> st.SearchStrategy[bytes]:
    """A file's bytes: sizes around every boundary of the format at `SMALL_CHUNK`, compressible or not."""
    sizes = st.one_of(st.sampled_from([0, 0, 1, 100, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193, 20_000]), st.integers(0, 300))
    return st.builds(make_content, sizes, st.integers(0, 5), st.booleans())


def make_content(size: int, seed: int, compressible: bool) -> bytes:
    """Bytes that depend on nothing but the arguments."""
    if compressible:
        return (b"line %d of a text\n" % seed * (size // 17 + 1))[:size]
    return random.Random(seed).randbytes(size)


@st.composite
def sparse_files(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...], bytes]:
    """Size, segments (ascending, not touching) and data of a file with at least one hole."""
    position = 0
    segments = []
    for _ in range(draw(st.integers(0, 5))):
        position += draw(st.sampled_from([1, 512, 4096, 10_000]))
        length = draw(st.sampled_from([512, 4096, 5120]))
        segments.append((position, length))
        position += length
    if not segments:
        size = draw(st.sampled_from([1, 4096, 1 << 20]))
    elif draw(st.booleans()):
        size = position + draw(st.sampled_from([1, 4096]))
    else:  # only the segment that ends the file may end inside a block: tools disagree on others (tarwriter.py)
        last = draw(st.sampled_from([1, 100, 512, 5000]))
        size = segments[-1][0] + last
        segments[-1] = (segments[-1][0], last)
    data = make_content(sum(length for _, length in segments), draw(st.integers(0, 5)), False)
    return size, tuple(segments), data


def modes() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([0o644, 0o755, 0o4755, 0o1777, 0, 0o7777]), st.integers(0, 0o7777))


def ids() -> st.SearchStrategy[int]:
    return st.sampled_from([0, 0, 1000, 65535, 65536, 0o7777777, 0o10000000, 2**32 - 2])


def times_ns(*, extractable: bool) -> st.SearchStrategy[int]:
    """Nanoseconds: whole and fractional seconds, before and after the epoch."""
    seconds = st.one_of(st.sampled_from([0, -1, 1, 1_700_000_000, -(2**31), 2**33]), st.integers(-(2**31), 2**33))
    if not extractable:
        seconds = st.one_of(seconds, st.sampled_from([8**11, -(2**62), 2**62]))
    return st.builds(lambda s, ns: s * NS_PER_S + ns, seconds, st.sampled_from([0, 0, 1, 500_000_000, 999_999_999]))


_CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@st.composite
def xattrs(draw: st.DrawFn, kind: Kind) -> dict[bytes, bytes]:
    """Attributes that Linux lets root set on a file of this kind."""
    if draw(st.integers(0, 3)):
        return {}
    result = {}
    namespaces = [b"trusted."] if kind not in (Kind.REGULAR, Kind.DIRECTORY) else [b"user.", b"trusted."]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(namespaces)) + draw(st.sampled_from([b"k", b"note", b"a=b", b"50%", b"\xc3\xa9", b"v" * 100]))
        result[name] = draw(st.sampled_from([b"", b"v", b"\0\xff\n=", b"w" * 300]))
    if kind is Kind.REGULAR and draw(st.booleans()):
        result[b"security.capability"] = _CAPABILITY
    return result


# Layers


@frozen
class _Sketch:
    """The tree so far, roughly: paths of directories, of other files, and of symlinks in the root that lead to a
    directory.

    GNU tar does not always obey the second entry of a directory, makes symlinks that lead upwards only at the end, and
    loses track of directories that it reached by way of a symlink which is replaced: `pinned` and `can_take` keep such
    archives from being compared with it.
    """

    directories: set[bytes] = field(factory=lambda: {b""})
    others: set[bytes] = field(factory=set)
    links: dict[bytes, bytes] = field(factory=dict)
    pinned: set[bytes] = field(factory=set)  # what GNU tar cannot replace or link to reliably once it is there

    def can_take(self, path: bytes, *, extractable: bool) -> bool:
        """Whether an entry may take this path; anything may where GNU tar is not asked."""
        taken = path in self.pinned or path in self.links or path in self.directories
        return not (extractable and taken)

    def remove(self, path: bytes) -> None:
        below = path + b"/"
        for paths in (self.directories, self.others):
            for known in [known for known in paths if known == path or known.startswith(below)]:
                paths.discard(known)
        self.links.pop(path, None)

    def put(self, path: bytes, *, directory: bool) -> None:
        if not (directory and path in self.directories):
            self.remove(path)
        (self.directories if directory else self.others).add(path)
        while path:
            path = path.rpartition(b"/")[0]
            self.directories.add(path)


def _join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


@st.composite
def _places(draw: st.DrawFn, sketch: _Sketch) -> tuple[bytes, bytes]:
    """A parent directory, as an entry may spell it and as it resolves: known, new, or by way of a symlink."""
    parent = draw(st.sampled_from(sorted(sketch.directories)))
    spelled = parent
    usable = sorted(link for link, target in sketch.links.items() if target in sketch.directories)
    if usable and draw(st.integers(0, 3)) == 0:
        spelled = draw(st.sampled_from(usable))
        parent = sketch.links[spelled]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        name = draw(names())
        if _join(parent, name) in sketch.others or len(parent) + len(name) > 3000:
            break
        parent, spelled = _join(parent, name), _join(spelled, name)
    return spelled, parent


def _spellings(path: bytes, *, directory: bool, one: bool = False) -> st.SearchStrategy[bytes]:
    """The ways in which archives write one path; `one`: those that begin with it."""
    if one:
        return st.sampled_from([path, path + b"/"] if directory else [path])
    ways = [
        path,
        path,
        path,
        b"./" + path,
        b"/" + path,
        b"//./" + path,
        path.replace(b"/", b"//"),
        path.replace(b"/", b"/./"),
    ]
    if directory:
        ways += [path + b"/", b"./" + path + b"//"]
    return st.sampled_from(ways)


_NODE_KINDS = [
    Kind.REGULAR,
    Kind.REGULAR,
    Kind.REGULAR,
    Kind.DIRECTORY,
    Kind.DIRECTORY,
    Kind.SYMLINK,
    Kind.FIFO,
    Kind.CHARACTER,
    Kind.BLOCK,
]


@st.composite
def _nodes(draw: st.DrawFn, sketch: _Sketch, *, extractable: bool, one_spelling: bool) -> Member | None:
    spelled, parent = draw(_places(sketch))
    kind = draw(st.sampled_from(_NODE_KINDS))
    name = draw(names())
    target = draw(st.sampled_from([b"a", b"../x", b"/abs/olute", b"\xff", b"t" * 300, b"lib/x.py"]))
    to_directory = kind is Kind.SYMLINK and len(sketch.directories) > 1 and draw(st.booleans())
    if to_directory:
        spelled = parent = b""
        target = draw(st.sampled_from(sorted(sketch.directories - {b""})))
    path = _join(parent, name)
    directory = kind is Kind.DIRECTORY
    if len(target) > 4000 or not sketch.can_take(path, extractable=extractable):
        return None
    sketch.put(path, directory=directory)
    if kind is Kind.SYMLINK and target.startswith((b"/", b"..")):
        sketch.pinned.add(path)
    if to_directory and not (target + b"/").startswith(path + b"/"):
        sketch.links[path] = target
    entry = Entry(
        path=draw(_spellings(_join(spelled, name), directory=directory, one=one_spelling)),
        kind=kind,
        mode=draw(modes()),
        uid=draw(ids()),
        gid=draw(ids()),
        mtime_ns=draw(times_ns(extractable=extractable)),
        rdev=os.makedev(draw(st.sampled_from([1, 4095])), draw(st.sampled_from([0, 255, 256, 2**20 - 1])))
        if kind in (Kind.CHARACTER, Kind.BLOCK)
        else 0,
        target=target if kind is Kind.SYMLINK else b"",
        xattrs=draw(xattrs(kind)),
    )
    if kind is not Kind.REGULAR:
        return Member(entry)
    if draw(st.integers(0, 4)) == 0:
        size, segments, data = draw(sparse_files())
        return Member(evolve(entry, size=size, sparse=segments), data)
    data = draw(contents())
    return Member(evolve(entry, size=len(data)), data)


@st.composite
def _hard_links(
    draw: st.DrawFn, sketch: _Sketch, lower: list[bytes], *, extractable: bool, one_spelling: bool
) -> Member | None:
    targets = sorted(sketch.others) + lower
    if not targets:
        return None
    target = draw(st.sampled_from(targets))
    if target in sketch.directories or (extractable and target in sketch.pinned):
        return None
    parts = target.split(b"/")
    if any(b"/".join(parts[:length]) in sketch.others for length in range(1, len(parts))):
        return None
    spelled, parent = draw(_places(sketch))
    name = draw(names())
    path = _join(parent, name)
    usable = sketch.can_take(path, extractable=extractable)
    if (path + b"/").startswith(target + b"/") or not usable:
        return None
    sketch.put(path, directory=False)
    return Member(
        Entry(
            path=draw(_spellings(_join(spelled, name), directory=False, one=one_spelling)),
            kind=Kind.HARD_LINK,
            target=draw(_spellings(target, directory=False)),
        )
    )


@st.composite
def _whiteouts(draw: st.DrawFn, sketch: _Sketch, lower: list[bytes]) -> Member | None:
    marker = draw(st.sampled_from([b".wh.", b".wh.", b".wh.", b".wh..wh..opq", b".wh..wh.plnk", b".wh..wh.orph"]))
    if draw(st.booleans()) and lower:
        parent, _, name = draw(st.sampled_from(lower)).rpartition(b"/")
    else:
        (_, parent), name = draw(_places(sketch)), draw(names())
    parts = parent.split(b"/")
    if any(b"/".join(parts[:length]) in sketch.others for length in range(1, len(parts) + 1)):
        return None
    if not marker.startswith(b".wh..wh."):
        marker += name
    if marker != b".wh." + name and marker != b".wh..wh..opq":
        return Member(Entry(path=_join(parent, marker), kind=Kind.REGULAR))  # bookkeeping: leaves no trace
    while parent and parent not in sketch.directories:
        sketch.put(parent, directory=True)
    return Member(Entry(path=draw(_spellings(_join(parent, marker), directory=False)), kind=Kind.REGULAR, mode=0))


@st.composite
def layers(
    draw: st.DrawFn,
    *,
    extractable: bool = False,
    one_spelling: bool = False,
    whiteouts: bool = True,
    lower: Iterable[bytes] = (),
    max_entries: int = 14,
) -> Layer:
    """One layer, as its entries in the order of an archive.

    `lower`: paths of the layers below, to hide and to link to.
    """
    sketch = _Sketch()
    lower_paths = sorted(lower)
    members: Layer = []
    for _ in range(draw(st.integers(0, max_entries))):
        choice = draw(st.integers(0, 9))
        member: Member | None
        if choice == 0 and not (extractable and b"" in sketch.pinned):
            sketch.pinned.add(b"")
            path = draw(st.sampled_from([b".", b"./", b"/"]))
            xattr = draw(xattrs(Kind.DIRECTORY))
            member = Member(
                Entry(
                    path=path,
                    kind=Kind.DIRECTORY,
                    mode=draw(modes()),
                    mtime_ns=draw(times_ns(extractable=True)),
                    xattrs=xattr,
                )
            )
        elif choice == 1 and whiteouts:
            member = draw(_whiteouts(sketch, lower_paths))
        elif choice in (2, 3):
            member = draw(_hard_links(sketch, lower_paths, extractable=extractable, one_spelling=one_spelling))
        else:
            member = draw(_nodes(sketch, extractable=extractable, one_spelling=one_spelling))
        if member is not None:
            members.append(member)
    return members


@st.composite
def layer_stacks(draw: st.DrawFn, *, extractable: bool = False, max_layers: int = 4, max_entries: int = 10) -> list[Layer]:
    """Layers from the base to the top; the upper ones hide, replace, link to and change the type of what lies below."""
    stack: list[Layer] = []
    known: set[bytes] = set()
    for _ in range(draw(st.integers(1, max_layers))):
        layer = draw(layers(extractable=extractable, whiteouts=bool(stack), lower=known, max_entries=max_entries))
        stack.append(layer)
        known |= plain_paths(layer)
    return stack


def plain_paths(layer: Layer) -> set[bytes]:
    """The paths that a layer's entries name, plainly spelled; no whiteouts, no root."""
    result = set()
    for member in layer:
        parts = [part for part in member.entry.path.split(b"/") if part not in (b"", b".")]
        if parts and not any(part.startswith(b".wh.") for part in parts):
            result.add(b"/".join(parts))
    return result


# From members to layers and archives


def entries_of(layer: Layer) -> Iterator[tuple[Entry, Data]]:
    """What `encode` takes."""
    for member in layer:
        yield member.entry, io.BytesIO(member.data)


def encode_layer(layer: Layer, *, jobs: int = 1, chunk_size: int = SMALL_CHUNK) -> bytes:
    """The layer file of a list of members."""
    file = io.BytesIO()
    encode(entries_of(layer), file, jobs=jobs, chunk_size=chunk_size)
    return file.getvalue()


def write_pax(layer: Layer) -> bytes:
    """As an archive by our own writer."""
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for member in layer:
            writer.add(member.entry, [member.data])
    return file.getvalue()


_TARFILE_TYPES = {
    Kind.REGULAR: tarfile.REGTYPE,
    Kind.HARD_LINK: tarfile.LNKTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.DIRECTORY: tarfile.DIRTYPE,
    Kind.CHARACTER: tarfile.CHRTYPE,
    Kind.BLOCK: tarfile.BLKTYPE,
    Kind.FIFO: tarfile.FIFOTYPE,
}


def write_tarfile(layer: Layer, *, format: int) -> bytes:
    """As an archive by the standard library's writer, which is independent of ours.

    Sparse files are written out in full.
    """
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for member in layer:
            entry, data = member.entry, member.content()
            info = tarfile.TarInfo(os.fsdecode(entry.path))
            info.type = _TARFILE_TYPES[entry.kind]
            info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
            info.linkname = os.fsdecode(entry.target)
            info.devmajor, info.devminor = os.major(entry.rdev), os.minor(entry.rdev)
            info.size = len(data) if entry.kind is Kind.REGULAR else 0
            seconds, ns = divmod(entry.mtime_ns, NS_PER_S)
            info.mtime = seconds
            if format == tarfile.PAX_FORMAT:
                headers = {
                    "SCHILY.xattr." + os.fsdecode(name.replace(b"%", b"%25").replace(b"=", b"%3D")): os.fsdecode(value)
                    for name, value in entry.xattrs.items()
                }
                if ns:
                    whole, rest = divmod(abs(entry.mtime_ns), NS_PER_S)
                    headers["mtime"] = f"{'-' if entry.mtime_ns < 0 else ''}{whole}.{rest:09d}"
                info.pax_headers = headers
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def weaken(layer: Layer, *, format: int) -> Layer:
    """What is left of a layer when a dialect of the standard library has said it."""
    result = []
    for member in layer:
        entry = evolve(member.entry, size=member.entry.size, sparse=None)
        if format == tarfile.GNU_FORMAT:
            entry = evolve(entry, mtime_ns=entry.mtime_ns // NS_PER_S * NS_PER_S, xattrs={})
        result.append(Member(entry, member.content()))
    return result


def _gnu(layer: Layer) -> bytes:
    return write_tarfile(layer, format=tarfile.GNU_FORMAT)


def _pax(layer: Layer) -> bytes:
    return write_tarfile(layer, format=tarfile.PAX_FORMAT)


DIALECTS: dict[str, tuple[Callable[[Layer], bytes], Callable[[Layer], Layer]]] = {
    "ours": (write_pax, lambda layer: layer),
    "gnu": (_gnu, lambda layer: weaken(layer, format=tarfile.GNU_FORMAT)),
    "pax": (_pax, lambda layer: weaken(layer, format=tarfile.PAX_FORMAT)),
}
"""Per dialect: the writer, and what a layer says once it has been through it."""


def dialects() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(DIALECTS))


def mode_of(kind: Kind, mode: int) -> int:
    """As `st_mode` has it."""
    return stat.S_IFMT(kind << 12) | mode
