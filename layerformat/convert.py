"""Turns a source into a layer file: all of it or nothing at its destination."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from attrs import frozen

from . import spec
from .encoder import DEFAULT_LEVEL, EncodeReport, encode
from .sources import open_source


@frozen
class Progress:
    """How far a conversion is. `total_bytes` is None when the source cannot say it."""

    position_bytes: int
    total_bytes: int | None
    entries: int
    written_bytes: int


@frozen
class ConvertReport:
    """What a conversion did. `bytes_in` is what was read of the source as it is stored, `layer` what was written."""

    source_kind: str
    bytes_in: int
    layer: EncodeReport
    warnings: tuple[str, ...]

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
    progress: Callable[[Progress], None] | None = None,
) -> ConvertReport:
    """Converts a tar (plain, gzip, zstd; its path, or an open file) or a directory to a layer at `dst`; parameters as for `encode` and
    `open_source`.

    The layer is written beside `dst` and renamed when it is whole and on the disk; on any failure nothing is left.
    `progress` is called in the caller's thread. SourceError, UnsupportedEntry, OSError.
    """
    destination = Path(dst)
    with open_source(src, upper=upper) as source:

        def report(entries: int, written_bytes: int) -> None:
            if progress is not None:
                progress(Progress(source.position_bytes(), source.total_bytes(), entries, written_bytes))

        partial = destination.with_name(f".{destination.name[:200]}.{secrets.token_hex(8)}.partial")
        try:
            file = open(partial, "xb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; no layer can be written there", os.fspath(dst)) from error
        try:
            with file:
                layer = encode(
                    source.entries(),
                    cast(BinaryIO, file),
                    jobs=jobs,
                    level=level,
                    chunk_size=chunk_size,
                    progress=report,
                )
                file.flush()
                os.fdatasync(file.fileno())
            os.rename(partial, destination)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename2 is not None:  # the rename's: the temporary name tells nobody anything
                raise OSError(error.errno, error.strerror, os.fspath(dst)) from error
            raise
        return ConvertReport(source_kind=source.kind, bytes_in=source.position_bytes(), layer=layer, warnings=source.warnings.texts())
