"""The only door to the C core: typed, with errors as exceptions and nothing of cffi outside.

Calls that may take long (a plan, a chunk's decompression and write) release the interpreter lock, as every cffi call
does, so they may be made from a thread. The core never calls back into Python: misses and faults are taken from it when
`miss_fd` is readable."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, NewType

import attrs

from weefs._core import ffi, lib
from weefs.traffic import SOURCES

LayerSlot = NewType("LayerSlot", int)
PlanSlot = NewType("PlanSlot", int)
ChunkIndex = NewType("ChunkIndex", int)

MAX_PENDING = 32768
"""READ requests that may wait for chunks at once, unless told otherwise; each takes 40 bytes of the session and some 150 of memory."""
MAX_COPIES = 8
"""Places of a chunk that are looked at."""
MAX_TAKEN = 1024
"""Misses or faults taken in one call."""

FUSE_OPCODES = {
    1: "lookup", 2: "forget", 3: "getattr", 5: "readlink", 14: "open", 15: "read", 17: "statfs", 18: "release",
    22: "getxattr", 23: "listxattr", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 34: "access", 36: "interrupt",
    38: "destroy", 42: "batch_forget", 44: "readdirplus", 46: "lseek", 50: "syncfs", 52: "statx",
}  # fmt: skip
"""Names of the FUSE operations that a read-only mount sees (linux/fuse.h)."""


TRAFFIC = ("misses", "ahead", "requests", "bytes", "metadata_requests", "metadata_bytes", "retries", "given_up")
"""What is counted of a source: chunks that readers waited for and chunks fetched ahead of them, requests, bytes, chunks given up."""


class CoreError(OSError):
    """A refusal of the C core: `errno`, and one sentence that says what was expected and what was received."""


class DamagedError(CoreError):
    """Bytes that are not what their digest or the format says (EBADMSG)."""


@attrs.frozen
class Miss:
    """A chunk to be fetched: where it is in the blob and how large, in bytes."""

    layer: LayerSlot
    chunk: ChunkIndex
    blob_offset: int
    stored_size: int
    raw_size: int
    stream_offset: int = 0
    """In the layer's logical stream, where it is not compressed."""


@attrs.frozen
class Place:
    """Where a layer or a plan is: what must be the same in the next process."""

    slot: int
    generation: int


@attrs.frozen
class CoreFault:
    """A READ that is to be answered with EIO; `pid` is the reader's (0: the kernel's own), `error` the errno that the
    fetch failed with. `number` counts up from 1 in the life of the session.
    """

    number: int
    layer: LayerSlot
    chunk: ChunkIndex
    pid: int
    error: int


@attrs.frozen
class LayerInfo:
    """Sizes in bytes; `present_*` count what is in the cache now."""

    inodes: int
    dirents: int
    chunks: int
    chunk_size: int
    stream_size: int
    content_size: int
    blob_size: int
    present_chunks: int
    present_stored: int
    present_raw: int
    room: int
    """On disk, of the present and the suspect chunks."""
    suspect_chunks: int
    """Present when the machine went down, and not verified since."""
    read_chunks: int
    """How many first_touches() has."""
    read_raw: int
    """Their bytes in the stream."""


@attrs.frozen
class PlanInfo:
    """Of a plan: names and bytes in its layers, directories that several layers have, files with a link count of
    their own.
    """

    entries: int
    content_size: int
    merged_dirs: int
    plan_specific: int
    not_stackable: str
    """Why overlayfs, given images of the layers, would show something else; empty: it shows the same."""
    xattrs: bool
    """Whether a layer has extended attributes."""


@attrs.frozen
class ImageInfo:
    """Of an EROFS image: its size in bytes, inodes and names."""

    size: int
    inodes: int
    names: int


@attrs.frozen
class Attributes:
    """What the mount shows of one path, as stat(2) has it; `node` is the FUSE node id."""

    node: int
    size: int
    blocks: int
    mtime_s: int
    mtime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int


def _check(result: int, error: object | None, what: str) -> int:
    if result >= 0:
        return result
    text = ffi.string(error.text).decode(errors="replace") if error is not None else ""  # type: ignore[attr-defined]
    kind = DamagedError if -result == errno.EBADMSG else CoreError
    raise kind(-result, text or f"{what}: {os.strerror(-result)}")


def check_toc(toc: bytes) -> None:
    """Validates a raw TOC (docs/format.md §3); DamagedError or CoreError says which rule is broken."""
    error = ffi.new("struct weefs_error *")
    _check(lib.weefs_check_toc(ffi.from_buffer(toc), len(toc), error), error, "TOC")


def write_layer_image(toc: bytes | mmap, name: str, fd: int) -> ImageInfo:
    """Writes the metadata of the layer with this raw TOC to `fd` as an EROFS image; contents are redirected to `/<name>/<inode>`.

    `name`: 32 hexadecimal digits. DamagedError: the TOC is none; CoreError: the layer has what an image cannot hold.
    """
    error = ffi.new("struct weefs_error *")
    info = ffi.new("struct weefs_image_info *")
    _check(lib.weefs_write_layer_image(ffi.from_buffer(toc), len(toc), name.encode(), fd, info, error), error, "image")
    return ImageInfo(info.size, info.inodes, info.names)


def check_image(fd: int, name: str) -> None:
    """DamagedError unless `fd` holds a whole image of that name, made by this version: by its first block and its size."""
    error = ffi.new("struct weefs_error *")
    _check(lib.weefs_check_image(fd, name.encode(), error), error, "image")


def mount(path: Path, *, source: str = "weefs", threads: int = 2) -> list[int]:
    """Mounts weefs read-only on `path`; returns `threads` descriptors of /dev/fuse, the caller's to keep, hand over
    and close.
    """
    error = ffi.new("struct weefs_error *")
    descriptors = ffi.new("int[]", threads)
    _check(lib.weefs_mount(os.fsencode(path), source.encode(), descriptors, threads, error), error, f"mount on {path}")
    return list(descriptors)


def create_session(*, threads: int = 2, connections: int = 1, max_pending: int = MAX_PENDING) -> int:
    """Makes the memory that outlives a serving process; returns its descriptor, the caller's to keep, hand over and
    close. `threads`: of all `connections` together, which are as many mounts (of two, the first shows no extended attributes);
    `max_pending`: READ requests that may wait at once.
    """
    fd = ffi.new("int *")
    _check(lib.weefs_create_session(threads, connections, max_pending, fd), None, "session memory")
    return int(fd[0])


@attrs.frozen
class LayerFiles:
    """The open files of a layer in the cache; the TOC's size in bytes."""

    toc_fd: int
    toc_size: int
    data_fd: int
    map_fd: int
    boot_id: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.boot_id) != 16:
            raise ValueError(f"boot_id: expected 16 bytes, received {len(self.boot_id)}")


@attrs.frozen
class Swept:
    """What a turn of a layer's clock freed, bytes; `at_end`: it came to the end of the layer."""

    freed: int
    at_end: bool


def sweep_files(files: LayerFiles, goal: int) -> Swept:
    """Core.sweep() of a layer that nobody serves. CoreError."""
    error = ffi.new("struct weefs_error *")
    freed = ffi.new("uint64_t *")
    at_end = lib.weefs_sweep_files(*attrs.astuple(files), goal, freed, error)
    _check(at_end, error, "sweep")
    return Swept(freed[0], bool(at_end))


def check_files(files: LayerFiles) -> tuple[int, int]:
    """Compares every chunk in the cache of a layer that nobody serves with its digest, and drops those that are damaged: how many were
    right, how many damaged. CoreError.
    """
    error = ffi.new("struct weefs_error *")
    good, damaged = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    _check(lib.weefs_check_files(*attrs.astuple(files), good, damaged, error), error, "check")
    return good[0], damaged[0]


class Core:
    """One FUSE superblock. `close()` needs its mount to be gone, since it waits for the FUSE threads.

    `session_fd`: the memory of create_session(), which stays the caller's; without it, what is served ends with this
    process. `resend=False`: as on a kernel that cannot send requests again (before 6.9).
    """

    def __init__(
        self,
        *,
        max_pending: int = MAX_PENDING,
        escape_overlay_xattrs: bool = True,
        session_fd: int | None = None,
        resend: bool = True,
    ) -> None:
        options = ffi.new(
            "struct weefs_options *",
            {
                "max_pending": max_pending,
                "escape_overlay_xattrs": int(escape_overlay_xattrs),
                "session_fd": -1 if session_fd is None else session_fd,
                "no_resend": int(not resend),
            },
        )
        made = ffi.new("struct weefs **")
        error = ffi.new("struct weefs_error *")
        _check(lib.weefs_new(options, made, error), error, "weefs_new")
        self._weefs = made[0]
        self._misses = ffi.new("struct weefs_miss[]", MAX_TAKEN)
        self._faults = ffi.new("struct weefs_fault[]", MAX_TAKEN)

    def close(self) -> None:
        lib.weefs_free(self._weefs)
        self._weefs = ffi.NULL

    @property
    def times_served(self) -> int:
        """How many processes have begun to serve this session. Not 0 before serve(): there is something to take over."""
        return int(lib.weefs_times_served(self._weefs))

    def reserve_layer(self) -> Place:
        """A place for a layer of which the kernel knows nothing, until it is used or released."""
        return self._reserve(lib.WEEFS_LAYER)

    def reserve_plan(self) -> Place:
        return self._reserve(lib.WEEFS_PLAN)

    def release_layer(self, place: Place) -> None:
        lib.weefs_release(self._weefs, lib.WEEFS_LAYER, place.slot)

    def release_plan(self, place: Place) -> None:
        lib.weefs_release(self._weefs, lib.WEEFS_PLAN, place.slot)

    def _reserve(self, kind: int) -> Place:
        place = ffi.new("struct weefs_place *")
        _check(lib.weefs_reserve(self._weefs, kind, place), None, "reserve a slot")
        return Place(place.slot, place.generation)

    def add_layer(self, files: LayerFiles, *, name: str = "", place: Place | None = None) -> LayerSlot:
        """Adds a layer; the descriptors are duplicated.

        `name`: its directory below `objects`, which must tell its TOC; empty: it has none. `place`: a reserved one,
        or the one that it had in an earlier process.
        """
        error = ffi.new("struct weefs_error *")
        at = place or self.reserve_layer()
        added = lib.weefs_add_layer(self._weefs, [attrs.astuple(at)], *attrs.astuple(files), name.encode(), error)
        if added < 0 and place is None:
            self.release_layer(at)
        _check(added, error, "layer")
        return LayerSlot(at.slot)

    def close_layer(self, layer: LayerSlot) -> bool:
        """Whether it is closed: not while a plan has it, a reader waits for it, or the kernel holds a node of it. Its place
        stays reserved until release_layer().
        """
        closed = lib.weefs_close_layer(self._weefs, layer)
        if closed == -errno.EBUSY:
            return False
        _check(closed, None, f"layer {layer}")
        return True

    def idle_layers(self) -> list[LayerSlot]:
        """Layers that could be closed now, up to MAX_TAKEN. `miss_fd` becomes readable when there is a new one."""
        slots = ffi.new("uint32_t[]", MAX_TAKEN)
        return [LayerSlot(slots[i]) for i in range(lib.weefs_idle_layers(self._weefs, slots, MAX_TAKEN))]

    def layer_info(self, layer: LayerSlot) -> LayerInfo:
        info = ffi.new("struct weefs_layer_info *")
        _check(lib.weefs_layer_info(self._weefs, layer, info), None, f"layer {layer}")
        return LayerInfo(*(getattr(info, field.name) for field in attrs.fields(LayerInfo)))

    def add_plan(
        self, name: str, layers: Sequence[LayerSlot], *, place: Place | None = None
    ) -> tuple[PlanSlot, PlanInfo]:
        """Merges the layers, base first, into directory `name` of the mount. `place` as for add_layer()."""
        error = ffi.new("struct weefs_error *")
        at = place or self.reserve_plan()
        info = ffi.new("struct weefs_plan_info *")
        slots = list(layers)
        added = lib.weefs_add_plan(self._weefs, [attrs.astuple(at)], name.encode(), slots, len(slots), info, error)
        if added < 0 and place is None:
            self.release_plan(at)
        _check(added, error, f"plan {name}")
        reason = ffi.string(info.not_stackable).decode()
        return PlanSlot(at.slot), PlanInfo(info.entries, info.content_size, info.merged_dirs, info.plan_specific, reason, bool(info.xattrs))

    def remove_plan(self, plan: PlanSlot) -> None:
        _check(lib.weefs_remove_plan(self._weefs, plan), None, f"plan {plan}")

    def forget_name(self, name: str) -> None:
        """Makes the kernel drop what it holds below this directory, of a plan that an earlier process removed."""
        lib.weefs_forget_name(self._weefs, name.encode())

    def write_plan_image(self, plan: PlanSlot, name: str, fd: int) -> ImageInfo:
        """As write_layer_image(), of the whole plan; its layers need names. Adding and removing wait meanwhile."""
        error = ffi.new("struct weefs_error *")
        info = ffi.new("struct weefs_image_info *")
        _check(lib.weefs_write_plan_image(self._weefs, plan, name.encode(), fd, info, error), error, "image")
        return ImageInfo(info.size, info.inodes, info.names)

    def set_root(self, plan: PlanSlot) -> None:
        """Shows this plan as the mount's root itself, instead of a directory for each plan."""
        _check(lib.weefs_set_root(self._weefs, plan), None, f"plan {plan}")

    def serve(self, descriptors: Sequence[int]) -> None:
        """Starts a FUSE thread on each descriptor of mount(); they are duplicated. Once, and in the same order in each
        process. What an earlier one left unanswered is taken over: its layers and plans must be there.
        """
        _check(lib.weefs_serve(self._weefs, list(descriptors), len(descriptors)), None, "serve")

    @property
    def ended(self) -> bool:
        """Whether the mount is gone and every FUSE thread has ended."""
        return bool(lib.weefs_ended(self._weefs))

    @property
    def ended_fd(self) -> int:
        """Readable when the mount is gone. The core owns it."""
        return int(lib.weefs_ended_fd(self._weefs))

    @property
    def miss_fd(self) -> int:
        """Readable while there is something to take. The core owns it."""
        return int(lib.weefs_miss_fd(self._weefs))

    def take_misses(self) -> list[Miss]:
        """Up to MAX_TAKEN chunks that readers wait for; each must be answered with publish() or fail()."""
        n = lib.weefs_take_misses(self._weefs, self._misses, MAX_TAKEN)
        return [_miss(self._misses[i]) for i in range(n)]

    def take_faults(self) -> list[CoreFault]:
        """Up to MAX_TAKEN new ones, by number; their readers wait until answer_faults()."""
        n = lib.weefs_take_faults(self._weefs, self._faults, MAX_TAKEN)
        return [
            CoreFault(f.number, LayerSlot(f.layer), ChunkIndex(f.chunk), f.pid, f.error)
            for f in (self._faults[i] for i in range(n))
        ]

    def answer_faults(self, through: int) -> None:
        """The readers of the faults up to this number, which were taken and reported, get their EIO."""
        lib.weefs_answer_faults(self._weefs, through)

    def claim(self, layer: LayerSlot, chunk: ChunkIndex) -> Miss | None:
        """Takes a chunk to fetch ahead of its readers; None when it is present or somebody fetches it already."""
        miss = ffi.new("struct weefs_miss *")
        return _miss(miss) if _check(lib.weefs_claim(self._weefs, layer, chunk, miss), None, "claim") else None

    def claim_run(self, layer: LayerSlot, since: int, size: int) -> list[Miss]:
        """Claims the first chunks from `since` on that are absent and that nobody fetches, as long as they are one range of the blob of at
        most `size` bytes; at least one, if there is one. Each must be answered with publish(), fail() or unclaim().
        """
        misses = ffi.new("struct weefs_miss[]", MAX_TAKEN)
        n = _check(lib.weefs_claim_run(self._weefs, layer, since, size, misses, MAX_TAKEN), None, f"layer {layer}")
        return [_miss(misses[i]) for i in range(n)]

    def unclaim(self, layer: LayerSlot, chunk: ChunkIndex) -> None:
        """Gives a claimed chunk back: it is a miss if a reader waits for it by now, else nobody's."""
        _check(lib.weefs_unclaim(self._weefs, layer, chunk), None, f"chunk {chunk}")

    def describe(self, layer: LayerSlot, chunk: ChunkIndex) -> Miss:
        """A chunk, whether it is in the cache or not. CoreError: there is none of that index."""
        found = ffi.new("struct weefs_miss *")
        _check(lib.weefs_describe_chunk(self._weefs, layer, chunk, found), None, f"chunk {chunk}")
        return _miss(found)

    def first_touches(self, layer: LayerSlot, since: int) -> list[ChunkIndex]:
        """The chunks of a layer in the order of their first READ since it was added, from the `since`th on. What the kernel has in its page
        cache is read without a READ.
        """
        found: list[ChunkIndex] = []
        chunks = ffi.new("uint32_t[]", MAX_TAKEN)
        while n := _check(lib.weefs_first_reads(self._weefs, layer, since + len(found), chunks, MAX_TAKEN), None, f"layer {layer}"):
            found += [ChunkIndex(chunks[i]) for i in range(n)]
        return found

    def publish(self, layer: LayerSlot, chunk: ChunkIndex, stored: bytes | memoryview) -> bool:
        """Verifies a chunk's stored bytes, writes it to the cache and answers its readers. False: the cache has no room; they are answered
        from memory.

        DamagedError: it was not that chunk; its readers still wait. CoreError: no room in the cache, nor in memory.
        """
        error = ffi.new("struct weefs_error *")
        published = lib.weefs_publish(self._weefs, layer, chunk, ffi.from_buffer(stored), len(stored), error)
        return not _check(published, error, f"chunk {chunk}")

    def publish_raw(self, layer: LayerSlot, chunk: ChunkIndex, raw: bytes | memoryview) -> bool:
        """publish() of a chunk's bytes in the stream, uncompressed: from a peer."""
        error = ffi.new("struct weefs_error *")
        published = lib.weefs_publish_raw(self._weefs, layer, chunk, ffi.from_buffer(raw), len(raw), error)
        return not _check(published, error, f"chunk {chunk}")

    def chunks_at(self, layer: LayerSlot, offset: int, size: int) -> range:
        """The chunks that cover a range of the stream, bytes. CoreError ERANGE: it is not inside of it, or empty."""
        first, end = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        _check(lib.weefs_chunks_at(self._weefs, layer, offset, size, first, end), None, f"{size} bytes at {offset} of the stream")
        return range(first[0], end[0])

    def hold(self, layer: LayerSlot, chunks: range) -> int | None:
        """Keeps chunks from being evicted until unhold() is given what this returns. None: one of them is absent. The caller keeps the
        layer from being closed. CoreError EBUSY: too much of the layer is held.
        """
        held = lib.weefs_hold(self._weefs, layer, chunks.start, chunks.stop)
        return None if held == -errno.ENODATA else _check(held, None, f"chunks {chunks.start} to {chunks.stop - 1}")

    def unhold(self, layer: LayerSlot, hold: int) -> bool:
        """False: a chunk was lost all the same, since it was found damaged or the data file was cut off."""
        ended = lib.weefs_unhold(self._weefs, layer, hold)
        if ended == -errno.ESTALE:
            return False
        _check(ended, None, f"hold {hold}")
        return True

    def publish_copy(self, layer: LayerSlot, chunk: ChunkIndex, fd: int, offset: int) -> bool:
        """publish() of a chunk that is, uncompressed, at `offset` of an open file: that of another layer."""
        error = ffi.new("struct weefs_error *")
        return not _check(lib.weefs_publish_copy(self._weefs, layer, chunk, fd, offset, error), error, f"chunk {chunk}")

    def know_layer(self, number: int, toc_fd: int, toc_size: int) -> None:
        """Adds the digests of a layer's chunks to those that find_copies() knows, under the caller's number for it, not 0. CoreError."""
        error = ffi.new("struct weefs_error *")
        _check(lib.weefs_know_layer(self._weefs, number, toc_fd, toc_size, error), error, "TOC")

    def forget_layer(self, number: int) -> None:
        lib.weefs_forget_layer(self._weefs, number)

    def find_copies(self, layer: LayerSlot, chunk: ChunkIndex, but: int) -> list[tuple[int, int]]:
        """Where the cache may have a copy of a chunk: numbers of layers, not `but`, and offsets in their data files."""
        copies = ffi.new("struct weefs_copy[]", MAX_COPIES)
        n = lib.weefs_find_copies(self._weefs, layer, chunk, but, copies, MAX_COPIES)
        return [(copies[i].layer, copies[i].offset) for i in range(n)]

    def check_chunk(self, layer: LayerSlot, chunk: ChunkIndex) -> bool:
        """Compares a chunk in the cache with its digest; one that was suspect is present then, and its readers are answered. False: it is
        not in the cache. DamagedError: nor is it any more.
        """
        error = ffi.new("struct weefs_error *")
        return bool(_check(lib.weefs_check_chunk(self._weefs, layer, chunk, error), error, f"chunk {chunk}"))

    @property
    def cache_used(self) -> int:
        """Room of the chunks of all layers, bytes on disk."""
        return int(lib.weefs_cache_used(self._weefs))

    def limit_cache(self, limit: int) -> None:
        """The most that `cache_used` may become; what arrives beyond is not written. Frees nothing by itself."""
        lib.weefs_limit_cache(self._weefs, limit)

    def count_evicted(self, freed: int) -> None:
        """Adds bytes that sweeps freed to the statistics."""
        lib.weefs_count_evicted(self._weefs, freed)

    def sweep(self, layer: LayerSlot, goal: int) -> Swept:
        """Turns the clock of a layer until `goal` bytes are freed, or it comes to the layer's end. Chunks that were read since it last
        came by stay until it comes again. CoreError.
        """
        error = ffi.new("struct weefs_error *")
        freed = ffi.new("uint64_t *")
        at_end = _check(lib.weefs_sweep(self._weefs, layer, goal, freed, error), error, f"layer {layer}")
        return Swept(freed[0], bool(at_end))

    def fail(self, layer: LayerSlot, chunk: ChunkIndex, error: int) -> None:
        """Gives a chunk up: its readers become faults. `error`: an errno, kept in them."""
        _check(lib.weefs_fail(self._weefs, layer, chunk, error), None, f"chunk {chunk}")

    def statistics(self) -> dict[str, int]:
        """Counters of the session: `requests_<operation>`, bytes, reads, chunks; `pending`, `in_flight` and the slots
        are of now.
        """
        stats = ffi.new("struct weefs_statistics *")
        lib.weefs_get_statistics(self._weefs, stats)
        counted = {f"requests_{name}": int(stats.operations[opcode].requests) for opcode, name in FUSE_OPCODES.items()}
        names = (
            "read_bytes",
            "late_read_bytes",
            "reads_waited",
            "reads_failed",
            "reads_interrupted",
            "chunks_published",
            "chunks_unwritten",
            "chunks_rejected",
            "evicted_bytes",
            "pending",
            "in_flight",
            "layer_slots",
            "plan_slots",
        )
        return counted | {name: int(getattr(stats, name)) for name in names}

    def measurements(self) -> dict[str, Any]:
        """Counters of the session with times, as JSON can say them: `operations` by name (those that occurred; all that have no name
        are `other`), `reads_waited`, `sources` by kind, and the ages of the oldest requests in seconds (0: there is none).
        """
        stats = ffi.new("struct weefs_statistics *")
        lib.weefs_get_statistics(self._weefs, stats)
        operations: dict[str, dict[str, Any]] = {}
        for opcode, operation in enumerate(stats.operations):
            if operation.requests == 0:
                continue
            shown = {"requests": int(operation.requests), "errors": int(operation.errors), "answered": _histogram(operation.answered)}
            name = FUSE_OPCODES.get(opcode, "other")
            operations[name] = _sum(operations[name], shown) if name in operations else shown
        sources = {}
        for number, kind in enumerate(SOURCES):
            traffic = stats.sources[number].traffic
            sources[kind] = {name: int(getattr(traffic, name)) for name in TRAFFIC} | {"fetches": _histogram(stats.sources[number].fetches)}
        return {
            "operations": operations,
            "reads_waited": _histogram(stats.waited),
            "sources": sources,
            "oldest_waiting_s": stats.oldest_waiting_ns / 1e9,
            "oldest_handled_s": stats.oldest_handled_ns / 1e9,
        }

    def count_traffic(self, source: str, *, fetch_s: float = 0.0, **counts: int) -> None:
        """Adds `counts`, names of TRAFFIC, to a kind of source, one of weefs.traffic.SOURCES. `fetch_s`: how long a request took that
        brought something.
        """
        traffic = ffi.new("struct weefs_traffic *", counts)
        _check(lib.weefs_count_traffic(self._weefs, SOURCES.index(source), traffic, round(fetch_s * 1e9)), None, f"source {source}")

    def lookup(self, plan: PlanSlot, path: bytes) -> Attributes:
        """What the mount shows of `path` below the plan's root, without a mount."""
        attr = ffi.new("struct weefs_attr *")
        _check(lib.weefs_lookup(self._weefs, plan, path, attr), None, os.fsdecode(path))
        return Attributes(*(getattr(attr, field.name) for field in attrs.fields(Attributes)))


def _histogram(histogram: Any) -> dict[str, Any]:
    return {"buckets": [int(n) for n in histogram.buckets], "sum_s": histogram.sum_ns / 1e9}


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    buckets = [a + b for a, b in zip(one["answered"]["buckets"], other["answered"]["buckets"], strict=True)]
    return {
        "requests": one["requests"] + other["requests"],
        "errors": one["errors"] + other["errors"],
        "answered": {"buckets": buckets, "sum_s": one["answered"]["sum_s"] + other["answered"]["sum_s"]},
    }


def _miss(miss: object) -> Miss:
    m = miss
    return Miss(LayerSlot(m.layer), ChunkIndex(m.chunk), m.blob_offset, m.stored_size, m.raw_size, m.stream_offset)  # type: ignore[attr-defined]
