"""Writes what is shipped for monitoring: `python -m tools.dashboard grafana` prints deploy/grafana/weenv-node.json, and
`python -m tools.dashboard alerts` deploy/prometheus/weenv.rules.yml.

One table of panels and one of alerts. A test compares the files with it, and each query with the metrics that a node has.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs

NODES = 'instance=~"$instance"'
"""What a panel's query selects: the variable of the dashboard."""
WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's grid of 24 columns."""


@attrs.frozen
class Panel:
    """A graph: queries with their legends. `unit`: Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str


@attrs.frozen
class Alert:
    """`hold`: for how long the expression must be true. Severity `page` is for what harms a training run now."""

    name: str
    expression: str
    hold: str
    severity: str
    summary: str
    action: str


def _of_nodes(metric: str, match: str = "") -> str:
    """The metric of the chosen nodes, with a further matcher."""
    return f"{metric}{{{NODES}{',' + match if match else ''}}}"


def _sum(metric: str, by: str = "", match: str = "", *, inner: str = "{}") -> str:
    return f"sum{f' by ({by})' if by else ''} ({inner.format(_of_nodes(metric, match))})"


def _rate(metric: str, by: str = "", match: str = "") -> str:
    return _sum(metric, by, match, inner="rate({}[$__rate_interval])")


def _ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _quantile(share: float, metric: str, by: str = "") -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'le,{by}' if by else 'le')})"


PANELS: tuple[Panel, ...] = (
    Panel(
        "Environments", "short", ((_sum("weenv_environments", "state"), "{{state}}"),),
        "By state. Failures (faulted, oom, lost, killed, error) stay until they are deleted.",
    ),
    Panel(
        "Environments made and failed", "ops",
        ((_rate("weenv_environments_created_total"), "made"), (_rate("weenv_environment_failures_total"), "failed")),
        "Per second.",
    ),
    Panel(
        "Failed reads", "ops",
        ((_rate("weenv_faults_total"), "EIO"), (_rate("weenv_faults_unassigned_total"), "of no environment")),
        "Reads whose chunk could not be had. Their environments are faulted.",
    ),
    Panel(
        "Reads", "Bps", ((_rate("weenv_read_bytes_total", "served"), "{{served}}"),),
        "Bytes that weefs sent: from the cache, or after a fetch. What the kernel has cached is not here.",
    ),
    Panel(
        "Reads that waited", "s",
        (
            (_quantile(0.5, "weenv_read_wait_seconds"), "p50"),
            (_quantile(0.99, "weenv_read_wait_seconds"), "p99"),
            (f"max (weenv_oldest_waiting_read_seconds{{{NODES}}})", "oldest now"),
        ),
        "From a read's arrival to its answer, of those that had to fetch.",
    ),
    Panel(
        "Fetched", "Bps", ((_rate("weenv_fetch_bytes_total", "source"), "{{source}}"),),
        "By kind of source.",
    ),
    Panel(
        "Fetched, by cause", "Bps", ((_rate("weenv_fetch_cause_bytes_total", "cause"), "{{cause}}"),),
        "Contents: miss, somebody waits; read_ahead, of a sequential reader; profile, fill and prefetch, behind these.",
    ),
    Panel(
        "Time of a fetch", "s",
        (
            (_quantile(0.5, "weenv_fetch_duration_seconds", "source"), "p50 {{source}}"),
            (_quantile(0.99, "weenv_fetch_duration_seconds", "source"), "p99 {{source}}"),
        ),
        "Requests that brought something.",
    ),
    Panel(
        "Cache", "bytes",
        (
            (_sum("weenv_cache_used_bytes"), "used"),
            (_sum("weenv_cache_idle_bytes"), "of it unused layers and metadata"),
            (_sum("weenv_cache_pinned_bytes"), "of it pinned"),
            (_sum("weenv_cache_capacity_bytes"), "capacity"),
        ),
        "On its disk. Evicts above 98 % of its capacity.",
    ),
    Panel(
        "Evicted", "Bps", ((_rate("weenv_cache_evicted_bytes_total"), "evicted"),),
        "A steady stream of it, with as much fetched: the working set is larger than the cache.",
    ),
    Panel(
        "Chunks that were not kept", "ops", ((_rate("weenv_chunks_total", "result", 'result=~"unwritten|rejected"'), "{{result}}"),),
        "unwritten: no room. rejected: without their digest, so something on the way damages them.",
    ),
    Panel(
        "Damaged in the cache", "ops", ((_rate("weenv_cache_damaged_chunks_total"), "chunks"),),
        "Found by weenv cache verify, or after a crash of the machine; fetched again.",
    ),
    Panel(
        "Fill: what is left", "bytes", ((_sum("weenv_fill_remaining_bytes"), "absent"), (_sum("weenv_layers_stored_bytes"), "of")),
        "Of the layers that are open. With fill = off nobody brings it but readers.",
    ),
    Panel(
        "Fill: rate", "Bps", ((_rate("weenv_fill_bytes_total"), "filled"),),
        "Nothing while readers wait, or with the cache above 90 % of its capacity.",
    ),
    Panel(
        "Profiles: hit rate", "percentunit",
        ((_ratio(_rate("weenv_profile_used_bytes_total"), _rate("weenv_profile_prefetched_bytes_total")), "read of what was fetched"),),
        "Reads come after their prefetch, so look at hours.",
    ),
    Panel(
        "Prefetch", "bytes", ((_sum("weenv_prefetch_wanted_bytes"), "wanted"), (_sum("weenv_prefetch_done_bytes"), "there")),
        "Of the commands that run (weenv cache prefetch).",
    ),
    Panel(
        "Peers", "short", ((_sum("weenv_peers", "state"), "{{state}}"),),
        "As each node sees the others, added up. left_out: they sent wrong bytes.",
    ),
    Panel(
        "Peers: share that is up", "percentunit",
        ((_ratio(_sum("weenv_peers", "instance", 'state="up"'), _sum("weenv_peers", "instance")), "{{instance}}"),),
        "Of the others, as each node sees them.",
    ),
    Panel(
        "Peers: hedges and lies", "ops", ((_rate("weenv_peer_hedges_total"), "hedges"), (_rate("weenv_peer_lies_total"), "lies")),
        "Hedges: a second peer was asked since the first did not answer in time. Lies: bytes without their digest.",
    ),
    Panel(
        "Peers: sent", "Bps", ((_rate("weenv_peer_served_bytes_total", "instance"), "{{instance}}"),),
        "One node far above the others: the members do not know the same members.",
    ),
    Panel(
        "Retries", "ops",
        (
            (_rate("weenv_fetch_retries_total", "source"), "{{source}}"),
            (_rate("weenv_fetch_given_up_chunks_total", "source"), "given up, {{source}}"),
        ),
        "Of requests to sources.",
    ),
    Panel(
        "FUSE requests", "ops", ((_rate("weenv_fuse_requests_total", "operation"), "{{operation}}"),),
        "Of the kernel. In the kernel view, only reads and first lookups of contents.",
    ),
)  # fmt: skip

ALERTS: tuple[Alert, ...] = (
    Alert(
        "WeenvDataPlaneDown", "weenv_data_plane_serving == 0", "1m", "page",
        "the data plane of {{ $labels.instance }} does not answer",
        "Reads hang meanwhile. The daemon starts a successor by itself; if it does not, its log says why. `weenv node doctor`.",
    ),
    Alert(
        "WeenvFaults", "increase(weenv_faults_total[10m]) > 0", "0m", "page",
        "reads on {{ $labels.instance }} ended with EIO",
        "Environments are faulted: their episodes must not be used. `weenv env ls` has the causes, `weenv node doctor` tries the sources.",
    ),
    Alert(
        "WeenvReadsWait", "weenv_oldest_waiting_read_seconds > 10", "1m", "page",
        "a read on {{ $labels.instance }} waits for {{ $value | humanizeDuration }}",
        "The registry or the network is slow. After chunk_deadline_s it becomes a fault.",
    ),
    Alert(
        "WeenvChunksRejected", 'increase(weenv_chunks_total{result="rejected"}[10m]) > 0', "0m", "warn",
        "{{ $labels.instance }} received chunks without their digest",
        "Something between the packager and the node damages bytes: a registry's disk, a proxy, a peer.",
    ),
    Alert(
        "WeenvCacheFull", 'increase(weenv_chunks_total{result="unwritten"}[10m]) > 0', "10m", "warn",
        "{{ $labels.instance }} has no room for what it fetches",
        "It is fetched again each time. `weenv cache df`; a larger cache_size, fewer pins, or room on the disk.",
    ),
    Alert(
        "WeenvCacheThrashes",
        "rate(weenv_cache_evicted_bytes_total[30m]) * 3600 > weenv_cache_capacity_bytes", "30m", "warn",
        "{{ $labels.instance }} evicts more than its whole cache in an hour",
        "The working set does not fit. A larger cache_size, or fewer different tasks on a node.",
    ),
    Alert(
        "WeenvCacheDamaged", "increase(weenv_cache_damaged_chunks_total[1h]) > 0", "0m", "warn",
        "chunks in the cache of {{ $labels.instance }} were damaged",
        "They are fetched again. After a crash of the machine that is to be expected; else look at its disk and memory.",
    ),
    Alert(
        "WeenvPeersDown",
        'sum by (instance) (weenv_peers{state="up"}) < 0.5 * sum by (instance) (weenv_peers)', "10m", "warn",
        "for {{ $labels.instance }}, less than half of its peers are up",
        "It fetches from the registry instead. `weenv node doctor` on it says what is wrong with each.",
    ),
    Alert(
        "WeenvPeerLies", "increase(weenv_peer_lies_total[10m]) > 0", "0m", "warn",
        "a peer sent {{ $labels.instance }} bytes without their digest",
        "Nobody read them, and that peer is left out for an hour. The log of the node names it: look at its disk and memory.",
    ),
    Alert(
        "WeenvPeersSlow",
        "sum by (instance) (rate(weenv_peer_hedges_total[10m])) > "
        '0.2 * sum by (instance) (rate(weenv_fetch_requests_total{source="peer",what="contents"}[10m]))', "10m", "warn",
        "one in five requests of {{ $labels.instance }} to peers is not answered in time",
        "Peers are overloaded, or the network between them is. `weenv node info --format json` has their times.",
    ),
    Alert(
        "WeenvProfilesMiss",
        "rate(weenv_profile_used_bytes_total[6h]) < 0.25 * rate(weenv_profile_prefetched_bytes_total[6h])", "1h", "warn",
        "less than a quarter of what {{ $labels.instance }} fetches for profiles is read",
        "Runs differ from those that were recorded, or a published profile is of something else. `weenv profile show` has the hit rates.",
    ),
    Alert(
        "WeenvDataPlaneDies", "increase(weenv_data_plane_successors_total[1h]) > 3", "0m", "warn",
        "the data plane of {{ $labels.instance }} died more than three times in an hour",
        "Nothing is lost by it, but reads pause. The log has why.",
    ),
)  # fmt: skip


def grafana() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.description,
            "datasource": source,
            "gridPos": {"x": number % 3 * WIDTH, "y": number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend, "datasource": source}
                for i, (expression, legend) in enumerate(panel.queries)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    instances = {"name": "instance", "type": "query", "datasource": source, "query": "label_values(weenv_node, instance)"}
    return {
        "uid": "weenv-node",
        "title": "WeEnv nodes",
        "tags": ["weenv"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                instances | {"multi": True, "includeAll": True, "allValue": ".*", "refresh": 2},
            ]
        },
        "panels": panels,
    }


def rules() -> str:
    """The alerts, as Prometheus loads them: YAML whose strings are JSON's."""
    lines = ["# Generated by `python -m tools.dashboard alerts` from tools/dashboard.py; change it there."]
    lines += ["groups:", "  - name: weenv", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.hold}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    match sys.argv[1:]:
        case ["grafana"]:
            print(json.dumps(grafana(), indent=2, ensure_ascii=False))
        case ["alerts"]:
            print(rules(), end="")
        case _:
            sys.exit("expected 'grafana' or 'alerts'")


if __name__ == "__main__":
    main()
