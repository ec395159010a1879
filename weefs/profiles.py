"""Profiles of layers: which chunks are read, in the order of their first read; what becomes of one after a run, and where they are kept
(docs/fill.md). Values and files; recording and fetching are others'.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weefs.cachedir import directory_name
from weefs.errors import WeefsError

VERSION = 1
ARTIFACT_TYPE = "application/vnd.weenv.profile.v1"
DOCUMENT_TYPE = "application/vnd.weenv.profile.v1+json"
MAX_PROFILES = 4096
MAX_DOCUMENT_BYTES = 1 << 20
MISSED_MAX = 3
"""Counted runs in a row that do not read a chunk: then it leaves."""
HITS_KEPT = 3
LEAST_HIT_RATE = 0.5
UNTRUSTED_SHARE = 0.25
UNTRUSTED_BYTES = 64 << 20
"""Of a layer, the larger of the two is fetched for a published profile: what a wrong one can cost. A tenth was not enough: a program that
imports five large packages reads a fifth of a layer of 1.5 GB (bench.cold_start)."""

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.json")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer. The fields are those of docs/fill.md."""

    profile: Literal[1] = 1
    layer: str
    layer_chunks: Index
    chunks: tuple[Index, ...]
    missed: tuple[int, ...]
    raw_bytes: int = 0
    runs: int = 0
    hits: tuple[tuple[int, int], ...] = ()
    origin: Literal["recorded", "published"] = "recorded"

    @property
    def hit_rate(self) -> float | None:
        """Of the last counted runs. None: none named anything."""
        named = sum(named for _touched, named in self.hits)
        return sum(touched for touched, _named in self.hits) / named if named else None


class PublishedLayer(msgspec.Struct, frozen=True, kw_only=True):
    layer: str
    layer_chunks: Index
    chunks: tuple[Index, ...]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What is published beside a group."""

    profile: Literal[1] = 1
    layers: tuple[PublishedLayer, ...]


class ProfileRefused(WeefsError):
    """A document that is no profile, or of another layer."""


# ---- what becomes of a profile ----


def merged(before: Profile | None, layer: str, layer_chunks: int, touched: Sequence[int], sizes: Mapping[int, int]) -> Profile:
    """After a run that is not counted. `touched`: in the order of their first read; `sizes`: raw bytes of all chunks concerned."""
    known = before.chunks if before else ()
    chunks = tuple(dict.fromkeys((*known, *touched)))
    missed = (before.missed if before else ()) + (0,) * (len(chunks) - len(known))
    return Profile(
        layer=layer,
        layer_chunks=layer_chunks,
        chunks=chunks,
        missed=missed,
        raw_bytes=sum(sizes[chunk] for chunk in chunks),
        runs=before.runs if before else 0,
        hits=before.hits if before else (),
        origin=before.origin if before else "recorded",
    )


def after_run(before: Profile | None, layer: str, layer_chunks: int, touched: Sequence[int], sizes: Mapping[int, int]) -> Profile:
    """After a run that is counted, in which something was read."""
    read = dict.fromkeys(touched)
    missed = dict(zip(before.chunks, before.missed, strict=True)) if before else {}
    hits: tuple[tuple[int, int], ...] = before.hits if before else ()
    if missed:
        named = sum(sizes[chunk] for chunk in missed)
        hits = (*hits, (sum(sizes[chunk] for chunk in missed if chunk in read), named))[-HITS_KEPT:]
    kept = {chunk: times + 1 for chunk, times in missed.items() if chunk not in read and times + 1 < MISSED_MAX}
    if len(hits) == HITS_KEPT and sum(touched for touched, _ in hits) < LEAST_HIT_RATE * sum(named for _, named in hits):
        kept, hits = {}, ()
    chunks = (*read, *kept)
    return Profile(
        layer=layer,
        layer_chunks=layer_chunks,
        chunks=chunks,
        missed=(*(0 for _ in read), *kept.values()),
        raw_bytes=sum(sizes[chunk] for chunk in chunks),
        runs=before.runs + 1 if before else 1,
        hits=hits,
        origin="recorded",
    )


# ---- published ones ----


def document_of(profiles: Sequence[Profile]) -> bytes:
    """As it is published. Of layers whose chunks do not all fit, those stay that are read first."""
    share = 1.0
    while True:
        layers = tuple(
            PublishedLayer(layer=one.layer, layer_chunks=one.layer_chunks, chunks=one.chunks[: int(len(one.chunks) * share)])
            for one in profiles
        )
        data = msgspec.json.encode(Document(layers=layers))
        if len(data) <= MAX_DOCUMENT_BYTES:
            return data
        share *= 0.9 * MAX_DOCUMENT_BYTES / len(data)


def published_profile(data: bytes, layer: str, layer_chunks: int) -> Profile | None:
    """The profile of one layer in a published document; None: it has none of it. ProfileRefused."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ProfileRefused(f"profile: expected at most {MAX_DOCUMENT_BYTES} bytes, received {len(data)}")
    try:
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileRefused(f"profile: expected a document of version {VERSION}: {error}") from error
    found = [one for one in document.layers if one.layer == layer]
    if not found:
        return None
    if len(found) > 1:
        raise ProfileRefused(f"profile: expected layer {layer} once, received it {len(found)} times")
    chunks = found[0].chunks
    _check_chunks(chunks, found[0].layer_chunks, layer, layer_chunks)
    return Profile(layer=layer, layer_chunks=layer_chunks, chunks=chunks, missed=(0,) * len(chunks), origin="published")


def within_trust(profile: Profile, sizes: Mapping[int, int], layer_bytes: int) -> Profile:
    """As much of a published profile as may be fetched for it. `sizes`: of its chunks, bytes."""
    left = max(int(layer_bytes * UNTRUSTED_SHARE), UNTRUSTED_BYTES)
    chunks: list[int] = []
    for chunk in profile.chunks:
        left -= sizes[chunk]
        if left < 0:
            break
        chunks.append(chunk)
    raw_bytes = sum(sizes[chunk] for chunk in chunks)
    return msgspec.structs.replace(profile, chunks=tuple(chunks), missed=(0,) * len(chunks), raw_bytes=raw_bytes)


def _check_chunks(chunks: Sequence[int], said: int, layer: str, layer_chunks: int) -> None:
    """ProfileRefused."""
    if said != layer_chunks:
        raise ProfileRefused(f"profile of {layer}: expected one of {layer_chunks} chunks, received one of {said}")
    if chunks and max(chunks) >= layer_chunks:
        raise ProfileRefused(f"profile of {layer}: expected chunks below {layer_chunks}, received {max(chunks)}")
    if len(set(chunks)) != len(chunks):
        raise ProfileRefused(f"profile of {layer}: expected each chunk once, received {len(chunks) - len(set(chunks))} again")


# ---- on disk ----


class ProfileStore:
    """The profiles of a node's cache. Blocking; one process writes, others may read meanwhile."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "profiles"

    def path(self, layer: str) -> Path:
        """LayerRefused: it is no digest."""
        return self.directory / f"{directory_name(layer).removeprefix('sha256-')}.json"

    def load(self, layer: str) -> Profile | None:
        """None: there is none of use."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, ProfileRefused):
            found = msgspec.json.decode(self.path(layer).read_bytes(), type=Profile)
            _check_chunks(found.chunks, found.layer_chunks, layer, found.layer_chunks)
            if found.layer == layer and len(found.missed) == len(found.chunks):
                return found
        return None

    def save(self, profile: Profile) -> None:
        """Replaces it as a whole, and removes those that are too many. OSError."""
        self.directory.mkdir(exist_ok=True)
        path = self.path(profile.layer)
        is_new = not path.exists()
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(profile))
        unfinished.replace(path)
        if is_new:
            self._shrink()

    def _shrink(self) -> None:
        names = [entry for entry in os.scandir(self.directory) if _FILE_NAME.fullmatch(entry.name)]
        if len(names) <= MAX_PROFILES:
            return
        for entry in sorted(names, key=lambda entry: entry.stat().st_mtime)[: len(names) - MAX_PROFILES]:
            Path(entry).unlink(missing_ok=True)

    def all(self) -> Iterator[Profile]:
        """Every one that is of use."""
        if self.directory.is_dir():
            for path in sorted(self.directory.glob("*.json")):
                if _FILE_NAME.fullmatch(path.name) and (found := self.load(f"sha256:{path.stem}")) is not None:
                    yield found
