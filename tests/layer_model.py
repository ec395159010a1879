"""A second, slow opinion on what a layer's entries mean (docs/format.md §6): a flat dictionary of paths, and nothing
shared with the tree.

`expected` says what a list of members leaves; `described` says the same of a decoded layer. Both give `Row` values by
path, so that two opinions are compared with `==`.
"""

from __future__ import annotations

import posixpath
from typing import Any

from attrs import define, field, frozen
from strategies import Layer, Member

from layerformat import Entry, Kind, spec
from layerformat import Layer as LayerFile


@frozen
class Row:
    """Everything that can be said about one path. `group`: every path of the same file, for link groups."""

    kind: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: int = 0
    size: int = 0
    target: bytes = b""
    content: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    opaque: bool = False
    implicit: bool = False
    holes: tuple[tuple[int, int], ...] | None = None
    group: tuple[bytes, ...] = ()


@define(eq=False)
class _File:
    member: Member | None  # None: a lower link
    lower: bytes = b""


@define
class _Model:
    """Paths without leading slash; the root is b''. Directories in `directories`, everything else in `files`."""

    directories: dict[bytes, Entry | None] = field(factory=lambda: {b"": None})
    files: dict[bytes, _File] = field(factory=dict)
    whiteouts: set[bytes] = field(factory=set)
    opaque: set[bytes] = field(factory=set)

    def resolve(self, path: bytes) -> bytes:
        """The path with every symlink of this layer followed, the last name's too."""
        done = b""
        rest = [part for part in path.split(b"/") if part not in (b"", b".")]
        while rest:
            name = rest.pop(0)
            if name == b"..":
                done = posixpath.dirname(done)
                continue
            here = posixpath.join(done, name)
            file = self.files.get(here)
            if file is not None and file.member is not None and file.member.entry.kind is Kind.SYMLINK:
                target = file.member.entry.target
                if target.startswith(b"/"):
                    done = b""
                rest = [part for part in target.split(b"/") if part not in (b"", b".")] + rest
            else:
                done = here
        return done

    def place(self, path: bytes) -> bytes:
        """The path with the symlinks above its last name followed."""
        parent, name = posixpath.split(b"/".join(part for part in path.split(b"/") if part not in (b"", b".")))
        return posixpath.join(self.resolve(parent), name)

    def make_parents(self, path: bytes) -> None:
        while path:
            path = posixpath.dirname(path)
            self.directories.setdefault(path, None)

    def forget(self, path: bytes) -> None:
        below = path + b"/"
        for table in (self.directories, self.files):
            for known in [known for known in table if known == path or known.startswith(below)]:
                del table[known]
        self.opaque = {known for known in self.opaque if known != path and not known.startswith(below)}
        self.whiteouts = {known for known in self.whiteouts if not known.startswith(below)}

    def apply(self, member: Member) -> None:
        entry = member.entry
        names = [part for part in entry.path.split(b"/") if part not in (b"", b".")]
        if not names:
            self.directories[b""] = entry
            return
        if any(name.startswith(b".wh..wh.") and name != b".wh..wh..opq" for name in names):
            return
        path = self.place(entry.path)
        parent, name = posixpath.split(path)
        if name == b".wh..wh..opq":
            self.make_parents(path)
            self.opaque.add(parent)
        elif name.startswith(b".wh."):
            self.make_parents(path)
            self.whiteouts.add(posixpath.join(parent, name[4:]))
        elif entry.kind is Kind.DIRECTORY:
            if path in self.files:
                self.forget(path)
            self.make_parents(path)
            self.directories[path] = entry
        else:
            self.apply_file(path, member)

    def apply_file(self, path: bytes, member: Member) -> None:
        file = _File(member)
        self.make_parents(path)
        if member.entry.kind is Kind.HARD_LINK:
            target = self.place(member.entry.target)
            file = self.files[target] if target in self.files else _File(None, target)
        self.forget(path)
        self.files[path] = file

    def rows(self) -> dict[bytes, Row]:
        rows = {}
        for path, entry in self.directories.items():
            opaque = path in self.opaque or path in self.whiteouts
            if entry is None:
                rows[path] = Row("directory", mode=0o755, opaque=opaque, implicit=True)
            else:
                rows[path] = Row("directory", opaque=opaque, **_attributes(entry))
        for path, file in self.files.items():
            group = tuple(sorted(other for other, known in self.files.items() if known is file))
            rows[path] = _file_row(file, group)
        for path in self.whiteouts - rows.keys():
            rows[path] = Row("whiteout")
        return rows


def _attributes(entry: Entry) -> dict[str, Any]:
    return {
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime_ns": entry.mtime_ns,
        "xattrs": tuple(sorted(entry.xattrs.items())),
    }


def _file_row(file: _File, group: tuple[bytes, ...]) -> Row:
    if file.member is None:
        return Row("lower link", target=file.lower, size=len(file.lower), group=group)
    entry = file.member.entry
    common = _attributes(entry) | {"group": group, "rdev": entry.rdev, "target": entry.target}
    if entry.kind is Kind.REGULAR:
        return Row("regular", size=entry.size, content=file.member.content(), holes=entry.sparse, **common)
    return Row(entry.kind.name.lower(), size=len(entry.target), **common)


def expected(layer: Layer) -> dict[bytes, Row]:
    """What the members of a layer leave."""
    model = _Model()
    for member in layer:
        model.apply(member)
    return model.rows()


def described(layer: LayerFile) -> dict[bytes, Row]:
    """What a decoded layer says."""
    groups: dict[int, list[bytes]] = {}
    for path, number in layer.walk():
        if number is not None:
            groups.setdefault(number, []).append(path)
    rows = {}
    for path, number in layer.walk():
        assert layer.lookup(path) == number
        if number is None:
            rows[path] = Row("whiteout")
            continue
        inode = layer.inode(number)
        group = () if inode.is_directory else tuple(sorted(groups[number]))
        if inode.is_lower_link:
            rows[path] = Row("lower link", target=layer.toc.target(number), size=inode.size, group=group)
            continue
        holes = None
        if inode.flags & spec.SPARSE:
            holes = tuple((part.file_offset, part.length) for part in layer.toc.segments(number))
        rows[path] = Row(
            Kind(inode.mode >> 12).name.lower(),
            mode=inode.mode & 0o7777,
            uid=inode.uid,
            gid=inode.gid,
            mtime_ns=inode.total_mtime_ns,
            rdev=inode.rdev,
            size=inode.size,
            target=layer.toc.target(number) if inode.is_symlink else b"",
            content=layer.read(number, 0, inode.size) if inode.is_regular else b"",
            xattrs=tuple(layer.toc.xattrs(number).items()),
            opaque=bool(inode.flags & spec.OPAQUE),
            implicit=bool(inode.flags & spec.IMPLICIT),
            holes=holes,
            group=group,
        )
    return rows
