"""The figures of node.info as Prometheus metrics: which there are, what they mean, and their text.

docs/metrics.md is made from METRICS, so it cannot be wrong about one. Base units; no label tells an environment, a layer or a plan:
their number has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal

import attrs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from envlet.types import NodeInfo
from weefs.traffic import BUCKET_BOUNDS_S

CONTENT_TYPE = CONTENT_TYPE_LATEST

Samples = Iterable[tuple[tuple[str, ...], Any]]
"""Values of labels, and a number or a histogram (`buckets`, `sum_s`)."""


@attrs.frozen
class Definition:
    """One metric. `name` without the `_total` of a counter."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[NodeInfo], Samples]

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _one(value: Callable[[NodeInfo], float]) -> Callable[[NodeInfo], Samples]:
    return lambda info: [((), value(info))]


def _daemon(key: str) -> Callable[[NodeInfo], Samples]:
    return _one(lambda info: float(info.statistics[key]))


def _plane(samples: Callable[[dict[str, Any]], Samples]) -> Callable[[NodeInfo], Samples]:
    """Of the data plane's own figures: nothing while it does not give them."""

    def of(info: NodeInfo) -> Samples:
        plane = info.statistics["data_plane"]
        return samples(plane) if plane["serving"] else ()

    return of


def _plane_one(value: Callable[[dict[str, Any]], float]) -> Callable[[NodeInfo], Samples]:
    return _plane(lambda plane: [((), value(plane))])


def _fuse(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane_one(lambda plane: float(plane["fuse"][key]))


def _cache(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane_one(lambda plane: float(plane["cache"][key]))


def _operations(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane(lambda plane: [((name,), one[key]) for name, one in plane["operations"].items()])


def _sources(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane(lambda plane: [((kind,), traffic[key]) for kind, traffic in plane["sources"].items()])


def _sources_by(keys: dict[str, str]) -> Callable[[NodeInfo], Samples]:
    """`keys`: a second label's value by the figure's name."""

    def samples(plane: dict[str, Any]) -> Samples:
        return [((kind, keys[key]), traffic[key]) for kind, traffic in plane["sources"].items() for key in keys]

    return _plane(samples)


def _layers(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane_one(lambda plane: float(sum(layer[key] for layer in plane["layers"].values())))


def _reads(plane: dict[str, Any]) -> Samples:
    at_once = plane["operations"].get("read")
    yield ("cache",), sum(at_once["answered"]["buckets"]) if at_once else 0
    yield ("fetch",), sum(plane["reads_waited"]["buckets"])


def _read_bytes(plane: dict[str, Any]) -> Samples:
    fuse = plane["fuse"]
    yield ("cache",), fuse["read_bytes"] - fuse["late_read_bytes"]
    yield ("fetch",), fuse["late_read_bytes"]


def _chunks(plane: dict[str, Any]) -> Samples:
    return [((result,), plane["fuse"][f"chunks_{result}"]) for result in ("published", "unwritten", "rejected")]


def _peers(plane: dict[str, Any]) -> Samples:
    states = [member["state"] for member in plane["peers"]["members"]]
    return [((state,), states.count(state)) for state in ("up", "down", "left_out")]


def _peer(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane_one(lambda plane: float(plane["peers"][key]))


def _fetched_for(plane: dict[str, Any]) -> Samples:
    return [((kind, cause), size) for kind, causes in plane["fetched_for"].items() for cause, size in causes.items()]


def _prefetches(key: str) -> Callable[[NodeInfo], Samples]:
    return _plane_one(lambda plane: float(plane["prefetches"][key]))


def _slots(plane: dict[str, Any]) -> Samples:
    return [((kind,), plane["fuse"][f"{kind}_slots"]) for kind in ("layer", "plan")]


def _about(info: NodeInfo) -> Samples:
    return [((info.version, info.runtime, info.cgroups, info.view), 1)]


METRICS = (
    Definition("weenv_node", "gauge", "Always 1; the labels say what runs.", ("version", "runtime", "cgroups", "view"), _about),
    Definition("weenv_start_time_seconds", "gauge", "When the daemon started, since 1970.", (), _one(lambda info: info.started_unix_s)),
    Definition(
        "weenv_environments", "gauge", "Environments by state; a state without one has no sample.", ("state",),
        lambda info: [((state,), number) for state, number in info.environments.items()],
    ),
    Definition("weenv_environments_max", "gauge", "How many environments there can be.", (), _one(lambda info: info.environments_max)),
    Definition("weenv_environments_starting", "gauge", "Environments that have a place to start now.", (), _daemon("starting")),
    Definition("weenv_environments_starting_max", "gauge", "Such places.", (), _one(lambda info: info.starting_max)),
    Definition("weenv_environments_created", "counter", "Environments made.", (), _daemon("created")),
    Definition("weenv_environments_adopted", "counter", "Environments taken over from the daemon before.", (), _daemon("adopted")),
    Definition("weenv_environments_removed", "counter", "Environments removed.", (), _daemon("removed")),
    Definition("weenv_environment_failures", "counter", "Creations that failed.", (), _daemon("failed_creations")),
    Definition("weenv_execs", "counter", "Commands asked for.", (), _daemon("execs")),
    Definition("weenv_faults", "counter", "Reads that ended with EIO since their chunk could not be had.", (), _daemon("faults")),
    Definition("weenv_faults_unassigned", "counter", "Those of them whose reader was in no environment.", (), _daemon("faults_unassigned")),
    Definition(
        "weenv_data_plane_serving", "gauge",
        "1: the data plane gave its figures; 0: it did not in time, or is lost, and all metrics below are missing but the next two.", (),
        _one(lambda info: int(info.statistics["data_plane"]["serving"])),
    ),
    Definition(
        "weenv_data_plane_successors", "counter", "Processes of the data plane that took over, under this daemon.", (),
        _one(lambda info: info.statistics["data_plane"]["process"]["successors"]),
    ),
    Definition(
        "weenv_data_plane_longest_gap_seconds", "gauge", "The longest time without a serving process, under this daemon.", (),
        _one(lambda info: info.statistics["data_plane"]["process"]["longest_gap_s"]),
    ),
    Definition("weenv_data_plane_descriptors", "gauge", "Open descriptors.", (), _plane_one(lambda plane: plane["descriptors"])),
    Definition("weenv_data_plane_journal_bytes", "gauge", "Size of the journal.", (), _plane_one(lambda plane: plane["journal_bytes"])),
    Definition("weenv_plans", "gauge", "Plans served.", (), _plane_one(lambda plane: plane["plans"])),
    Definition("weenv_layers", "gauge", "Layers open.", (), _plane_one(lambda plane: len(plane["layers"]))),
    Definition("weenv_slots", "gauge", "Slots in use, of 262,142 of each kind (layer, plan).", ("kind",), _plane(_slots)),
    Definition("weenv_layers_stored_bytes", "gauge", "Compressed size of the open layers.", (), _layers("stored_bytes")),
    Definition("weenv_layers_present_bytes", "gauge", "How much of that is in the cache.", (), _layers("present_bytes")),
    Definition("weenv_cache_used_bytes", "gauge", "What the cache takes on its disk.", (), _cache("used_bytes")),
    Definition(
        "weenv_cache_idle_bytes", "gauge",
        "Of it, layers that no plan has, and metadata of all: the rest are chunks of the open layers.", (), _cache("idle_bytes"),
    ),
    Definition(
        "weenv_cache_capacity_bytes", "gauge", "What it may take: by cache_size, or by what its filesystem has room for.", (),
        _cache("capacity_bytes"),
    ),
    Definition(
        "weenv_cache_pinned_bytes", "gauge", "Of what it takes, pinned layers; looked at once a minute.", (), _cache("pinned_bytes"),
    ),
    Definition(
        "weenv_cache_damaged_chunks", "counter",
        "Chunks in the cache without their digest, found by `weenv cache verify` or after a crash of the machine, and dropped; since the "
        "data plane's process began.", (), _plane_one(lambda plane: plane["damaged_chunks"]),
    ),
    Definition(
        "weenv_fetch_cause_bytes", "counter",
        "Bytes of contents that arrived, by what for: a reader or a peer waits (miss), ahead of a sequential reader (read_ahead), a "
        "profile names them (profile), fill, `weenv cache prefetch` (prefetch); since the data plane's process began.",
        ("source", "cause"), _plane(_fetched_for),
    ),
    Definition("weenv_prefetch_active", "gauge", "Prefetches that run (`plan.prefetch`).", (), _prefetches("jobs")),
    Definition(
        "weenv_prefetch_wanted_bytes", "gauge", "What those that run want in the cache, uncompressed.", (), _prefetches("wanted_bytes"),
    ),
    Definition("weenv_prefetch_done_bytes", "gauge", "What of that is there.", (), _prefetches("done_bytes")),
    Definition(
        "weenv_fill_bytes", "counter", "Fetched by the fill, since the data plane's process began.", (),
        _plane_one(lambda plane: plane["fill"]["filled_bytes"]),
    ),
    Definition("weenv_fill_active", "gauge", "Requests of the fill now.", (), _plane_one(lambda plane: plane["fill"]["active"])),
    Definition(
        "weenv_fill_remaining_bytes", "gauge", "What is absent of the layers that plans have.", (),
        _plane_one(lambda plane: plane["fill"]["remaining_bytes"]),
    ),
    Definition(
        "weenv_profile_prefetched_bytes", "counter", "Fetched since a profile named it, since the data plane's process began.", (),
        _plane_one(lambda plane: plane["profiles"]["prefetched_bytes"]),
    ),
    Definition(
        "weenv_profile_used_bytes", "counter", "Those of them that were read later.", (),
        _plane_one(lambda plane: plane["profiles"]["used_bytes"]),
    ),
    Definition("weenv_fuse_requests", "counter", "Requests of the kernel.", ("operation",), _operations("requests")),
    Definition(
        "weenv_fuse_errors", "counter",
        "Answers with another errno than ENOENT, ENODATA, ENOSYS, ENXIO, ERANGE, EINTR, and EAGAIN to an interrupt.",
        ("operation",), _operations("errors"),
    ),
    Definition(
        "weenv_fuse_request_duration_seconds", "histogram",
        "From a request's arrival until it was dealt with; READs that had to wait are in weenv_read_wait_seconds instead.",
        ("operation",), _operations("answered"),
    ),
    Definition(
        "weenv_read_wait_seconds", "histogram", "READs that had to wait for a chunk, from their arrival to their answer, whichever it was.",
        (), _plane(lambda plane: [((), plane["reads_waited"])]),
    ),
    Definition("weenv_reads", "counter", "READs answered: from the cache at once, or after a fetch.", ("served",), _plane(_reads)),
    Definition("weenv_read_bytes", "counter", "Bytes sent in answers to them.", ("served",), _plane(_read_bytes)),
    Definition("weenv_reads_failed", "counter", "READs answered with EIO.", (), _fuse("reads_failed")),
    Definition("weenv_reads_interrupted", "counter", "READs whose reader was interrupted meanwhile.", (), _fuse("reads_interrupted")),
    Definition("weenv_reads_waiting", "gauge", "READs that wait now.", (), _fuse("pending")),
    Definition(
        "weenv_oldest_waiting_read_seconds", "gauge", "Age of the READ that waits longest; 0: none waits.", (),
        _plane_one(lambda plane: plane["oldest_waiting_s"]),
    ),
    Definition(
        "weenv_oldest_handled_request_seconds", "gauge", "How long a FUSE thread has been busy with one request; 0: none is busy.", (),
        _plane_one(lambda plane: plane["oldest_handled_s"]),
    ),
    Definition("weenv_chunks_in_flight", "gauge", "Chunks being fetched now.", (), _fuse("in_flight")),
    Definition(
        "weenv_chunks", "counter",
        "Chunks that arrived: published, put into the cache; unwritten, the cache could not take them; rejected, without their digest.",
        ("result",), _plane(_chunks),
    ),
    Definition("weenv_cache_evicted_bytes", "counter", "Chunks that were evicted to make room.", (), _fuse("evicted_bytes")),
    Definition(
        "weenv_fetch_chunks", "counter", "Chunks to be fetched: since a reader waits (miss), or ahead of it (ahead).", ("source", "reason"),
        _sources_by({"misses": "miss", "ahead": "ahead"}),
    ),
    Definition(
        "weenv_fetch_requests", "counter", "Requests to sources, for contents or metadata (TOCs).", ("source", "what"),
        _sources_by({"requests": "contents", "metadata_requests": "metadata"}),
    ),
    Definition(
        "weenv_fetch_bytes", "counter", "Bytes that arrived.", ("source", "what"),
        _sources_by({"bytes": "contents", "metadata_bytes": "metadata"}),
    ),
    Definition(
        "weenv_fetch_duration_seconds", "histogram", "Requests that brought something.", ("source",), _sources("fetches"),
    ),
    Definition("weenv_fetch_retries", "counter", "Requests made again.", ("source",), _sources("retries")),
    Definition("weenv_fetch_given_up_chunks", "counter", "Chunks given up: their readers get EIO.", ("source",), _sources("given_up")),
    Definition(
        "weenv_peers", "gauge", "Other members: up; down, not asked for now; left_out, since they sent wrong bytes.", ("state",),
        _plane(_peers),
    ),
    Definition("weenv_peer_served_bytes", "counter", "Sent to peers, by this process of the data plane.", (), _peer("served_bytes")),
    Definition(
        "weenv_peer_hedges", "counter", "Second requests, since a peer did not answer in time; by this process.", (), _peer("hedges"),
    ),
    Definition("weenv_peer_lies", "counter", "Answers of peers without their digest; to this process.", (), _peer("lies")),
)  # fmt: skip


def _family(definition: Definition, samples: Samples) -> Metric:
    if definition.kind == "counter":
        counter = CounterMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        for values, number in samples:
            counter.add_metric(values, number)
        return counter
    if definition.kind == "gauge":
        gauge = GaugeMetricFamily(definition.name, definition.meaning, labels=definition.labels)
        for values, number in samples:
            gauge.add_metric(values, number)
        return gauge
    histogram = HistogramMetricFamily(definition.name, definition.meaning, labels=definition.labels)
    bounds = [*(f"{bound_s:.10g}" for bound_s in BUCKET_BOUNDS_S), "+Inf"]
    for values, counted in samples:
        histogram.add_metric(values, list(zip(bounds, accumulate(counted["buckets"]), strict=True)), counted["sum_s"])
    return histogram


class _Collected(Collector):
    """The metrics of one answer of node.info."""

    def __init__(self, info: NodeInfo) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        for definition in METRICS:
            yield _family(definition, definition.samples(self._info))


def exposition(info: NodeInfo) -> bytes:
    """The text that Prometheus reads, of type CONTENT_TYPE."""
    registry = CollectorRegistry()
    registry.register(_Collected(info))
    return generate_latest(registry)
