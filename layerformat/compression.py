"""Decompresses a source, told by its first bytes: gzip, zstd and xz, any number of members, frames or streams, or nothing.

Every checksum of the compressor is verified, and a stream that ends inside a member or frame is an error. zstandard's
stream reader takes the end of its input for the end of a frame, so `_ZstdRaw` walks the frames' block headers beside it
and knows better. A file on the disk is decompressed ahead, in a thread: it is the one step that cannot be shared out.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import io
import lzma
import os
import queue
import stat
import threading
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, BinaryIO, cast

import zstandard
from isal import isal_zlib

from .errors import SourceError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 256 * 1024
_PIECE_BYTES = 1024 * 1024
_AHEAD_PIECES = 4
MAX_WINDOW_BYTES = 128 * 1024 * 1024

MAX_XZ_MEMORY_BYTES = 128 * 1024 * 1024  # xz -9 takes half of it

_IsalError = cast(type[Exception], isal_zlib.error)

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_HEADER_CRC, _GZIP_EXTRA, _GZIP_NAME, _GZIP_COMMENT = 2, 4, 8, 16
_MAX_GZIP_TEXT = 1024 * 1024
_XZ_MAGIC = b"\xfd7zXZ\0"
_SKIPPABLE_MAGIC = 0x184D2A50
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_OTHERS = {
    b"BZh": "bzip2",
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
    """What all share: `readinto` over `_next`, which gives a run of bytes, none at the end."""

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
    """gzip members one after the other; zero bytes may follow the last.

    The members' headers and checksums are read here and only the deflate streams by ISA-L, which takes a header that is
    cut between two reads for a damaged one.
    """

    def __init__(self, file: CountingFile, source: str) -> None:
        super().__init__(file, source)
        self._input = b""
        self._deflate: isal_zlib.Decompress | None = None
        self._full = False  # the last piece was as long as it could be, so that more may come without input
        self._crc32 = 0
        self._size = 0
        self._members = 0

    def _next(self, size: int) -> bytes:
        while True:
            if self._deflate is None:
                deflate = self._begin_member()
                if deflate is None:
                    return b""
            else:
                deflate = self._deflate
                if not (self._input or self._full):
                    self._input = self._more()
            data = self._inflate(deflate, max(size, READ_BYTES))
            if data:
                return data

    def _inflate(self, deflate: isal_zlib.Decompress, limit: int) -> bytes:
        """Some decompressed bytes of the member; ends it when they are its last."""
        try:
            data = deflate.decompress(self._input, limit)
        except _IsalError as error:
            raise self._error(f"gzip data that cannot be decompressed ({error}): the file is damaged") from None
        self._crc32 = isal_zlib.crc32(data, self._crc32)
        self._size += len(data)
        self._full = len(data) == limit
        self._input = deflate.unused_data if deflate.eof else deflate.unconsumed_tail
        if deflate.eof:
            self._end_member()
        return data

    def _begin_member(self) -> isal_zlib.Decompress | None:
        """Reads a member's header (RFC 1952); None at the end of the file."""
        if self._members:
            while not (rest := self._input.lstrip(b"\0")):
                self._input = self._file.read(READ_BYTES)
                if not self._input:
                    return None
            self._input = rest
            if rest[:2] != _GZIP_MAGIC[: len(rest)]:
                raise self._error(f"expected the end, zeros or another gzip member, received {rest[:4].hex()}: remove what was appended")
        header = self._take(10)
        flags = header[3]
        if header[:3] != _GZIP_MAGIC + b"\x08" or flags & 0xE0:
            raise self._error(f"expected a gzip member, received {header[:4].hex()}: the file is damaged")
        if flags & _GZIP_EXTRA:
            length = self._take(2)
            header += length + self._take(int.from_bytes(length, "little"))
        for flag in (_GZIP_NAME, _GZIP_COMMENT):
            if flags & flag:
                header += self._take_text()
        if flags & _GZIP_HEADER_CRC and int.from_bytes(self._take(2), "little") != zlib.crc32(header) & 0xFFFF:
            raise self._error("a gzip member whose header does not have the checksum that it states: the file is damaged")
        self._members += 1
        self._deflate = isal_zlib.decompressobj(wbits=-15)
        self._crc32 = self._size = 0
        return self._deflate

    def _end_member(self) -> None:
        trailer = self._take(8)
        stated = int.from_bytes(trailer[:4], "little"), int.from_bytes(trailer[4:], "little")
        if stated != (self._crc32, self._size & 0xFFFFFFFF):
            raise self._error("a gzip member whose contents do not have the checksum and size that it states: the file is damaged")
        self._deflate = None

    def _take(self, size: int) -> bytes:
        """Exactly `size` bytes of the file."""
        while len(self._input) < size:
            self._input += self._more()
        taken, self._input = self._input[:size], self._input[size:]
        return taken

    def _take_text(self) -> bytes:
        """A text of the header up to its NUL, and the NUL."""
        while (end := self._input.find(b"\0")) < 0:
            if len(self._input) > _MAX_GZIP_TEXT:
                raise self._error(f"a gzip member with a name or comment of more than {_MAX_GZIP_TEXT} bytes")
            self._input += self._more()
        return self._take(end + 1)

    def _more(self) -> bytes:
        data = self._file.read(READ_BYTES)
        if not data:
            raise self._error("expected more of a gzip member, received the end: the file is truncated")
        return data


class _XzRaw(_Raw):
    """xz streams one after the other, with the padding between and behind them that the format allows."""

    def __init__(self, file: CountingFile, source: str) -> None:
        super().__init__(file, source)
        self._input = b""
        self._stream: lzma.LZMADecompressor | None = _xz_stream()

    def _next(self, size: int) -> bytes:
        while True:
            stream = self._stream or self._begin_stream()
            if stream is None:
                return b""
            if not self._input and stream.needs_input:
                self._input = self._file.read(READ_BYTES)
                if not self._input:
                    raise self._error("expected more of an xz stream, received the end: the file is truncated")
            try:
                data = stream.decompress(self._input, max(size, READ_BYTES))
            except lzma.LZMAError as error:
                raise self._error(f"xz data that cannot be decompressed ({error}): the file is damaged, or needs too much memory") from None
            self._input = b""
            if stream.eof:
                self._input = stream.unused_data
                self._stream = None
            if data:
                return data

    def _begin_stream(self) -> lzma.LZMADecompressor | None:
        """Passes the padding, which comes in fours, and starts the next stream; None at the end of the file."""
        padding = 0
        while not (rest := self._input.lstrip(b"\0")):
            padding += len(self._input)
            self._input = self._file.read(READ_BYTES)
            if not self._input:
                break
        padding += len(self._input) - len(rest)
        if padding % 4:
            raise self._error(f"expected padding of a multiple of 4 bytes after an xz stream, received {padding}: the file is damaged")
        self._input = rest
        self._stream = _xz_stream() if rest else None
        return self._stream


def _xz_stream() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY_BYTES)


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


class _Hashing(_Raw):
    """Feeds a digest with all that passes."""

    def __init__(self, inner: _Raw, digest: hashlib._Hash) -> None:
        super().__init__(inner._file, inner._source)
        self._inner = inner
        self._digest = digest

    def _next(self, size: int) -> bytes:
        data = self._inner._next(size)
        self._digest.update(data)
        return data


class _Ahead(_Raw):
    """Reads ahead in a thread, `_AHEAD_PIECES` pieces at most. What the thread raises arrives in its place in the stream."""

    def __init__(self, inner: _Raw) -> None:
        super().__init__(inner._file, inner._source)
        self._inner = inner
        self._pieces: queue.Queue[bytes | BaseException] = queue.Queue(_AHEAD_PIECES)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="layer-decompress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        piece: bytes | BaseException = b"-"
        while piece and isinstance(piece, bytes) and not self._stop.is_set():
            try:
                piece = self._inner._next(_PIECE_BYTES)
            except BaseException as error:
                piece = error
            self._pieces.put(piece)

    def _next(self, size: int) -> bytes:
        if self._ended:
            return b""
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            self._ended = True
            raise piece
        self._ended = not piece
        return piece

    def close(self) -> None:
        """Ends the thread, wherever it is."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._pieces.get_nowait()
            self._thread.join(0.01)
        super().close()


def open_decompressed(file: CountingFile, source: str, digest: hashlib._Hash | None = None) -> tuple[str, BinaryIO]:
    """What the file is (`tar`, `tar.gz`, `tar.zst`, `tar.xz`), and its decompressed bytes, buffered.

    digest  is fed with the decompressed bytes; whole when the stream was read to its end

    SourceError names a compression that is not read.
    """
    head = file.peek(6)
    raw: _Raw
    if head.startswith(_GZIP_MAGIC):
        kind, raw = "tar.gz", _GzipRaw(file, source)
    elif head.startswith(_ZSTD_MAGIC) or int.from_bytes(head[:4], "little") & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
        kind, raw = "tar.zst", _ZstdRaw(file, source)
    elif head == _XZ_MAGIC:
        kind, raw = "tar.xz", _XzRaw(file, source)
    else:
        for magic, name in _OTHERS.items():
            if head.startswith(magic):
                raise SourceError(source, f"expected a tar, plain or compressed with gzip, zstd or xz, received {name}; recompress it")
        kind, raw = "tar", _PlainRaw(file, source)
    if digest is not None:
        raw = _Hashing(raw, digest)
    if file.size() is not None:  # a pipe could keep the thread waiting when the conversion has failed
        raw = _Ahead(raw)
    return kind, cast(BinaryIO, io.BufferedReader(raw, READ_BYTES))
