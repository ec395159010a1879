"""Cuts contents into chunks: docs/format.md §2, the gather lane for small files and the lane for large ones.

Both lanes see the files in the order of the input. A gather gets its place in the stream when it is closed, so that the
chunks of a large file can pass an open one by and memory holds one chunk at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from . import spec
from .model import Data
from .tree import Node

_ZEROS = bytes(spec.ALIGNMENT)

Emit = Callable[[int, bytes | bytearray], None]


class Chunker:
    """`emit(stream_offset, raw)` is called once per chunk, in the order of the stream; the buffer is the callee's from then on."""

    def __init__(self, chunk_size: int, emit: Emit) -> None:
        spec.check_chunk_size(chunk_size)
        self.chunk_size = chunk_size
        self.stream_size = 0
        self._emit = emit
        self._gather = bytearray()
        self._waiting: list[tuple[Node, int]] = []

    def add(self, node: Node, data: Data, size: int) -> None:
        """Takes `size` bytes from `data`; `node.data` is set now for a large file, else when its gather is closed."""
        if size >= self.chunk_size:
            self._add_large(node, data, size)
        elif size:
            self._add_gathered(node, data, size)

    def finish(self) -> None:
        """Closes the open gather."""
        if self._waiting:
            self._close_gather()

    def _add_large(self, node: Node, data: Data, size: int) -> None:
        start = spec.align(self.stream_size)
        node.data = start
        for done in range(0, size, self.chunk_size):
            self._emit(start + done, data.read(min(self.chunk_size, size - done)))
        self.stream_size = start + size

    def _add_gathered(self, node: Node, data: Data, size: int) -> None:
        contents = data.read(size)
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
        if len(gather) * 2 >= self.chunk_size and zlib.crc32(contents) * self.chunk_size < 6 * size << 32:
            self._close_gather()

    def _close_gather(self) -> None:
        start = spec.align(self.stream_size)
        for node, offset in self._waiting:
            node.data = start + offset
        self.stream_size = start + len(self._gather)
        self._emit(start, self._gather)
        self._gather = bytearray()
        self._waiting = []
