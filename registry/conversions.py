"""What was converted on this machine: descriptors for long, the files themselves until they are published.

A directory of files named by a hash of the origin: `KEY.json`, a conversion's descriptor (some hundred bytes, written
once the layer is whole, with a checksum: one that was changed since is none), and `KEY.weenv`, the layer, with
`KEY.recipe` if there is one, which go when their push has succeeded and are read whole before another push sends them.
So a push that was cut off finds what it had finished. Work under way is in a directory of its own that its owner has
locked; one that nobody has locked was left by a process that was killed, and the next one removes it.

All are bounded. What was used longest ago goes first; a file that a running push still needs is locked and
stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import msgspec

from registry.errors import RegistryError, needing_space
from registry.manifest import Conversion, LayerDescriptor, Origin, digest_of_stream

MAX_LAYER_BYTES = 16 << 30
MAX_DESCRIPTORS = 10_000
_WORK = ".work-"
_ADVICE = "make room there, or set $XDG_CACHE_HOME to a directory that has some"


class _Record(msgspec.Struct):
    """What a KEY.json says; `checksum` is the SHA-256 of the rest."""

    layer: LayerDescriptor
    origin: Origin
    checksum: str = ""

    def expected_checksum(self) -> str:
        return hashlib.sha256(msgspec.json.encode((self.layer, self.origin))).hexdigest()


@attrs.define
class Kept:
    """A conversion that is known here; `path` and `recipe_path` are its files, when they are here too, and stay until `release`."""

    conversion: Conversion
    path: Path | None
    recipe_path: Path | None = None
    lock: BinaryIO | None = attrs.field(default=None, repr=False)

    def is_whole(self) -> bool:
        """Whether the files that are here have their digests: reads them."""
        wanted = [(self.path, self.conversion.layer.digest)]
        if self.recipe_path is not None and self.conversion.origin.recipe is not None:
            wanted.append((self.recipe_path, self.conversion.origin.recipe.digest))
        return all(path is not None and digest_of_file(path) == digest for path, digest in wanted)

    def close(self) -> None:
        """Gives the lock on the file back; the file stays."""
        if self.lock is not None:
            self.lock.close()


class Conversions:
    """One directory of conversions, made when it is first written to. Safe for several processes at once."""

    def __init__(
        self, directory: Path, max_layer_bytes: int = MAX_LAYER_BYTES, max_descriptors: int = MAX_DESCRIPTORS
    ) -> None:
        self.directory = directory
        self._max_layer_bytes = max_layer_bytes
        self._max_descriptors = max_descriptors

    def find(self, source: str, encoder: str) -> Kept | None:
        """What is known of a source's conversion. A record that cannot be read, or that is not as it was written, is none."""
        key = _key(source, encoder)
        record, path = self._record(key), self._file(key)
        try:
            found = msgspec.json.decode(record.read_bytes(), type=_Record)
            os.utime(record)  # used now
        except (OSError, msgspec.MsgspecError):
            return None
        conversion = Conversion(found.layer, found.origin)
        if found.checksum != found.expected_checksum() or (found.origin.source, found.origin.encoder) != (source, encoder):
            return None
        try:
            lock = path.open("rb")
        except OSError:
            return Kept(conversion, None)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock.fileno()).st_nlink == 0 or os.fstat(lock.fileno()).st_size != found.layer.size_bytes:
            lock.close()
            return Kept(conversion, None)
        os.utime(path)
        recipe, wanted = self._recipe(key), found.origin.recipe
        has_recipe = wanted is not None and recipe.exists() and recipe.stat().st_size == wanted.size_bytes
        return Kept(conversion, path, recipe if has_recipe else None, lock)

    def add(self, path: Path, recipe: Path | None, conversion: Conversion) -> Kept:
        """Takes a finished layer and its recipe, files in a `workspace`; they are moved. RegistryError."""
        key = _key(conversion.origin.source, conversion.origin.encoder)
        with self._failing():
            lock = path.open("rb")
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._evict(self._max_layer_bytes - conversion.layer.size_bytes)
            if recipe is not None:
                os.replace(recipe, self._recipe(key))
            os.replace(path, self._file(key))
            record = _Record(conversion.layer, conversion.origin)
            record.checksum = record.expected_checksum()
            path.write_bytes(msgspec.json.encode(record))
            os.replace(path, self._record(key))
        return Kept(conversion, self._file(key), None if recipe is None else self._recipe(key), lock)

    def release(self, kept: Kept) -> None:
        """The layer is published: its file goes, what is known of it stays."""
        kept.close()
        if kept.path is not None:
            with contextlib.suppress(OSError), _locked(kept.path):  # else another push needs it, and will release it
                _remove(kept.path)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory for work under way, on the same filesystem; it is gone afterwards. RegistryError."""
        with self._failing():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            work, fd = self._make_work()
        try:
            with needing_space(self.directory, _ADVICE):
                yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(fd)

    def _make_work(self) -> tuple[Path, int]:
        """A new directory, locked by its descriptor."""
        while True:
            work = self.directory / f"{_WORK}{secrets.token_hex(8)}"
            work.mkdir()
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return work, fd
                os.close(fd)  # removed as abandoned before the lock was ours

    # ---- bounds ----

    def _remove_abandoned(self) -> None:
        for work in self.directory.glob(f"{_WORK}*"):
            with contextlib.suppress(OSError), _locked(work):
                shutil.rmtree(work, ignore_errors=True)

    def _evict(self, max_layer_bytes: int) -> None:
        """Makes room. Locked files are in use."""
        layers = self._oldest_first("*.weenv")
        total = sum(size for size, _ in layers)
        for size, path in layers:
            if total <= max_layer_bytes:
                break
            with contextlib.suppress(OSError), _locked(path):
                _remove(path)
                total -= size
        records = self._oldest_first("*.json")
        for _size, path in records[: max(0, len(records) + 1 - self._max_descriptors)]:
            path.unlink(missing_ok=True)

    def _oldest_first(self, pattern: str) -> list[tuple[int, Path]]:
        """Sizes and paths, by the time of their last use."""
        found = []
        for path in self.directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # released by another process
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return [(size, path) for _time, size, path in sorted(found)]

    def _record(self, key: str) -> Path:
        return self.directory / f"{key}.json"

    def _file(self, key: str) -> Path:
        return self.directory / f"{key}.weenv"

    def _recipe(self, key: str) -> Path:
        return self.directory / f"{key}.recipe"

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with needing_space(self.directory, _ADVICE):
                yield
        except OSError as error:
            raise RegistryError(
                f"{self.directory}: expected a directory to keep conversions in: {error.strerror}; "
                "set $XDG_CACHE_HOME to one that can be written"
            ) from error


def digest_of_file(path: Path) -> str:
    """`sha256:` + hex. OSError."""
    with path.open("rb") as file:
        return digest_of_stream(file)


def _remove(layer: Path) -> None:
    """A layer's file, and its recipe before it."""
    layer.with_suffix(".recipe").unlink(missing_ok=True)
    layer.unlink()


def _key(source: str, encoder: str) -> str:
    return hashlib.sha256(f"{source}\n{encoder}".encode()).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds what nobody else holds. BlockingIOError: somebody does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
