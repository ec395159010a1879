"""The diff of a build as a layer that the same build makes again: what belongs to the run and not to its result is taken out.

- Times later than the recipe's epoch become the epoch. A layer has no other times than those of modification.
- What the recipe excludes is not there: neither files nor removals.
- A `.pyc` in a `__pycache__` that names a later time than the epoch as its source's is left out: it differs from build to
  build, and Python would not believe it, since its source has another time now.

A hard link to a file that is left out takes its contents over. The diff is read twice: contents pass by before it is known
who inherits them.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from attrs import evolve, frozen

from layerformat import Data, EncodeReport, Entry, Kind, encode, read_tar
from registry.publish import Encoding

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
_NS_PER_S = 1_000_000_000
_PYC_HEADER = struct.Struct("<4sIII")
"""Magic number, flags, and with no flag set the time and size of the source (PEP 552)."""

Members = Mapping[bytes, tuple[Entry, bytes]]
"""Files by their path, with their contents."""


@frozen
class Survey:
    """What of a diff does not go into the layer.

    excluded  paths that the recipe excludes, removals under the path that they remove
    stale     compiled Python files that differ from build to build
    heirs     by a file that is left out: the first of its names that stays
    """

    excluded: frozenset[bytes]
    stale: frozenset[bytes]
    heirs: Mapping[bytes, bytes]


def survey_diff(diff: BinaryIO, epoch_s: int, is_excluded: Callable[[bytes], bool]) -> Survey:
    """Reads a diff from its beginning. LayerError."""
    excluded: set[bytes] = set()
    stale: set[bytes] = set()
    heirs: dict[bytes, bytes] = {}
    diff.seek(0)
    for entry, data in read_tar(diff, "the diff"):
        path, target = _path(entry), _clean(entry.target)
        if is_excluded(path):
            excluded.add(path)
        elif _is_cached_bytecode(path) and (target in stale if entry.kind is Kind.HARD_LINK else _is_later(entry, data, epoch_s)):
            stale.add(path)
        elif entry.kind is Kind.HARD_LINK and (target in excluded or target in stale):
            heirs.setdefault(target, path)
    return Survey(frozenset(excluded), frozenset(stale), heirs)


def encode_diff(
    diff: BinaryIO, survey: Survey, layer: Path, encoding: Encoding, *, epoch_s: int, jobs: int, replaced: Members | None = None
) -> EncodeReport:
    """Writes the layer; files of `replaced` are in it as they are, whatever the diff says of their paths. LayerError, OSError."""
    with layer.open("wb") as file:
        entries = _entries(diff, survey, epoch_s * _NS_PER_S, replaced or {})
        return encode(entries, file, jobs=jobs, level=encoding.level, chunk_size=encoding.chunk_size)


def _entries(diff: BinaryIO, survey: Survey, epoch_ns: int, replaced: Members) -> Iterator[tuple[Entry, Data]]:
    diff.seek(0)
    for entry, data in read_tar(diff, "the diff"):
        path = _path(entry)
        if path in replaced:
            continue
        kept = _kept(entry, path, survey)
        if kept is not None:
            yield evolve(kept, mtime_ns=min(kept.mtime_ns, epoch_ns)), data
    for entry, contents in replaced.values():
        yield entry, cast(Data, io.BytesIO(contents))


def _kept(entry: Entry, path: bytes, survey: Survey) -> Entry | None:
    """The entry as it goes into the layer; None when it does not."""
    if path in survey.excluded or path in survey.stale:
        heir = survey.heirs.get(path)
        return evolve(entry, path=heir) if heir is not None else None
    target = _clean(entry.target)
    if entry.kind is Kind.HARD_LINK and target in survey.heirs:
        heir = survey.heirs[target]
        return evolve(entry, target=heir) if heir != path else None
    return entry


def _path(entry: Entry) -> bytes:
    """The path that an entry is about: of a removal, that of what it removes."""
    path = _clean(entry.path)
    parent, slash, name = path.rpartition(b"/")
    if name.startswith(WHITEOUT) and name != OPAQUE:
        return parent + slash + name.removeprefix(WHITEOUT)
    return path


def _clean(path: bytes) -> bytes:
    cleaned = os.path.normpath(path).lstrip(b"/")
    return b"" if cleaned == b"." else cleaned


def _is_cached_bytecode(path: bytes) -> bool:
    return path.endswith(b".pyc") and path.rpartition(b"/")[0].rpartition(b"/")[2] == b"__pycache__"


def _is_later(entry: Entry, data: Data, epoch_s: int) -> bool:
    """Whether a compiled file is bound to a source of a later time."""
    header = data.read(_PYC_HEADER.size) if entry.kind is Kind.REGULAR and entry.sparse is None else b""
    if len(header) < _PYC_HEADER.size:
        return False
    _magic, flags, source_mtime_s, _source_size = _PYC_HEADER.unpack(header)
    return bool(flags == 0 and source_mtime_s > epoch_s)
