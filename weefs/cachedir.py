"""The node cache on disk: one directory per layer, and who may use it.

    <cache>/lock                        held (flock) by the one process that serves from this cache
    <cache>/layers/sha256-<hex>/        <hex>: digest of the layer's blob
        layer.json                      digest, size, source, digest of the TOC: what `weenv cache ls` shows
        toc                             the raw TOC, mapped by the C core
        data                            the logical stream, sparse
        map                             which chunks are present, touched, suspect (csrc/cache.h)
        pinned                          there while the layer is never to be removed, nor its chunks
        lent                            there until a manifest has named the TOC that a peer described (docs/peers.md)
    <cache>/erofs/                      images of metadata: weefs/images.py
    <cache>/profiles/<hex>.json         what was read of a layer: weefs/profiles.py

A layer's directory is made under another name and renamed when its TOC is verified, so that one that is there is whole.
Everything in it can be had again: deleting a directory while nothing serves from the cache costs its transfer and
nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import attrs
import msgspec

from weefs.core import LayerFiles, check_files
from weefs.errors import CacheError, LayerRefused

MAP_HEADER_SIZE = 4096
MAP_MAGIC = b"WEENVMAP"

LENT_MARK = "lent"
"""A file beside a layer's: its TOC is the one that a peer described, and no manifest has said so yet."""


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """layer.json. Sizes in bytes; the digests are `sha256:` + hex, the TOC's is that of its raw bytes."""

    digest: str
    size_bytes: int
    source: str
    toc_digest: str
    toc_size_bytes: int
    content_bytes: int
    chunks: int


@attrs.frozen
class CachedLayer:
    """A layer in the cache as its files show it, without a serving process. Sizes in bytes."""

    record: LayerRecord
    path: Path
    present_chunks: int
    disk_bytes: int
    used_s: float
    """When it was last added to a plan: seconds since the epoch."""
    pinned: bool


def boot_id() -> bytes:
    """The kernel's id of this boot, 16 bytes: what a chunk map of another boot says is not believed."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _lock(path: Path) -> int | None:
    """The locked file's descriptor, or None while another process has it. Its pid is in the file.

    One that was killed keeps its lock until its last thread is gone, and that one may be in the kernel, waiting for an answer that only
    its successor can give. Its lock file is therefore replaced when it has ended but for that.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino != path.stat().st_ino:
            raise BlockingIOError  # replaced meanwhile
        os.pwrite(fd, b"%-10d\n" % os.getpid(), 0)  # not cut off before: on a full disk somebody else takes the block meanwhile
    except (BlockingIOError, FileNotFoundError):
        with contextlib.suppress(ValueError):  # it is being written
            if has_ended(int(os.pread(fd, 32, 0))):
                path.unlink(missing_ok=True)
        os.close(fd)
        return None
    return fd


def has_ended(pid: int) -> bool:
    """Whether the main thread is gone and no other one runs or can run again: they are in the kernel, or gone too."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    states = {stat.rpartition(")")[2].split()[0] for stat in threads}
    return "Z" in states and states <= {"Z", "X", "D"}


def directory_name(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or value.strip("0123456789abcdef"):
        raise LayerRefused(f"layer digest: expected sha256: and 64 hexadecimal digits, received {digest!r}")
    return f"sha256-{value}"


class CacheDirectory:
    """The cache of one serving process: holds the lock from `open` to `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, *, wait_s: float = 0.0) -> Self:
        """Creates the directory if it is missing. CacheError: another process serves from it, after `wait_s` still."""
        (path / "layers").mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + wait_s
        while (lock_fd := _lock(path / "lock")) is None:
            if time.monotonic() >= deadline:
                raise CacheError(f"{path}: another process serves from this cache; stop it or use another directory")
            time.sleep(0.005)
        cache = cls(path, lock_fd)
        cache._remove_unfinished()
        return cache

    def close(self) -> None:
        os.close(self._lock_fd)

    def _remove_unfinished(self) -> None:
        for leftover in (self.path / "layers").glob("*.new"):
            shutil.rmtree(leftover)

    def find(self, digest: str) -> LayerRecord | None:
        """The record of a layer whose TOC is here and undamaged; a damaged one is removed, to be fetched again."""
        directory = self.path / "layers" / directory_name(digest)
        try:
            record = msgspec.json.decode((directory / "layer.json").read_bytes(), type=LayerRecord)
            with (directory / "toc").open("rb") as file:
                actual = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            shutil.rmtree(directory)
            return None
        if actual != record.toc_digest or record.digest != digest:
            shutil.rmtree(directory)
            return None
        return record

    def create(self, record: LayerRecord, toc: bytes, *, lent: bool = False) -> None:
        """Adds a layer whose raw TOC the caller has verified. `lent`: with LENT_MARK."""
        final = self.path / "layers" / directory_name(record.digest)
        fresh = final.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        (fresh / "toc").write_bytes(toc)
        if lent:
            (fresh / LENT_MARK).touch()
        (fresh / "layer.json").write_bytes(msgspec.json.encode(record))
        for name in ("data", "map"):
            (fresh / name).touch()
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)

    def toc_path(self, digest: str) -> Path:
        """Where the raw TOC of a layer is."""
        return self.path / "layers" / directory_name(digest) / "toc"

    def directory(self, digest: str) -> Path:
        """Of a layer, whether it is there or not."""
        return self.path / "layers" / directory_name(digest)

    def digests(self) -> list[str]:
        """Of all layers, in order."""
        names = [entry.name for entry in os.scandir(self.path / "layers") if not entry.name.endswith(".new")]
        return sorted(f"sha256:{name.removeprefix('sha256-')}" for name in names)

    def used(self, digest: str) -> None:
        """Notes that a layer is used now."""
        os.utime(self.directory(digest))


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[LayerFiles]:
    """The files of a layer, open as the core wants them; `data` and `map` are made if they are missing. OSError."""
    with contextlib.ExitStack() as stack:
        fds = []
        for name, flags in (("toc", os.O_RDONLY), ("data", os.O_RDWR | os.O_CREAT), ("map", os.O_RDWR | os.O_CREAT)):
            fds.append(os.open(directory / name, flags | os.O_CLOEXEC, 0o600))
            stack.callback(os.close, fds[-1])
        toc_fd, data_fd, map_fd = fds
        yield LayerFiles(toc_fd, os.fstat(toc_fd).st_size, data_fd, map_fd, boot_id())


def verify_directory(directory: Path) -> tuple[int, int]:
    """Compares the chunks of a layer that nobody serves with their digests, and drops those that are damaged: how many were good, how many
    damaged. OSError.
    """
    with opened(directory) as files:
        return check_files(files)


def list_layers(path: Path) -> Iterator[CachedLayer]:
    """What is in the cache, by itself: works beside a serving process and without one."""
    layers = path / "layers"
    if not layers.is_dir():
        return
    for directory in sorted(layers.iterdir()):
        if directory.suffix == ".new":
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):  # being made or removed at this moment
            yield _cached(directory)


def _cached(directory: Path) -> CachedLayer:
    record = msgspec.json.decode((directory / "layer.json").read_bytes(), type=LayerRecord)
    found = (directory / "map").read_bytes()
    bits = found[MAP_HEADER_SIZE : MAP_HEADER_SIZE + (record.chunks + 63) // 64 * 8] if found[:8] == MAP_MAGIC else b""
    return CachedLayer(
        record=record,
        path=directory,
        present_chunks=sum(byte.bit_count() for byte in bits),
        disk_bytes=sum((directory / name).stat().st_blocks * 512 for name in ("toc", "data", "map", "layer.json")),
        used_s=directory.stat().st_mtime,
        pinned=(directory / "pinned").exists(),
    )
