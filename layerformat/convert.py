"""Turns a source into a layer file, and a recipe beside it: all of it or nothing at its destination."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from attrs import frozen

from . import spec
from .encoder import DEFAULT_LEVEL, EncodeReport, encode
from .errors import SourceError
from .recipe import RecipeReport, RecipeWriter
from .sources import open_source
from .tree import DEFAULT_MAX_ENTRIES

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@frozen
class Progress:
    """How far a conversion is. `total_bytes` is None when the source cannot say it."""

    position_bytes: int
    total_bytes: int | None
    entries: int
    written_bytes: int


@frozen
class ConvertReport:
    """What a conversion did. `bytes_in` is what was read of the source as it is stored, `layer` what was written.

    diff_id  SHA-256 of the tar, decompressed, as `sha256:` + hex, when it was asked for
    recipe   None when there is none
    """

    source_kind: str
    bytes_in: int
    layer: EncodeReport
    warnings: tuple[str, ...]
    diff_id: str | None
    recipe: RecipeReport | None

    @property
    def bytes_out(self) -> int:
        """Size of the layer, bytes."""
        return self.layer.blob_size


def convert(
    src: str | os.PathLike[str] | BinaryIO,
    dst: str | os.PathLike[str],
    *,
    jobs: int = 1,
    level: int = DEFAULT_LEVEL,
    chunk_size: int = spec.DEFAULT_CHUNK_SIZE,
    upper: bool = False,
    max_entries: int = DEFAULT_MAX_ENTRIES,
    recipe: str | os.PathLike[str] | None = None,
    diff_id: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ConvertReport:
    """Converts a tar (plain, gzip, zstd, xz; its path, or an open file) or a directory to a layer at `dst`; parameters as for `encode`
    and `open_source`.

    recipe   of a tar: where to write the recipe that gives it back
    diff_id  of a tar: compute it; with a recipe, it is computed anyway

    The layer and the recipe are written beside their places (where symlinks lead) and renamed when they are whole and on the disk;
    on any failure nothing is left. What is no regular file, or is the source, is not replaced. `progress` is called in the caller's
    thread. SourceError, UnsupportedEntry, OSError.
    """
    destination = _check_destination(Path(dst), src)
    recipe_destination = None if recipe is None else _check_destination(Path(recipe), src)
    if recipe_destination == destination:
        raise OSError(errno.EINVAL, "expected another file for the recipe than for the layer", os.fspath(dst))
    digest = hashlib.sha256() if diff_id or recipe is not None else None
    with open_source(src, upper=upper, digest=digest) as source, contextlib.ExitStack() as stack:
        if digest is not None and not source.is_tar:
            raise SourceError(os.fspath(cast(str, src)), "expected a tar, whose bytes a recipe gives back; received a directory")

        def report(entries: int, written_bytes: int) -> None:
            if progress is not None:
                progress(Progress(source.position_bytes(), source.total_bytes(), entries, written_bytes))

        file = stack.enter_context(_replacing(destination))
        writer = None if recipe_destination is None else RecipeWriter(stack.enter_context(_replacing(recipe_destination)))
        layer = encode(
            source.entries(None if writer is None else writer.literal),
            file,
            jobs=jobs,
            level=level,
            chunk_size=chunk_size,
            max_entries=max_entries,
            recipe=writer,
            progress=report,
        )
        written = None
        if writer is not None and digest is not None:
            written = writer.finish(bytes.fromhex(layer.toc_digest.removeprefix("sha256:")), digest.digest())
        stack.close()
        return ConvertReport(
            source_kind=source.kind,
            bytes_in=source.position_bytes(),
            layer=layer,
            warnings=source.warnings.texts(),
            diff_id=None if digest is None else "sha256:" + digest.hexdigest(),
            recipe=written,
        )


def _check_destination(destination: Path, source: object) -> Path:
    """Where a result really goes: through symlinks, to a regular file or none, and not over what it is made from. OSError."""
    real = Path(os.path.realpath(destination))
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source) and real.is_relative_to(os.path.realpath(source)):
        raise OSError(errno.EINVAL, "expected a file outside of the directory that is read", os.fspath(destination))
    try:
        there = os.stat(real)
    except FileNotFoundError:
        return real
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected the name of a file to write, received a directory", os.fspath(destination))
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "expected a file, or no file yet, received a device, pipe or socket", os.fspath(destination))
    if _is_same_file(source, there):
        raise OSError(errno.EINVAL, "expected another file than the source, which would be lost", os.fspath(destination))
    return real


def _is_same_file(source: object, there: os.stat_result) -> bool:
    try:
        status = os.stat(source) if isinstance(source, (str, os.PathLike)) else os.fstat(cast(BinaryIO, source).fileno())
    except OSError:  # an open source without a descriptor, or one that is refused when it is opened
        return False
    return (status.st_dev, status.st_ino) == (there.st_dev, there.st_ino)


@contextlib.contextmanager
def _replacing(destination: Path) -> Iterator[BinaryIO]:
    """A new file that takes its place when the block ends well, and is gone when it does not."""
    partial = destination.with_name(f".{destination.name[:200]}.{secrets.token_hex(8)}.partial")
    try:
        file = open(partial, "xb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; no layer can be written there", os.fspath(destination)) from error
    try:
        with file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fdatasync(file.fileno())
        os.rename(partial, destination)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and (error.filename2 is not None or (error.filename is None and error.errno in _FULL)):
            # The rename's temporary name tells nobody anything; a write's error has none.
            raise OSError(error.errno, error.strerror, os.fspath(destination)) from error
        raise
