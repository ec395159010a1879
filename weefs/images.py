"""The EROFS images of a cache: metadata of layers and plans, for kernels that stack them themselves (docs/views.md).

    <cache>/erofs/<version>-<digest of the TOC, hex>.erofs      a layer
    <cache>/erofs/<version>-plan-<plan id>.erofs                a plan, in one
    <cache>/erofs/boot                                          the boot in which they were written

An image is a function of its TOCs and of the writer's version, so its name says what is in it. It is written under another name and
renamed; it is not synced, because it can be written again: at each use its first block (with its checksum), its size and what it is of
are looked at, and one that is damaged is replaced; and those of an earlier boot are not believed, because the machine may have stopped
before their blocks were on the disk. What a mount holds of a file that was removed or replaced stays valid: the kernel has the inode."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Collection
from pathlib import Path
from weakref import WeakValueDictionary

import attrs

from weefs.cachedir import boot_id
from weefs.core import CoreError, DamagedError, ImageInfo, check_image, write_layer_image
from weefs.fetch import in_thread

VERSION = 1
"""Of the writer, as EROFS_WRITER_VERSION in csrc/erofs.h; the writer's own mark is in each image."""
UNUSED_MAX = 256
"""Images of layers and plans that are not served now, kept for the next time."""


def layer_name(toc_digest: str) -> str:
    """The name of a layer's objects, and of its image inside the core: 32 hexadecimal digits of `sha256:…` of the raw TOC."""
    return toc_digest.removeprefix("sha256:")[:32]


@attrs.frozen
class ImageFile:
    """Where an image is, and the core's name of it."""

    path: Path
    name: str


class Images:
    """The images of one cache directory. One owner, on one event loop; several callers may want one image at once."""

    def __init__(self, cache: Path, *, unused_max: int = UNUSED_MAX) -> None:
        self._directory = cache / "erofs"
        self._unused_max = unused_max
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._counts = {"written": 0, "damaged": 0, "refused": 0, "removed": 0}
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        boot, now = self._directory / "boot", boot_id()
        is_of_this_boot = boot.exists() and boot.read_bytes() == now
        for path in [*self._directory.glob("*.new"), *([] if is_of_this_boot else self._directory.glob("*.erofs"))]:
            path.unlink()
        if not is_of_this_boot:
            boot.write_bytes(now)

    def statistics(self) -> dict[str, int]:
        """Counters since the start."""
        return dict(self._counts)

    async def of_layer(self, toc_digest: str, toc_path: Path) -> ImageFile:
        """The image of the layer whose raw TOC is in this file. CoreError: it has what an image cannot hold; OSError: the disk."""
        name = layer_name(toc_digest)
        image = ImageFile(self._directory / f"{VERSION}-{toc_digest.removeprefix('sha256:')}.erofs", name)
        await self._ensure(image, lambda fd: _write_layer(toc_path, name, fd))
        return image

    async def of_plan(self, plan_id: str, write: Callable[[str, int], ImageInfo]) -> ImageFile:
        """The image of a whole plan; `write` is given the core's name for it and the descriptor. Errors as above."""
        image = ImageFile(self._directory / f"{VERSION}-plan-{plan_id}.erofs", plan_id)
        await self._ensure(image, lambda fd: write(image.name, fd))
        return image

    async def _ensure(self, image: ImageFile, write: Callable[[int], ImageInfo]) -> None:
        lock = self._locks.setdefault(image.path, asyncio.Lock())
        async with lock:
            await in_thread(self._make, image, write)

    def _make(self, image: ImageFile, write: Callable[[int], ImageInfo]) -> None:
        """In a thread, one for each image."""
        if self._is_good(image):
            os.utime(image.path)
            return
        fresh = image.path.with_suffix(".new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write(fd)
            os.rename(fresh, image.path)
        except BaseException as error:
            self._counts["refused"] += isinstance(error, CoreError)
            fresh.unlink()
            raise
        finally:
            os.close(fd)
        self._counts["written"] += 1

    def _is_good(self, image: ImageFile) -> bool:
        try:
            fd = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            check_image(fd, image.name)
        except DamagedError:
            self._counts["damaged"] += 1
            return False
        finally:
            os.close(fd)
        return True

    def shrink(self, used: Collection[Path]) -> int:
        """Removes images that are not in `used`, the longest unused first, down to the bound; the bytes on disk of those that are left.
        Blocks.
        """
        unused = []
        left = 0
        for path in self._directory.glob("*.erofs"):
            status = path.stat()
            left += status.st_blocks * 512
            if path not in used:
                unused.append((status.st_mtime_ns, status.st_blocks * 512, path))
        unused.sort()
        for _, size, path in unused[: max(0, len(unused) - self._unused_max)]:
            path.unlink()
            left -= size
            self._counts["removed"] += 1
        return left


def _write_layer(toc_path: Path, name: str, fd: int) -> ImageInfo:
    with toc_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as toc:
        return write_layer_image(toc, name, fd)
