"""Opens what a layer is made from: a tar, plain or compressed with gzip, zstd or xz (told by its first bytes), or a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from .compression import CountingFile, open_decompressed
from .dirreader import DirectoryReader
from .errors import SourceError
from .model import Data, Entry
from .tarreader import Literal, read_tar

MAX_WARNINGS = 1000


class Warnings:
    """What was odd but harmless; the first thousand are kept, the rest counted."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._more = 0

    def add(self, text: str) -> None:
        if len(self._texts) < MAX_WARNINGS:
            self._texts.append(text)
        else:
            self._more += 1

    def texts(self) -> tuple[str, ...]:
        """All that were kept, and a last line that says how many more there were."""
        more = (f"and {self._more} more warnings",) if self._more else ()
        return (*self._texts, *more)


class Source(Protocol):
    """An opened source. A context manager; `entries()` can be asked for once."""

    kind: str
    warnings: Warnings
    is_tar: bool

    def entries(self, literal: Literal | None = None) -> Iterator[tuple[Entry, Data]]:
        """The entries in the order of the source, each with its data, which is valid until the next one is asked for.

        literal  of a tar: receives the bytes that are no entry's data
        """
        ...

    def position_bytes(self) -> int:
        """Bytes read of the source so far (of the file as it is stored; of a directory, contents)."""
        ...

    def total_bytes(self) -> int | None:
        """What `position_bytes` will reach, when that is known."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Source: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...


class TarSource:
    """A tar file, compressed or not."""

    is_tar = True

    def __init__(self, file: BinaryIO, name: str, digest: hashlib._Hash | None) -> None:
        self.warnings = Warnings()
        self._name = name
        self._file = CountingFile(file)
        self.kind, self._stream = open_decompressed(self._file, name, digest)

    def entries(self, literal: Literal | None = None) -> Iterator[tuple[Entry, Data]]:
        return read_tar(self._stream, self._name, warn=self.warnings.add, literal=literal)

    def position_bytes(self) -> int:
        return self._file.position

    def total_bytes(self) -> int | None:
        return self._file.size()

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def __enter__(self) -> TarSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class DirectorySource:
    """A directory of the file system."""

    kind = "directory"
    is_tar = False

    def __init__(self, path: bytes, *, upper: bool) -> None:
        self.warnings = Warnings()
        self._reader = DirectoryReader(path, upper=upper, warn=self.warnings.add)

    def entries(self, literal: Literal | None = None) -> Iterator[tuple[Entry, Data]]:
        return self._reader.entries()

    def position_bytes(self) -> int:
        return self._reader.bytes_read

    def total_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def open_source(path: str | os.PathLike[str] | BinaryIO, *, upper: bool = False, digest: hashlib._Hash | None = None) -> Source:
    """Opens a source by what it is, whatever it is called. An open file is read from where it is, to its end, and closed;
    it need not be seekable.

    upper   the directory is the upper directory of an overlay: its deletions and opaque directories become whiteouts.
    digest  of a tar: is fed with its bytes, decompressed

    SourceError when it is neither a directory nor a tar in a form that is known; OSError when it cannot be opened.
    """
    if not isinstance(path, (str, os.PathLike)):
        if upper:
            raise SourceError("an open file", "expected the upper directory of an overlay, received a file")
        name = getattr(path, "name", None)
        return TarSource(path, name if isinstance(name, str) else "standard input" if name == 0 else "archive", digest)
    if Path(path).is_dir():
        return DirectorySource(os.fsencode(path), upper=upper)
    if upper:
        raise SourceError(str(path), "expected the upper directory of an overlay, received a file")
    file = open(path, "rb", buffering=0)  # noqa: SIM115 - the source owns it
    try:
        return TarSource(file, str(path), digest)
    except BaseException:
        file.close()
        raise
