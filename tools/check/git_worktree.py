"""Why `git status` reads a whole work tree after packing, how much it would read, and the repair.

git believes that a file is unchanged when its stat data is that of its index entry. Of that data, inode and change time
never survive packing, so every file looks touched and git reads it to make sure: of a lazy root, that fetches all of
it. With `core.checkStat=minimal` git compares only what a layer keeps, size and mtime in whole seconds (`core.trustctime=false`
says less, to programs that know only that). Then the entries must have those, and the index must be younger than every
entry: an entry of the same second or a later one is "racily clean", and is read (git's `Documentation/technical/racy-git.txt`).

A repaired entry is one whose contents were read here and have its object's digest. An entry whose contents differ gets
a time that its file does not have, so that git goes on reading it: an index made younger must not vouch for it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from attrs import frozen

from tools.check.git_index import NS_PER_S, GitIndex, IndexEntry
from tools.check.opening import Plan, position
from weefs.merge import Directory, File, View

SETTINGS = (("core.checkStat", "minimal"), ("core.trustctime", "false"))
"""What makes git compare only what survives packing; the first alone is enough for git itself."""
_COPY_BYTES = 1 << 20
_U32 = 0xFFFFFFFF


@frozen
class Status:
    """Of a file or symlink. `order`: files are best read with it ascending."""

    mode: int
    mtime_ns: int
    size: int
    uid: int
    gid: int
    order: tuple[int, int] = (0, 0)


class WorkTree(Protocol):
    """Files below one directory; no symlink is followed on the way to one."""

    def status(self, path: bytes) -> Status | None:
        """None when there is no such file or symlink."""
        ...

    def contents(self, path: bytes) -> Iterator[bytes]:
        """A file's bytes, or a symlink's target, of a path that has a status."""
        ...

    def will_read(self, paths: Sequence[bytes]) -> None:
        """That their contents are asked for next, in this order."""
        ...


class ViewTree:
    """A directory of a plan's merged view."""

    def __init__(self, plan: Plan, view: View, top: Directory) -> None:
        self._plan = plan
        self._view = view
        self._top = top

    def status(self, path: bytes) -> Status | None:
        file = self._file(path)
        if file is None:
            return None
        inode, layer = file.inode, self._view.layers[file.layer]
        order = (file.layer, position(layer, file.number))
        return Status(inode.mode, inode.total_mtime_ns, inode.size, inode.uid, inode.gid, order)

    def contents(self, path: bytes) -> Iterator[bytes]:
        file = self._file(path)
        if file is None:
            raise FileNotFoundError(path)
        if file.inode.is_symlink:
            yield self._view.target(file)
        elif file.inode.is_regular:
            yield from self._view.layers[file.layer].read_file(file.number)

    def will_read(self, paths: Sequence[bytes]) -> None:
        files = [self._file(path) for path in paths]
        self._plan.announce(file for file in files if file is not None and file.inode.is_regular)

    def _file(self, path: bytes) -> File | None:
        node: File | Directory = self._top
        for name in path.split(b"/"):
            if not isinstance(node, Directory) or name not in node.children:
                return None
            node = node.children[name]
        return node if isinstance(node, File) else None


class DirectoryTree:
    """A directory of the file system."""

    def __init__(self, top: bytes) -> None:
        self._top = top
        self._real: dict[bytes, bool] = {b"": True}

    def status(self, path: bytes) -> Status | None:
        if not self._is_directory(path.rpartition(b"/")[0]):
            return None
        try:
            found = os.lstat(os.path.join(self._top, path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISDIR(found.st_mode):
            return None
        return Status(found.st_mode, found.st_mtime_ns, found.st_size, found.st_uid, found.st_gid, (0, found.st_ino))

    def contents(self, path: bytes) -> Iterator[bytes]:
        full = os.path.join(self._top, path)
        if os.path.islink(full):
            yield os.readlink(full)
            return
        with open(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            while data := file.read(_COPY_BYTES):
                yield data

    def will_read(self, paths: Sequence[bytes]) -> None:
        """They are here."""

    def _is_directory(self, path: bytes) -> bool:
        """Whether it is one, with no symlink on the way."""
        known = self._real.get(path)
        if known is None:
            known = self._is_directory(path.rpartition(b"/")[0])
            if known:
                try:
                    known = stat.S_ISDIR(os.lstat(os.path.join(self._top, path)).st_mode)
                except (FileNotFoundError, NotADirectoryError):
                    known = False
            self._real[path] = known
        return known


@frozen
class StatusCost:
    """What `git status` would do with an index: entries in all, entries whose files it would read, and why.

    stale  entries of a size or mtime that is not their file's
    racy   entries that are not older than the index
    """

    entries: int
    reads: int
    stale: int
    racy: int


def status_cost(index: GitIndex, index_mtime_ns: int, tree: WorkTree, *, minimal: bool) -> StatusCost:
    """`minimal`: the first of `SETTINGS` is set; without it every file is read whose inode is another one now."""
    entries = reads = stale = racy = 0
    for entry in index.entries:
        if not entry.is_checked:
            continue
        entries += 1
        status = tree.status(entry.path)
        if status is None or stat.S_IFMT(status.mode) != stat.S_IFREG or entry.mode >> 12 != 0o10:
            continue  # a symlink's target is metadata; anything else is changed, and git need not read it to know
        if entry.size != status.size & _U32 and entry.size:
            stale += 1  # git knows that it changed
            continue
        is_stale = not _matches(entry, status)
        is_racy = not is_stale and index_mtime_ns // NS_PER_S <= entry.mtime_s
        stale += is_stale
        racy += is_racy
        reads += is_stale or is_racy or not minimal
    return StatusCost(entries, reads, stale, racy)


def _matches(entry: IndexEntry, status: Status) -> bool:
    return (entry.mtime_s, entry.size) == (status.mtime_ns // NS_PER_S & _U32, status.size & _U32)


@frozen
class Refreshed:
    """A repaired index.

    mtime_ns   what the index file's own time must be
    clean      entries that now have their file's stat data
    different  paths whose contents are not those of their object: changed, or converted at the checkout
    missing    entries without a file or symlink of their type
    """

    data: bytes
    mtime_ns: int
    clean: int
    different: tuple[bytes, ...]
    missing: int


def refresh_index(
    index: GitIndex, index_mtime_ns: int, hash_name: str, tree: WorkTree, *, progress: Callable[[int, int], None] | None = None
) -> Refreshed:
    """Gives each entry whose contents are those of its object the stat data of its file. Reads every file once.

    progress  called with the files read and the number of all of them
    """
    checked = [(entry, status) for entry in index.entries if entry.is_checked and (status := _same_type(entry, tree)) is not None]
    checked.sort(key=lambda pair: pair[1].order)
    tree.will_read([entry.path for entry, _ in checked])
    different = []
    youngest_s = index_mtime_ns // NS_PER_S
    for number, (entry, status) in enumerate(checked):
        mtime_ns = status.mtime_ns
        if _object_id(entry.path, status, tree, hash_name) != entry.oid:
            different.append(entry.path)
            mtime_ns += NS_PER_S
        index.set_stat(entry, mtime_ns=mtime_ns, size=status.size, uid=status.uid, gid=status.gid)
        youngest_s = max(youngest_s, mtime_ns // NS_PER_S + 1)
        if progress is not None:
            progress(number + 1, len(checked))
    entries = sum(entry.is_checked for entry in index.entries)
    return Refreshed(
        data=index.to_bytes(),
        mtime_ns=max(index_mtime_ns, youngest_s * NS_PER_S),
        clean=len(checked) - len(different),
        different=tuple(sorted(different)),
        missing=entries - len(checked),
    )


def _same_type(entry: IndexEntry, tree: WorkTree) -> Status | None:
    status = tree.status(entry.path)
    return status if status is not None and stat.S_IFMT(status.mode) == stat.S_IFMT(entry.mode) else None


def _object_id(path: bytes, status: Status, tree: WorkTree, hash_name: str) -> str:
    """The name that git gives these contents as they are, without filters."""
    digest = hashlib.new(hash_name, b"blob %d\0" % status.size)
    for data in tree.contents(path):
        digest.update(data)
    return digest.hexdigest()


def open_index(data: bytes, hash_name: str) -> GitIndex:
    """An index that can be judged and repaired. IndexDamaged; ValueError when its entries are in another file."""
    index = GitIndex(data, hash_name)
    if index.is_split:
        raise ValueError("a split index, whose entries are in another file; `git update-index --no-split-index` joins them")
    return index


