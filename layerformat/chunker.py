"""Cuts contents into chunks: docs/format.md §2, the gather lane for small files and the lane for large ones.

Both lanes see the files in the order of the input. A gather gets its place in the stream when it is closed, so that the
chunks of a large file can pass an open one by and memory holds one chunk at most.

Files of equal contents are stored once: their inodes name the same place in the stream. Small ones are found by their SHA-256.
A large one is compared, by the digests that its chunks get anyway, with an earlier one of the same size and the same checksum of
the first chunk; it is held in memory until then, so this ends at `MAX_COMPARED_BYTES`.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from isal import isal_zlib

from . import spec
from .model import Data
from .tree import Node

MAX_COMPARED_BYTES = 64 * 1024 * 1024
MIN_SHARED_BYTES = 256  # what is smaller costs more to remember than it saves

_ZEROS = bytes(spec.ALIGNMENT)


class Sink(Protocol):
    """Where chunks go, in the order of the stream."""

    def put(self, stream_offset: int, raw: bytes | bytearray, *, large: bool) -> int:
        """Takes a chunk, of a large file or a gather; the buffer is the callee's from then on. Returns the chunk's number."""
        ...

    def digests(self, first: int, count: int) -> list[bytes]:
        """SHA-256 of chunks that were put."""
        ...


class Chunker:
    """Takes files, gives chunks to `sink`. `shared_bytes` counts the contents that were there already."""

    def __init__(self, chunk_size: int, sink: Sink) -> None:
        spec.check_chunk_size(chunk_size)
        self.chunk_size = chunk_size
        self.stream_size = 0
        self.shared_bytes = 0
        self._sink = sink
        self._gather = bytearray()
        self._waiting: list[tuple[Node, int]] = []
        self._small: dict[bytes, Node] = {}  # by SHA-256
        self._large: dict[tuple[int, int], list[tuple[int, Node]]] = {}  # by size and first chunk's CRC-32: number of the first chunk
        self._equal: list[tuple[Node, Node]] = []  # files of equal contents: a later one, the first

    def add(self, node: Node, data: Data, size: int) -> None:
        """Takes `size` bytes from `data`; `node.data` is set by the end of `finish`."""
        if size >= self.chunk_size:
            self._add_large(node, data, size)
        elif size:
            self._add_gathered(node, data, size)

    def finish(self) -> None:
        """Closes the open gather."""
        if self._waiting:
            self._close_gather()
        for node, first in self._equal:
            node.data = first.data

    def _share(self, node: Node, first: Node, size: int) -> None:
        self._equal.append((node, first))
        self.shared_bytes += size

    # Large files

    def _add_large(self, node: Node, data: Data, size: int) -> None:
        piece = data.read(self.chunk_size)
        alike = self._large.setdefault((size, isal_zlib.crc32(piece)), [])
        pieces = [piece]
        if alike and size <= MAX_COMPARED_BYTES:
            while more := data.read(self.chunk_size):
                pieces.append(more)
            digests = [hashlib.sha256(piece).digest() for piece in pieces]
            for number, first in alike:
                if self._sink.digests(number, len(pieces)) == digests:
                    self._share(node, first, size)
                    return
        start = node.data = spec.align(self.stream_size)
        alike.append((self._sink.put(start, pieces[0], large=True), node))
        for done in range(self.chunk_size, size, self.chunk_size):
            index = done // self.chunk_size
            piece = pieces[index] if index < len(pieces) else data.read(min(self.chunk_size, size - done))
            self._sink.put(start + done, piece, large=True)
        self.stream_size = start + size

    # Small files

    def _add_gathered(self, node: Node, data: Data, size: int) -> None:
        contents = data.read(size)
        if size >= MIN_SHARED_BYTES:
            first = self._small.setdefault(hashlib.sha256(contents).digest(), node)
            if first is not node:
                self._share(node, first, size)
                return
        gather = self._gather
        padding = -len(gather) % spec.ALIGNMENT if size >= spec.ALIGNMENT else 0
        if len(gather) + padding + size > self.chunk_size:
            self._close_gather()
            gather = self._gather
            padding = 0
        if padding:
            gather += _ZEROS[:padding]
        self._waiting.append((node, len(gather)))
        gather += contents
        if len(gather) * 2 >= self.chunk_size and isal_zlib.crc32(contents) * self.chunk_size < 6 * size << 32:
            self._close_gather()

    def _close_gather(self) -> None:
        start = spec.align(self.stream_size)
        for node, offset in self._waiting:
            node.data = start + offset
        self.stream_size = start + len(self._gather)
        self._sink.put(start, self._gather, large=False)
        self._gather = bytearray()
        self._waiting = []
