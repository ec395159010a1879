"""What is fetched from where: counters, and what a histogram of times means.

Counted twice: for its layer, since this process began, and in the core for all layers of its kind of source, in the memory that outlives
the process, where a sum never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

SOURCES = ("registry", "layout", "copy", "peer")
"""Kinds of sources, by their number in the core (weefs_count_traffic); `copy` is another layer in this node's cache, `peer` another node.
Only ever appended to, up to 8.
"""

BUCKET_BOUNDS_S: tuple[float, ...] = tuple((1 << i) / 1_000_000 for i in range(31))
"""Upper bounds of all buckets of a histogram but the last, which has what took longer; seconds, inclusive (csrc/stats.h)."""


def source_kind(source: str) -> str:
    """One of SOURCES: of `oci:/abs/dir` or `http(s)://host:port/repo`."""
    return "layout" if source.startswith("oci:") else "registry"


def quantile_s(buckets: Sequence[int], share: float) -> float | None:
    """The upper bound of the bucket in which that share of all is reached, seconds. None: nothing was counted. Infinite: beyond the
    last bound.
    """
    wanted = share * sum(buckets)
    reached = 0
    for bound_s, n in zip((*BUCKET_BOUNDS_S, float("inf")), buckets, strict=True):
        reached += n
        if n and reached >= wanted:
            return bound_s
    return None


def _count_nothing(**_counts: float) -> None:
    return None


@attrs.define
class LayerTraffic:
    """What was fetched for a layer, since the start. Bytes, requests, chunks. One thread at a time."""

    requests: int = 0
    bytes: int = 0
    metadata_requests: int = 0
    metadata_bytes: int = 0
    retries: int = 0
    given_up_chunks: int = 0
    _also: Callable[..., None] = attrs.field(default=_count_nothing, eq=False, repr=False, alias="also")
    """`Core.count_traffic` of the layer's kind of source."""

    def counted(self) -> dict[str, int]:
        """The figures, for people and programs."""
        return {
            "requests": self.requests,
            "bytes": self.bytes,
            "metadata_requests": self.metadata_requests,
            "metadata_bytes": self.metadata_bytes,
            "retries": self.retries,
            "given_up_chunks": self.given_up_chunks,
        }

    def wanted(self, chunks: int, *, ahead: bool) -> None:
        """Chunks that readers wait for, or that are fetched ahead of them."""
        if ahead:
            self._also(ahead=chunks)
        else:
            self._also(misses=chunks)

    def asked(self, *, metadata: bool) -> None:
        if metadata:
            self.metadata_requests += 1
            self._also(metadata_requests=1)
        else:
            self.requests += 1
            self._also(requests=1)

    def arrived(self, size: int, took_s: float, *, metadata: bool) -> None:
        """The answer to the last request, this many bytes, after this many seconds."""
        if metadata:
            self.metadata_bytes += size
            self._also(metadata_bytes=size, fetch_s=took_s)
        else:
            self.bytes += size
            self._also(bytes=size, fetch_s=took_s)

    def retried(self) -> None:
        self.retries += 1
        self._also(retries=1)

    def gave_up(self) -> None:
        self.given_up_chunks += 1
        self._also(given_up=1)
