"""The merged view, slow and obvious: what csrc/plan.c computes, over the reference decoder, with dictionaries.

The oracle of the tests and the tree behind `weefs.reference`. Layers are applied whole, from the base up, directories
before everything else, to a tree of `Directory` and `File` nodes. A file is one `File` object however many names it
has, so its link count is the number of names. """

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence

import attrs

from layerformat import Inode, Layer, printable
from weefs.errors import WeefsError

MAX_SYMLINKS = 40


class PlanRefused(WeefsError):
    """Layers that do not fit on top of each other. `layer` and `number`: the inode that does not."""

    def __init__(self, message: str, layer: int, number: int) -> None:
        super().__init__(message)
        self.layer = layer
        self.number = number


@attrs.define(eq=False)
class File:
    """Anything that is not a directory: inode `number` of `layers[layer]`."""

    layer: int
    number: int
    inode: Inode
    names: int = 0


@attrs.define(eq=False)
class Directory:
    """`layer` and `number` say whose attributes it has."""

    layer: int
    number: int
    inode: Inode
    parent: Directory | None
    children: dict[bytes, File | Directory] = attrs.field(factory=dict)

    @property
    def subdirectories(self) -> int:
        return sum(isinstance(child, Directory) for child in self.children.values())


def _raise(refusal: PlanRefused) -> None:
    raise refusal


class View:
    """The merged view of layers, base first.

    refused  is given what does not fit: by default it is raised. When it returns, a lower link that leads nowhere is
             shown as itself, and a directory below a symlink that leads nowhere takes its place.
    before   is called with the view and the number of each layer but the first, before that layer is applied.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        refused: Callable[[PlanRefused], None] = _raise,
        before: Callable[[View, int], None] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self._refused = refused
        self._files: dict[tuple[int, int], File] = {}
        self.root = self._copy(0, 0, None)
        for index in range(1, len(layers)):
            if before is not None:
                before(self, index)
            self._resolve_lower_links(index)
            self._apply(index, 0, self.root)
        self._count_names()

    # ---- walking ----

    def walk(self) -> Iterator[tuple[bytes, File | Directory]]:
        """Every path, parents first; the root is b''."""
        pending: list[tuple[bytes, File | Directory]] = [(b"", self.root)]
        while pending:
            path, node = pending.pop()
            yield path, node
            if isinstance(node, Directory):
                pending += [(path + b"/" + name if path else name, child) for name, child in sorted(node.children.items(), reverse=True)]

    def target(self, file: File) -> bytes:
        return self.layers[file.layer].toc.target(file.number)

    def lookup(self, path: bytes, *, at: Directory | None = None, follow: bool = True) -> File | Directory | None:
        """What a path leads to inside the root, as a process there would find it; None when it leads nowhere.

        at      where a relative path begins; the root if not given
        follow  a symlink at its end too
        """
        try:
            return self._walk(at or self.root, path, follow=follow, links=[0])
        except LookupError:
            return None

    def _count_names(self) -> None:
        for _, node in self.walk():
            if isinstance(node, File):
                node.names += 1

    # ---- building ----

    def _file(self, layer: int, number: int) -> File:
        """The file that an inode of a layer is; a lower link was resolved before its layer is applied."""
        found = self._files.get((layer, number))
        if found is None:
            inode = self.layers[layer].inode(number)
            if inode.is_lower_link:
                self._refused(self._refusal(layer, number, "there is no layer below"))
            found = self._files[layer, number] = File(layer, number, inode)
        return found

    def _copy(self, layer: int, number: int, parent: Directory | None) -> Directory:
        """A directory as one layer has it, with everything below."""
        top = Directory(layer, number, self.layers[layer].inode(number), parent)
        pending = [top]
        while pending:
            directory = pending.pop()
            for dirent in self.layers[layer].listdir(directory.number):
                if dirent.inode is None:
                    continue
                inode = self.layers[layer].inode(dirent.inode)
                if inode.is_directory:
                    pending.append(Directory(layer, dirent.inode, inode, directory))
                    directory.children[dirent.name] = pending[-1]
                else:
                    directory.children[dirent.name] = self._file(layer, dirent.inode)
        return top

    def _apply(self, layer: int, number: int, target: Directory) -> None:
        """Merges a directory of a layer, and what is below it, into `target`. Not recursive: a path can have 2,048 levels."""
        steps = [self._merges(layer, number, target)]
        while steps:
            below = next(steps[-1], None)
            if below is None:
                steps.pop()
            else:
                steps.append(self._merges(layer, *below))

    def _merges(self, layer: int, number: int, target: Directory) -> Iterator[tuple[int, Directory]]:
        """Merges one directory; yields the directories below it that are to be merged, when they are to be."""
        inode = self.layers[layer].inode(number)
        if not inode.flags & IMPLICIT:
            target.layer, target.number, target.inode = layer, number, inode
        if inode.flags & OPAQUE:
            target.children.clear()
        dirents = self.layers[layer].listdir(number)
        merged = set()
        for dirent in dirents:
            if dirent.inode is not None and self.layers[layer].inode(dirent.inode).is_directory and dirent.name in target.children:
                below = self._below(layer, dirent.inode, dirent.name, target)
                if below is not None:
                    yield dirent.inode, below
                    merged.add(dirent.name)
        for dirent in dirents:
            if dirent.name in merged:
                continue
            target.children.pop(dirent.name, None)
            if dirent.inode is None:
                continue
            is_directory = self.layers[layer].inode(dirent.inode).is_directory
            target.children[dirent.name] = self._copy(layer, dirent.inode, target) if is_directory else self._file(layer, dirent.inode)

    def _below(self, layer: int, number: int, name: bytes, target: Directory) -> Directory | None:
        """The directory that a layer's directory is merged into; None when it replaces what is there."""
        inode = self.layers[layer].inode(number)
        there = target.children[name]
        implicit = bool(inode.flags & IMPLICIT)
        if isinstance(there, Directory):
            return None if inode.flags & OPAQUE and not implicit else there
        if implicit and there.inode.is_symlink:
            found = self.lookup(name, at=target)
            if isinstance(found, Directory):
                return found
            self._refused(
                PlanRefused(
                    f"layer {layer} of the plan has entries below '{printable(name)}', which is a symlink that leads to no directory",
                    layer,
                    number,
                )
            )
        return None

    def _resolve_lower_links(self, layer: int) -> None:
        toc = self.layers[layer].toc
        for number, inode in enumerate(toc.inodes):
            if not inode.is_lower_link:
                continue
            found = self.lookup(toc.target(number), follow=False)
            if not isinstance(found, File):
                self._refused(self._refusal(layer, number, "no layer below it has that file"))
                found = File(layer, number, inode)
            self._files[layer, number] = found

    def _refusal(self, layer: int, number: int, why: str) -> PlanRefused:
        target = printable(self.layers[layer].toc.target(number))
        return PlanRefused(
            f"layer {layer} of the plan has a hard link to '{target}', which must be a file of a layer below it: {why}", layer, number
        )

    def _walk(self, at: Directory, path: bytes, *, follow: bool, links: list[int]) -> File | Directory:
        """A lookup inside the root. LookupError when it leads nowhere."""
        if path.startswith(b"/"):
            at = self.root
        node: File | Directory = at
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        for position, part in enumerate(parts):
            if not isinstance(node, Directory):
                raise LookupError(path)
            at = node
            if part == b"..":
                node = at.parent or at
                continue
            if part not in at.children:
                raise LookupError(path)
            node = at.children[part]
            last = position == len(parts) - 1
            if isinstance(node, File) and node.inode.is_symlink and (follow or not last):
                links[0] += 1
                if links[0] > MAX_SYMLINKS:
                    raise LookupError(path)
                node = self._walk(at, self.target(node), follow=True, links=links)
        return node


OPAQUE, IMPLICIT = 1, 2
"""docs/format.md §3.2."""


def shown_mode(node: File | Directory) -> int:
    """st_mode: a symlink has all permission bits, as every filesystem of Linux gives it, whatever its layer says."""
    return stat.S_IFLNK | 0o777 if node.inode.is_symlink else node.inode.mode


def link_count(node: File | Directory) -> int:
    """st_nlink: names of a file; 2 and the subdirectories of a directory."""
    return node.names if isinstance(node, File) else 2 + node.subdirectories

