"""The recipe of a layer: what it takes, beside the layer, to give back the tar that it was made from, byte for byte
(docs/format.md §8).

A tar is headers and padding, which a recipe holds as they were, and contents, which it names as ranges of the layer's logical
stream. So a recipe is small, and only who wants the original bytes fetches it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Final, cast

import zstandard
from attrs import frozen

from .decoder import Layer
from .errors import FormatError
from .storedtoc import decompress_frame
from .tree import Node

# magic version reserved toc_sha256 tar_sha256 tar_size steps literals_stored steps_stored reserved
HEADER: Final = struct.Struct("<8sII32s32sQQQQ16s")
STEP: Final = struct.Struct("<QQQ")  # literal_length stream_offset contents_length
MAGIC: Final = b"WEENVRCP"
VERSION: Final = 1
MAX_STEPS: Final = 1 << 26
_LEVEL = 9
_COPY_BYTES = 1024 * 1024

assert HEADER.size == 128


class RecipeError(FormatError):
    """A recipe that is damaged, or not the layer's."""

    advice = "the recipe is damaged, or another layer's: fetch the layer's own, or convert its tar again with --recipe"


@frozen
class RecipeReport:
    """A recipe that was written. Sizes in bytes, digests as `sha256:` + hex; `diff_id` is that of the tar."""

    diff_id: str
    tar_size: int
    size: int


class RecipeWriter:
    """Writes a recipe while its tar is read: literals and contents in the order of the tar, then `finish`.

    The file must be seekable. Memory: 24 bytes for each file with contents.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._literals = array("Q")  # bytes of literals before each file's contents
        self._lengths = array("Q")
        self._nodes: list[Node] = []
        self._pending = 0
        self._tar_size = 0
        self._file.write(bytes(HEADER.size))
        self._frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).stream_writer(file, closefd=False)

    def literal(self, data: bytes) -> None:
        """Bytes of the tar that are no file's contents."""
        self._frame.write(data)
        self._pending += len(data)
        self._tar_size += len(data)

    def contents(self, node: Node, length: int) -> None:
        """The contents of a file, `length` bytes, whose place `node.data` will name in the end."""
        self._literals.append(self._pending)
        self._lengths.append(length)
        self._nodes.append(node)
        self._pending = 0
        self._tar_size += length

    def finish(self, toc_sha256: bytes, tar_sha256: bytes) -> RecipeReport:
        """Completes the recipe of the layer with this TOC."""
        self._frame.flush(zstandard.FLUSH_FRAME)
        literals_stored = self._file.tell() - HEADER.size
        offsets = array("Q", (node.data for node in self._nodes))
        columns = self._literals, offsets, self._lengths
        for column, last in zip(columns, (self._pending, 0, 0), strict=True):
            column.append(last)
        if sys.byteorder == "big":
            for column in columns:
                column.byteswap()
        steps = b"".join(column.tobytes()[byte::8] for column in columns for byte in range(8))
        stored = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(steps)
        self._file.write(stored)
        size = self._file.tell()
        header = HEADER.pack(
            MAGIC, VERSION, 0, toc_sha256, tar_sha256, self._tar_size, len(self._lengths), literals_stored, len(stored), b""
        )
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(size)
        return RecipeReport(diff_id="sha256:" + tar_sha256.hex(), tar_size=self._tar_size, size=size)


class Recipe:
    """An open recipe. A context manager."""

    def __init__(self, file: BinaryIO, source: str) -> None:
        self._file = file
        self._source = source
        self._parse_header()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recipe:
        """Opens a recipe and checks its header. FormatError, OSError."""
        file = open(path, "rb")  # noqa: SIM115 - the recipe owns it
        try:
            return cls(file, os.fspath(path))
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Recipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def _parse_header(self) -> None:
        data = self._file.read(HEADER.size)
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise self._error("header", f"{HEADER.size} bytes that begin with {MAGIC.decode()}", f"{len(data)} bytes: {data[:8]!r}")
        _, version, reserved, self.toc_sha256, tar_sha256, *sizes, rest = HEADER.unpack(data)
        self.tar_size, self._steps, self._literals_stored, self._steps_stored = sizes
        if version != VERSION or reserved or any(rest):
            raise self._error("header", f"version {VERSION} and reserved bytes of zero", f"version {version}, {reserved}, {rest.hex()}")
        size = self._file.seek(0, os.SEEK_END)
        stated = HEADER.size + self._literals_stored + self._steps_stored
        if size != stated:
            raise self._error("header", f"a file of {stated} bytes", size)
        if not 1 <= self._steps <= MAX_STEPS:
            raise self._error("header", f"1 to {MAX_STEPS} steps", self._steps)
        self.diff_id = "sha256:" + tar_sha256.hex()

    def write_tar(self, layer: Layer, file: BinaryIO) -> None:
        """Writes the tar to `file`.

        FormatError when the recipe is of another layer or damaged, or a chunk of the layer is, and when what came out is not the
        tar that went in: what was written until then is to be thrown away.
        """
        wanted = layer.footer.toc_sha256
        if wanted != self.toc_sha256:
            raise self._error("header", f"the recipe of TOC sha256:{wanted.hex()}", f"that of sha256:{self.toc_sha256.hex()}")
        digest = hashlib.sha256()
        for piece in self._pieces(layer):
            digest.update(piece)
            file.write(piece)
        received = "sha256:" + digest.hexdigest()
        if received != self.diff_id:
            raise self._error("tar", self.diff_id, received)

    def _pieces(self, layer: Layer) -> Iterator[bytes]:
        steps = self._read_steps(layer)
        self._file.seek(HEADER.size)
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
            cast(BinaryIO, _Bounded(self._file, self._literals_stored)), closefd=False
        )
        for index, (literals, offset, length) in enumerate(STEP.iter_unpack(steps)):
            for done in range(0, literals, _COPY_BYTES):
                wanted = min(_COPY_BYTES, literals - done)
                try:
                    piece = reader.read(wanted)
                except zstandard.ZstdError as error:
                    raise self._error("literals", "a zstd frame", error) from None
                if len(piece) != wanted:
                    raise self._error("steps", f"{literals} bytes of literals", f"{done + len(piece)}", index)
                yield piece
            for done in range(0, length, _COPY_BYTES):
                yield layer.read_stream(offset + done, min(_COPY_BYTES, length - done))

    def _read_steps(self, layer: Layer) -> bytearray:
        """The steps as records, checked: they stay inside the stream and add up to the tar's size."""
        self._file.seek(HEADER.size + self._literals_stored)
        try:
            raw = decompress_frame(self._file.read(self._steps_stored), self._steps * STEP.size)
        except ValueError as error:
            raise self._error("steps", f"a zstd frame of {self._steps * STEP.size} bytes", error) from None
        rows = bytearray(len(raw))
        for column in range(STEP.size):
            rows[column :: STEP.size] = raw[column * self._steps : (column + 1) * self._steps]
        stream_size = layer.toc.header.stream_size
        total = 0
        for index, (literals, offset, length) in enumerate(STEP.iter_unpack(rows)):
            if offset + length > stream_size:
                raise self._error("steps", f"contents that end by byte {stream_size} of the stream", offset + length, index)
            total += literals + length
        if total != self.tar_size:
            raise self._error("steps", f"{self.tar_size} bytes of tar", total)
        return rows

    def _error(self, table: str, expected: object, received: object, index: int | None = None) -> RecipeError:
        return RecipeError(f"recipe {table}", index, expected, received, source=self._source)


class _Bounded:
    """The next `size` bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data
