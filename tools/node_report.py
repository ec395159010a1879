"""`weenv node info` for people: the figures of node.info as lines and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tools import output
from weefs.traffic import quantile_s

HEADERS = ("OPERATION", "COUNT", "ERRORS", "P50", "P99")
"""Of the table. The times are upper bounds, powers of two."""
BUSY_S = 1.0
"""A thread that works on one request for longer is worth a word."""


def lines(info: dict[str, Any]) -> list[str]:
    """`info`: the answer of node.info."""
    states = ", ".join(f"{number} {state}" for state, number in info["environments"].items()) or "none"
    plane = info["statistics"]["data_plane"]
    return [
        f"version       {info['version']}",
        f"runtime       {info['runtime']}, cgroups {info['cgroups']}",
        f"view          {info['view']} ({info['view_reason']})",
        f"environments  {states} (at most {info['environments_max']})",
        *(_plane_lines(plane) if plane["serving"] else ["data plane    does not answer; the log of the daemon may say why"]),
    ]


def _plane_lines(plane: dict[str, Any]) -> list[str]:
    layers, fuse, process = plane["layers"].values(), plane["fuse"], plane["process"]
    fetched, stored = sum(layer["bytes"] for layer in layers), sum(layer["stored_bytes"] for layer in layers)
    from_cache = sum(plane["operations"].get("read", {"answered": {"buckets": []}})["answered"]["buckets"])
    misses = ", ".join(f"{traffic['misses']} from {kind}" for kind, traffic in plane["sources"].items() if traffic["misses"]) or "0"
    ahead = sum(traffic["ahead"] for traffic in plane["sources"].values())
    oldest = f", the oldest since {output.duration(plane['oldest_waiting_s'])}" if plane["oldest_waiting_s"] else ""
    busy = f", a thread is busy with one since {output.duration(plane['oldest_handled_s'])}" if plane["oldest_handled_s"] > BUSY_S else ""
    return [
        f"plans         {plane['plans']}, layers {len(layers)}",
        _cache_line(plane["cache"], fuse["evicted_bytes"]),
        f"fetched       {output.size(fetched)} of {output.size(stored)} ({output.share(fetched, stored)})",
        _fill_line(plane["fill"], plane["profiles"]),
        f"reads         {from_cache} from the cache, {fuse['reads_waited']} waited, {fuse['reads_failed']} failed",
        f"misses        {misses} (chunks); {ahead} more ahead of their readers",
        *_peers_line(plane["peers"]),
        f"requests      {fuse['pending']} waiting{oldest}{busy}",
        f"data plane    {process['successors']} successors, {plane['descriptors']} descriptors, slots {fuse['layer_slots']} of layers "
        f"and {fuse['plan_slots']} of plans, journal {output.size(plane['journal_bytes'])}",
    ]


def _peers_line(peers: dict[str, Any]) -> list[str]:
    """None where there are none."""
    if "name" not in peers:
        return []
    states = [member["state"] for member in peers["members"]]
    others = ", ".join(f"{states.count(state)} {state.replace('_', ' ')}" for state in ("down", "left_out"))
    counted = f"{states.count('up')} of {len(states)} up ({others})"
    moved = f"{output.size(peers['received_bytes'])} received, {output.size(peers['served_bytes'])} sent"
    return [f"peers         {counted}; {moved}, {peers['hedges']} asked for a second time, {peers['lies']} lies"]


def _cache_line(cache: dict[str, Any], evicted: int) -> str:
    used, capacity = cache["used_bytes"], cache["capacity_bytes"]
    gone = f"; {output.size(evicted)} evicted" if evicted else ""
    return f"cache         {output.size(used)} of {output.size(capacity)}{gone}"


def _fill_line(fill: dict[str, Any], profiles: dict[str, Any]) -> str:
    now = f"{fill['active']} requests now, {output.size(fill['remaining_bytes'])} left"
    ahead = f"{output.size(profiles['used_bytes'])} read of {output.size(profiles['prefetched_bytes'])} by profiles"
    return f"ahead         {output.size(fill['filled_bytes'])} by fill ({fill['mode']}; {now}); {ahead}"


def operations(info: dict[str, Any]) -> list[Sequence[object]]:
    """The rows of the table: FUSE operations, READs that waited, fetches. Empty: the data plane does not answer."""
    plane = info["statistics"]["data_plane"]
    if not plane["serving"]:
        return []
    rows = [_row(name, one["requests"], one["errors"], one["answered"]) for name, one in sorted(plane["operations"].items())]
    rows.append(_row("read, waited", plane["fuse"]["reads_waited"], plane["fuse"]["reads_failed"], plane["reads_waited"]))
    for kind, traffic in plane["sources"].items():
        rows.append(_row(f"fetch, {kind}", sum(traffic["fetches"]["buckets"]), traffic["retries"], traffic["fetches"]))
    return rows


def _row(name: str, count: int, failures: int, histogram: dict[str, Any]) -> Sequence[object]:
    return (name, count, failures, _at_most(quantile_s(histogram["buckets"], 0.5)), _at_most(quantile_s(histogram["buckets"], 0.99)))


def _at_most(bound_s: float | None) -> str:
    if bound_s is None:
        return ""
    if bound_s == math.inf:
        return "> 18 min"
    return f"{bound_s * 1e6:.0f} µs" if bound_s < 0.001 else output.duration(bound_s)
