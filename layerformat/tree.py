"""The tree that a layer's entries leave: docs/format.md §6, applied one entry after the other.

Pure: entries in, nodes out. It holds metadata only, about half a kilobyte per entry; contents pass by it. A node of a
regular file is handed back to the caller, who says where its data went (`Node.data`). Nodes that are replaced later
simply lose their last name: what they hold in the stream stays there unused, since it may have been written already.

Whiteouts are kept apart from the children, as a set of hidden names per directory, and are reconciled when the tree is
written: `.wh.d` says something different when the same layer also has a directory `d`, whichever of the two comes
first.
"""

from __future__ import annotations

import os
import stat

from . import spec
from .errors import UnsupportedEntry, printable
from .model import Entry, Kind

MAX_SYMLINK_HOPS = 40  # as Linux
DEFAULT_MAX_ENTRIES = 4_000_000

Xattrs = tuple[tuple[bytes, bytes], ...]


class Node:
    """An inode of the layer. `number` is set when the tree is written, `data` (stream offset) when the contents are."""

    __slots__ = (
        "data",
        "flags",
        "gid",
        "mode",
        "mtime_ns",
        "number",
        "rdev",
        "size",
        "sparse",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(self) -> None:
        self.mode = 0
        self.uid = 0
        self.gid = 0
        self.mtime_ns = 0
        self.rdev = 0
        self.size = 0
        self.data = 0
        self.flags = 0
        self.number = -1
        self.target = b""
        self.sparse: tuple[tuple[int, int], ...] | None = None
        self.xattrs: Xattrs = ()


class Directory(Node):
    """A directory of the layer; `path_bytes` is the length of its path, for the limit."""

    __slots__ = ("children", "name", "parent", "path_bytes", "whiteouts")

    def __init__(self, parent: Directory | None, name: bytes) -> None:
        super().__init__()
        self.mode = stat.S_IFDIR | spec.IMPLICIT_MODE
        self.flags = spec.IMPLICIT
        self.children: dict[bytes, Node] = {}
        self.whiteouts: set[bytes] | None = None
        self.parent = self if parent is None else parent
        self.name = name
        self.path_bytes: int = 0 if parent is None else parent.path_bytes + len(name) + 1

    def path(self) -> list[bytes]:
        """The names from the root to here."""
        names: list[bytes] = []
        node = self
        while node.parent is not node:
            names.append(node.name)
            node = node.parent
        names.reverse()
        return names


class LayerTree:
    """Applies entries in order. `root` is the result so far; `entries` counts what was applied.

    max_entries  how many are applied; each takes about 0.6 kB of memory here
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self.root = Directory(None, b"")
        self.entries = 0
        self._xattrs: dict[Xattrs, Xattrs] = {(): ()}
        self._xattr_bytes = 0  # of the different ones: what a small archive can make large

    def apply(self, entry: Entry) -> Node | None:
        """Applies one entry. Returns the node whose data the entry brings, or None when it brings none.

        UnsupportedEntry names what a layer cannot say.
        """
        self.entries += 1
        if self.entries > self._max_entries:
            raise UnsupportedEntry(entry.path, f"the source has more than {self._max_entries:,} entries; allow more with --max-entries")
        components = split_path(entry.path, entry.path)
        if not components:
            if entry.kind is not Kind.DIRECTORY:
                raise UnsupportedEntry(entry.path, "the root of a layer can only be a directory")
            self._set_attributes(self.root, entry)
            return None
        if spec.WHITEOUT_PREFIX in entry.path and self._apply_whiteout(components, entry.path):
            return None
        parent = self._make_parents(components[:-1], entry.path)
        name = components[-1]
        self._check_name(parent, name, entry.path)
        if entry.kind is Kind.DIRECTORY:
            existing = parent.children.get(name)
            if not isinstance(existing, Directory):
                existing = parent.children[name] = Directory(parent, name)
            self._set_attributes(existing, entry)
            return None
        if entry.kind is Kind.HARD_LINK:
            parent.children[name] = self._link_target(entry)
            return None
        node = self._make_node(entry)
        parent.children[name] = node
        return node if entry.kind is Kind.REGULAR else None

    # Names and paths

    def _check_name(self, parent: Directory, name: bytes, path: bytes) -> None:
        if len(name) > spec.MAX_NAME:
            raise UnsupportedEntry(path, f"a name has {len(name)} bytes; at most {spec.MAX_NAME} are possible")
        if parent.path_bytes + len(name) > spec.MAX_PATH:
            raise UnsupportedEntry(path, f"a path of more than {spec.MAX_PATH:,} bytes, symlinks followed")

    def _make_parents(self, components: list[bytes], path: bytes) -> Directory:
        """The directory at `components`: symlinks of this layer are followed, what is missing becomes IMPLICIT."""
        node = self.root
        todo = components[::-1]
        hops = 0
        while todo:
            name = todo.pop()
            child = node.children.get(name)
            if isinstance(child, Directory):
                node = child
            elif name == b"..":
                node = node.parent
            elif name in (b"", b"."):
                continue
            elif child is None:
                if name.startswith(spec.WHITEOUT_PREFIX):
                    raise UnsupportedEntry(path, "a directory above it would have a name that begins with .wh.")
                self._check_name(node, name, path)
                made = Directory(node, name)
                node.children[name] = made
                node = made
            else:
                hops += 1
                node = self._follow(node, child, todo, hops, path, name)
        return node

    def _follow(self, at: Directory, link: Node, todo: list[bytes], hops: int, path: bytes, name: bytes) -> Directory:
        """Pushes the components of a symlink; returns the directory that they start from."""
        if not stat.S_ISLNK(link.mode):
            raise UnsupportedEntry(
                path,
                f"{printable(name)} above it is not a directory in this layer; remove one of the two from the source",
            )
        if hops > MAX_SYMLINK_HOPS:
            raise UnsupportedEntry(path, f"more than {MAX_SYMLINK_HOPS} symlinks above it: a loop")
        todo.extend(reversed(link.target.split(b"/")))
        return self.root if link.target.startswith(b"/") else at

    # Whiteouts

    def _apply_whiteout(self, components: list[bytes], path: bytes) -> bool:
        """True when the entry was a whiteout, an opaque marker or bookkeeping."""
        for name in components[:-1]:
            if name.startswith(spec.AUFS_PREFIX):
                return True
            if name.startswith(spec.WHITEOUT_PREFIX):
                raise UnsupportedEntry(path, f"{printable(name)} is a whiteout and can have nothing below it")
        name = components[-1]
        if not name.startswith(spec.WHITEOUT_PREFIX):
            return False
        if name == spec.OPAQUE_MARKER:
            self._make_parents(components[:-1], path).flags |= spec.OPAQUE
            return True
        if name.startswith(spec.AUFS_PREFIX):
            return True
        hidden = name[len(spec.WHITEOUT_PREFIX) :]
        if hidden in (b"", b".", b".."):
            raise UnsupportedEntry(path, "a whiteout must name what it hides, as .wh.NAME")
        parent = self._make_parents(components[:-1], path)
        self._check_name(parent, hidden, path)
        if parent.whiteouts is None:
            parent.whiteouts = set()
        parent.whiteouts.add(hidden)
        return True

    # Hard links

    def _link_target(self, entry: Entry) -> Node:
        """The node that a hard link names: of this layer, or a new lower link."""
        components = split_path(entry.target, entry.path)
        if not components:
            raise UnsupportedEntry(entry.path, "a hard link to the root; directories can have one name only")
        for name in components:
            if name.startswith(spec.WHITEOUT_PREFIX):
                raise UnsupportedEntry(entry.path, f"a hard link to {printable(name)}, which is a whiteout and not a file")
            if len(name) > spec.MAX_NAME:
                raise UnsupportedEntry(entry.path, f"a hard link to a name of {len(name)} bytes; {spec.MAX_NAME} are possible")
        found = self._find(components, entry.path)
        if isinstance(found, Directory):
            raise UnsupportedEntry(entry.path, f"a hard link to the directory {printable(entry.target)}")
        if isinstance(found, Node):
            return found
        target = b"/".join(found)
        if not 0 < len(target) <= spec.MAX_TARGET:
            raise UnsupportedEntry(entry.path, f"a hard link to a path of {len(target)} bytes; 1 to {spec.MAX_TARGET} are possible")
        node = Node()
        node.flags = spec.LOWER_LINK
        node.target = target
        node.size = len(target)
        return node

    def _find(self, components: list[bytes], path: bytes) -> Node | list[bytes]:
        """What the path names, its last component not followed; or, when this layer lacks it, its path with symlinks resolved."""
        node = self.root
        missing: list[bytes] = []  # components below `node` that this layer does not hold
        todo = components[::-1]
        hops = 0
        while todo:
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if missing:
                    missing.pop()
                else:
                    node = node.parent
                continue
            child = None if missing else node.children.get(name)
            if child is None:
                missing.append(name)
            elif not todo:
                return child
            elif isinstance(child, Directory):
                node = child
            else:
                hops += 1
                node = self._follow(node, child, todo, hops, path, name)
        return node.path() + missing

    # Attributes

    def _make_node(self, entry: Entry) -> Node:
        node = Node()
        self._set_attributes(node, entry)
        kind = entry.kind
        if kind is Kind.REGULAR:
            if not 0 <= entry.size <= spec.MAX_FILE_SIZE:
                raise UnsupportedEntry(entry.path, f"a size of {entry.size} bytes; 0 to {spec.MAX_FILE_SIZE} are possible")
            node.size = entry.size
            if entry.sparse is not None:
                node.sparse = entry.sparse
                node.flags |= spec.SPARSE
        elif kind is Kind.SYMLINK:
            if not 0 < len(entry.target) <= spec.MAX_TARGET or b"\0" in entry.target:
                raise UnsupportedEntry(
                    entry.path,
                    f"a symlink target of {len(entry.target)} bytes; 1 to {spec.MAX_TARGET} without NUL are possible",
                )
            node.target = entry.target
            node.size = len(entry.target)
        elif kind in (Kind.CHARACTER, Kind.BLOCK):
            node.rdev = _checked_rdev(entry)
        elif kind is not Kind.FIFO:
            raise UnsupportedEntry(entry.path, f"a {kind.name.lower()}, which a layer cannot hold; remove it from the source")
        return node

    def _set_attributes(self, node: Node, entry: Entry) -> None:
        """Mode, owner, time and attributes of an entry; an IMPLICIT directory becomes an explicit one."""
        if not 0 <= entry.mode <= 0o7777:
            raise UnsupportedEntry(entry.path, f"permission bits {entry.mode:o}; 0 to 7777 are possible")
        for what, number in (("user", entry.uid), ("group", entry.gid)):
            if not 0 <= number <= spec.MAX_ID:
                raise UnsupportedEntry(entry.path, f"{what} id {number}; 0 to {spec.MAX_ID} are possible")
        if not -(1 << 63) <= entry.mtime_ns // spec.NS_PER_S < 1 << 63:
            raise UnsupportedEntry(entry.path, f"a time of {entry.mtime_ns} ns, beyond 64-bit seconds")
        node.mode = entry.kind << 12 | entry.mode
        node.uid = entry.uid
        node.gid = entry.gid
        node.mtime_ns = entry.mtime_ns
        node.flags &= ~spec.IMPLICIT
        node.xattrs = self._checked_xattrs(entry) if entry.xattrs else ()

    def _checked_xattrs(self, entry: Entry) -> Xattrs:
        if len(entry.xattrs) > spec.MAX_XATTRS:
            raise UnsupportedEntry(entry.path, f"{len(entry.xattrs)} extended attributes; {spec.MAX_XATTRS} are possible")
        for name, value in entry.xattrs.items():
            if not 0 < len(name) <= spec.MAX_XATTR_NAME or b"\0" in name:
                raise UnsupportedEntry(
                    entry.path,
                    f"an extended attribute's name of {len(name)} bytes; 1 to {spec.MAX_XATTR_NAME} without NUL are possible",
                )
            if len(value) > spec.MAX_XATTR_VALUE:
                raise UnsupportedEntry(
                    entry.path,
                    f"extended attribute {printable(name)} of {len(value)} bytes; at most {spec.MAX_XATTR_VALUE} are possible",
                )
        xattrs = tuple(sorted(entry.xattrs.items()))
        known = self._xattrs.setdefault(xattrs, xattrs)
        if known is xattrs:
            self._xattr_bytes += sum(len(name) + len(value) for name, value in xattrs)
            if self._xattr_bytes > spec.MAX_STRINGS:
                raise UnsupportedEntry(
                    entry.path,
                    f"with it the layer has more than {spec.MAX_STRINGS} bytes of extended attributes; split the layer",
                )
        return known


def _checked_rdev(entry: Entry) -> int:
    major, minor = os.major(entry.rdev), os.minor(entry.rdev)
    if major > spec.MAX_MAJOR or minor > spec.MAX_MINOR or entry.rdev < 0:
        raise UnsupportedEntry(entry.path, f"device {major}:{minor}; at most {spec.MAX_MAJOR}:{spec.MAX_MINOR} are possible")
    if entry.kind is Kind.CHARACTER and (major, minor) == (0, 0):
        raise UnsupportedEntry(
            entry.path,
            "a character device 0:0 is a whiteout to overlayfs; state a deletion as .wh.NAME, or say that the "
            "source is an overlay's upper directory",
        )
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def split_path(path: bytes, name: bytes) -> list[bytes]:
    """The components of a path as an archive spells it. `name` is the entry that a refusal names."""
    if b"\0" in path:
        raise UnsupportedEntry(name, "a path with a NUL byte")
    components = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in components:
        raise UnsupportedEntry(name, "a path with .. in it; it could leave the root")
    if sum(map(len, components)) + len(components) - 1 - _marker_bytes(components) > spec.MAX_PATH:
        raise UnsupportedEntry(name, f"a path of more than {spec.MAX_PATH:,} bytes")
    return components


def _marker_bytes(components: list[bytes]) -> int:
    """Bytes of a whiteout's path that are not of the path it speaks of."""
    if not components or not components[-1].startswith(spec.WHITEOUT_PREFIX):
        return 0
    return len(spec.OPAQUE_MARKER) + 1 if components[-1] == spec.OPAQUE_MARKER else len(spec.WHITEOUT_PREFIX)
