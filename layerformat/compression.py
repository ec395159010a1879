"""Decompresses a source, told by its first bytes: gzip and zstd, any number of members or frames, or nothing.

Every checksum of the compressor is verified, and a stream that ends inside a member or frame is an error. zstandard's
stream reader takes the end of its input for the end of a frame, so `_ZstdRaw` walks the frames' block headers beside it
and knows better.
"""

from __future__ import annotations

import abc
import io
import os
import stat
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, BinaryIO, cast

import zstandard

from .errors import SourceError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 128 * 1024 * 1024

_GZIP_MAGIC = b"\x1f\x8b"
_SKIPPABLE_MAGIC = 0x184D2A50
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_OTHERS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"LZIP": "lzip",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "a zip archive",
}


class CountingFile:
    """The compressed file with its position, and one look ahead at its first bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._ahead = b""
        self.position = 0

    def peek(self, size: int) -> bytes:
        """The first bytes; to be called before any read."""
        while len(self._ahead) < size and (more := self._file.read(size - len(self._ahead))):
            self._ahead += more
        return self._ahead

    def read(self, size: int) -> bytes:
        """Some bytes, at most `size`; none at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._file.read(size)
        self.position += len(data)
        return data

    def size(self) -> int | None:
        """Bytes in the file, when it is one."""
        try:
            status = os.fstat(self._file.fileno())
        except (OSError, io.UnsupportedOperation):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def close(self) -> None:
        self._file.close()


class _Raw(io.RawIOBase):
    """What the three share: `readinto` over `_next`, which gives a run of bytes, none at the end."""

    def __init__(self, file: CountingFile, source: str) -> None:
        self._file = file
        self._source = source
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        if not self._pending:
            self._pending = memoryview(self._next(len(view)))
        count = min(len(view), len(self._pending))
        view[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    @abc.abstractmethod
    def _next(self, size: int) -> bytes:
        """About `size` more bytes; none at the end."""

    def _error(self, what: str) -> SourceError:
        return SourceError(self._source, what, offset=self._file.position)


class _PlainRaw(_Raw):
    def _next(self, size: int) -> bytes:
        return self._file.read(size)


class _GzipRaw(_Raw):
    """gzip members one after the other; zero bytes may follow the last."""

    def __init__(self, file: CountingFile, source: str) -> None:
        super().__init__(file, source)
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""

    def _next(self, size: int) -> bytes:
        while True:
            if self._member.eof:
                if not self._next_member():
                    return b""
            elif not self._input:
                self._input = self._file.read(READ_BYTES)
                if not self._input:
                    raise self._error("expected more of a gzip member, received the end: the file is truncated")
            try:
                data = self._member.decompress(self._input, max(size, READ_BYTES))
            except zlib.error as error:
                raise self._error(f"gzip data that cannot be decompressed ({error}): the file is damaged") from None
            self._input = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if data:
                return data

    def _next_member(self) -> bool:
        """Starts the next member; False at the end of the file."""
        while True:
            self._input = self._input.lstrip(b"\0")
            if self._input:
                self._member = zlib.decompressobj(wbits=31)
                return True
            self._input = self._file.read(READ_BYTES)
            if not self._input:
                return False


class _FrameWalker:
    """Follows the structure of zstd frames in the compressed bytes: `complete` says whether they end between two frames."""

    def __init__(self) -> None:
        self._between = True
        self._buffer = bytearray()
        self._skip = 0
        self._steps = self._walk()
        self._wanted = next(self._steps)

    @property
    def complete(self) -> bool:
        return self._between and not self._buffer and not self._skip

    def feed(self, data: bytes) -> None:
        """ValueError when neither a frame nor a skippable frame begins where one must."""
        self._buffer += data
        position = 0
        while True:
            step = min(self._skip, len(self._buffer) - position)
            self._skip -= step
            position += step
            if self._skip or len(self._buffer) - position < self._wanted:
                break
            piece = bytes(self._buffer[position : position + self._wanted])
            position += self._wanted
            self._wanted = self._steps.send(piece)
        del self._buffer[:position]

    def _walk(self) -> Generator[int, bytes, None]:
        """Yields how many bytes it has to see next and receives them; what it need not see it adds to `_skip`."""
        while True:
            self._between = True
            magic = yield 4
            self._between = False
            if int.from_bytes(magic, "little") & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
                self._skip = int.from_bytes((yield 4), "little")
                continue
            if magic != _ZSTD_MAGIC:
                raise ValueError(f"expected a zstd frame, received {magic.hex()}")
            descriptor = (yield 1)[0]
            single_segment = descriptor >> 5 & 1
            self._skip = (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + (single_segment, 2, 4, 8)[descriptor >> 6]
            last = False
            while not last:
                header = int.from_bytes((yield 3), "little")
                last = bool(header & 1)
                self._skip = 1 if header >> 1 & 3 == 1 else header >> 3
            if descriptor & 4:
                yield 4


class _ZstdRaw(_Raw):
    """zstd frames one after the other, with a bounded window."""

    def __init__(self, file: CountingFile, source: str) -> None:
        super().__init__(file, source)
        self._walker = _FrameWalker()
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._reader = decompressor.stream_reader(cast(BinaryIO, _Tee(file, self._walker)), read_size=READ_BYTES, read_across_frames=True)

    def _next(self, size: int) -> bytes:
        try:
            data: bytes = self._reader.read(max(size, READ_BYTES))
        except (zstandard.ZstdError, ValueError) as error:
            raise self._error(f"zstd data that cannot be decompressed ({error}): the file is damaged") from None
        if not data and not self._walker.complete:
            raise self._error("expected more of a zstd frame, received the end: the file is truncated")
        return data


class _Tee:
    """A file that shows what is read from it to a walker."""

    def __init__(self, file: CountingFile, walker: _FrameWalker) -> None:
        self._file = file
        self._walker = walker

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._walker.feed(data)
        return data


def open_decompressed(file: CountingFile, source: str) -> tuple[str, BinaryIO]:
    """What the file is (`tar`, `tar.gz`, `tar.zst`), and its decompressed bytes, buffered.

    SourceError names a compression that is not read.
    """
    head = file.peek(6)
    raw: _Raw
    if head.startswith(_GZIP_MAGIC):
        kind, raw = "tar.gz", _GzipRaw(file, source)
    elif head.startswith(_ZSTD_MAGIC) or int.from_bytes(head[:4], "little") & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
        kind, raw = "tar.zst", _ZstdRaw(file, source)
    else:
        for magic, name in _OTHERS.items():
            if head.startswith(magic):
                raise SourceError(source, f"expected a tar, plain or compressed with gzip or zstd, received {name}; recompress it")
        kind, raw = "tar", _PlainRaw(file, source)
    return kind, cast(BinaryIO, io.BufferedReader(raw, READ_BYTES))
