"""Encodes entries into a layer: reads in one thread, compresses and hashes in several, writes in order.

The caller's thread reads entries, applies them to the tree, cuts chunks and writes finished ones; workers only turn raw
bytes into stored bytes, in C code that releases the interpreter lock. Nothing waits on a queue: the one thread that
could wait takes the oldest batch in flight and waits for that, so a failure anywhere arrives there as an exception and
ends everything. Chunks travel in batches of about `_BATCH_BYTES`, because handing the interpreter lock over costs more
than compressing one small chunk.

Guarantees: the same entries, level and chunk size give the same bytes for every number of workers; at most
`(2 * jobs + 2)` batches are in flight, so memory does not grow with the layer's contents (metadata: about half a
kilobyte per entry).
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

import zstandard
from attrs import frozen

from . import spec
from .chunker import Chunker
from .model import Data, Entry
from .recipe import RecipeWriter
from .storedtoc import store_toc
from .tocwriter import build_footer, build_toc
from .tree import DEFAULT_MAX_ENTRIES, LayerTree

ENCODER = "weenv-2"
"""Changes when other bytes are made of the same source and parameters."""
DEFAULT_LEVEL = 7
MAX_LEVEL = 19
# Chunks of large files: docs/decisions/0005 has what levels and matches buy and cost there.
_LARGE_FILES_LESS = 3
_LARGE_FILES_MIN_MATCH = 4
_BATCH_BYTES = 1024 * 1024

Raw = tuple[int, bytes | bytearray, bool]
"""Stream offset and contents of a chunk, and whether it is of a large file."""
Stored = tuple[int, int, bytes | bytearray, bytes, int]
"""Stream offset, raw size, stored bytes, SHA-256 and flags of a chunk."""


@frozen
class EncodeReport:
    """What was written. Sizes in bytes; digests as `sha256:` + hex.

    entries       entries applied, whiteouts included
    content_size  sum of the sizes of the regular files, holes included
    shared_bytes  data of files whose contents the layer held already, and which are stored once
    """

    entries: int
    inodes: int
    chunks: int
    chunk_size: int
    content_size: int
    shared_bytes: int
    stream_size: int
    blob_size: int
    blob_digest: str
    toc_offset: int
    toc_size: int
    toc_raw_size: int
    toc_digest: str


class _BlobWriter:
    """Writes the blob front to back: counts, hashes, and records the chunks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.chunks = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def write_chunk(self, stored: Stored) -> None:
        stream_offset, raw_size, data, sha256, flags = stored
        self.chunks += spec.CHUNK.pack(stream_offset, self.size, len(data), raw_size, sha256, flags, 0)
        self.write(data)

    @property
    def chunks_written(self) -> int:
        return len(self.chunks) // spec.CHUNK.size

    def digests(self, first: int, count: int) -> list[bytes]:
        """SHA-256 of chunks that were written."""
        table = self.chunks[first * spec.CHUNK.size : (first + count) * spec.CHUNK.size]
        return [record[4] for record in spec.CHUNK.iter_unpack(table)]


class _Pipeline:
    """Chunks in, stored chunks out to the writer, in order. A context manager: no worker outlives it."""

    def __init__(self, writer: _BlobWriter, *, jobs: int, level: int, chunk_size: int, written: Callable[[], None]) -> None:
        self._writer = writer
        self._level = level
        self._chunk_size = chunk_size
        self._written = written
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="layer-encode")
        self._limit = 2 * jobs + 2
        self._in_flight: deque[Future[list[Stored]]] = deque()
        self._batch: list[Raw] = []
        self._batch_bytes = 0
        self._chunks = 0
        self._local = threading.local()

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def put(self, stream_offset: int, raw: bytes | bytearray, *, large: bool) -> int:
        """Takes one chunk; waits for the oldest batch when too many are in flight, and raises what a worker raised."""
        self._batch.append((stream_offset, raw, large))
        self._batch_bytes += len(raw)
        self._chunks += 1
        if self._batch_bytes >= _BATCH_BYTES:
            self._submit()
        return self._chunks - 1

    def digests(self, first: int, count: int) -> list[bytes]:
        """SHA-256 of chunks, once they are written."""
        if self._chunks - len(self._batch) < first + count:
            self._submit()
        while self._writer.chunks_written < first + count:
            self._write_oldest()
        return self._writer.digests(first, count)

    def finish(self) -> None:
        """Writes everything that is still under way."""
        if self._batch:
            self._submit()
        while self._in_flight:
            self._write_oldest()

    def _submit(self) -> None:
        while len(self._in_flight) >= self._limit or (self._in_flight and self._in_flight[0].done()):
            self._write_oldest()
        self._in_flight.append(self._pool.submit(self._store, self._batch))
        self._batch = []
        self._batch_bytes = 0

    def _write_oldest(self) -> None:
        for stored in self._in_flight.popleft().result():
            self._writer.write_chunk(stored)
        self._written()

    def _store(self, batch: list[Raw]) -> list[Stored]:
        """In a worker: compresses and hashes. Compressors belong to a thread; each call starts from the same state."""
        compressors = getattr(self._local, "compressors", None)
        if compressors is None:
            compressors = self._local.compressors = _compressors(self._level, self._chunk_size)
        result: list[Stored] = []
        for stream_offset, raw, large in batch:
            sha256 = hashlib.sha256(raw).digest()
            frame: bytes = compressors[large].compress(raw)
            if len(frame) < len(raw):
                result.append((stream_offset, len(raw), frame, sha256, spec.CHUNK_ZSTD))
            else:
                result.append((stream_offset, len(raw), raw, sha256, 0))
        return result


def _compressors(level: int, chunk_size: int) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
    """For gathers of small files, and for chunks of large ones."""
    of = zstandard.ZstdCompressionParameters.from_level
    small = of(level, source_size=chunk_size)
    large = of(max(1, level - _LARGE_FILES_LESS), source_size=chunk_size, min_match=_LARGE_FILES_MIN_MATCH)
    return zstandard.ZstdCompressor(compression_params=small), zstandard.ZstdCompressor(compression_params=large)


def encode(
    entries: Iterable[tuple[Entry, Data]],
    dst: BinaryIO,
    *,
    jobs: int = 1,
    level: int = DEFAULT_LEVEL,
    chunk_size: int = spec.DEFAULT_CHUNK_SIZE,
    max_entries: int = DEFAULT_MAX_ENTRIES,
    recipe: RecipeWriter | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EncodeReport:
    """Writes a layer of `entries` to `dst`, front to back.

    jobs        threads that compress, beside the caller's, which reads and writes
    level       zstd level of small files' chunks, 1 to 19; those of large files are compressed three levels below it
    chunk_size  bytes, a multiple of 4,096 up to 16 MiB
    max_entries refuses a source with more: an entry takes about 0.6 kB of memory until the end
    recipe      is told where each file's contents are; the caller finishes it
    progress    called with the entries applied and the bytes written, after each batch

    Raises what `entries` raises, UnsupportedEntry for what a layer cannot say, ValueError for an impossible parameter.
    `dst` then holds a part of a layer and is to be thrown away.
    """
    if jobs < 1:
        raise ValueError(f"jobs: expected at least 1, received {jobs}")
    if not 1 <= level <= MAX_LEVEL:
        raise ValueError(f"level: expected 1 to {MAX_LEVEL}, received {level}")
    tree = LayerTree(max_entries)
    writer = _BlobWriter(dst)

    def written() -> None:
        if progress is not None:
            progress(tree.entries, writer.size)

    with _Pipeline(writer, jobs=jobs, level=level, chunk_size=chunk_size, written=written) as pipeline:
        chunker = Chunker(chunk_size, pipeline)
        for entry, data in entries:
            node = tree.apply(entry)
            if node is not None:
                size = entry.data_size
                chunker.add(node, data, size)
                if recipe is not None and size:
                    recipe.contents(node, size)
        chunker.finish()
        pipeline.finish()
    return _write_toc(tree, writer, chunker)


def _write_toc(tree: LayerTree, writer: _BlobWriter, chunker: Chunker) -> EncodeReport:
    toc_offset = writer.size
    raw = build_toc(
        tree.root,
        bytes(writer.chunks),
        chunk_size=chunker.chunk_size,
        stream_size=chunker.stream_size,
        chunks_end=toc_offset,
    )
    header = spec.HEADER.unpack_from(raw)
    toc = store_toc(raw)
    writer.write(toc.stored)
    writer.write(build_footer(toc, toc_offset))
    return EncodeReport(
        entries=tree.entries,
        inodes=header[12],
        chunks=writer.chunks_written,
        chunk_size=chunker.chunk_size,
        content_size=header[7],
        shared_bytes=chunker.shared_bytes,
        stream_size=chunker.stream_size,
        blob_size=writer.size,
        blob_digest="sha256:" + writer.digest.hexdigest(),
        toc_offset=toc_offset,
        toc_size=len(toc.stored),
        toc_raw_size=toc.raw_size,
        toc_digest="sha256:" + toc.digest.hex(),
    )
