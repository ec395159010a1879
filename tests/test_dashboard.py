"""What is shipped for monitoring: each query names metrics and labels that a node has, and uses them as what they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from node_process import Groups, create, run_node
from prometheus_client.parser import text_string_to_metric_families

from envlet.metrics import METRICS, Definition
from tools import dashboard

ROOT = Path(__file__).resolve().parent.parent
QUERIES = [
    *((panel.title, query) for panel in dashboard.PANELS for query, _ in panel.queries),
    *((alert.name, alert.expression) for alert in dashboard.ALERTS),
]
EVERY_SAMPLE_HAS = {"instance", "job"}
SELECTOR = re.compile(r"(weenv_\w+)(?:\{([^}]*)\})?(\[)?")


def definition_of(name: str) -> Definition:
    for one in METRICS:
        names = {one.shown_name} | ({f"{one.name}_{part}" for part in ("bucket", "sum", "count")} if one.kind == "histogram" else set())
        if name in names:
            return one
    raise AssertionError(f"there is no metric {name}")


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{i}-{title.replace(' ', '-')}" for i, (title, _) in enumerate(QUERIES)])
def test_a_query_fits_the_metrics(title: str, query: str) -> None:
    found = SELECTOR.findall(query)
    assert found
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    known = EVERY_SAMPLE_HAS | {label for name, _, _ in found for label in definition_of(name).labels}
    known |= {"le"} if "_bucket" in query else set()
    assert grouped <= known
    for name, matchers, window in found:
        definition = definition_of(name)
        counts_up = definition.kind in ("counter", "histogram")
        assert bool(window) == counts_up, "a rate is of what counts up, and only of that"
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in {*definition.labels, *EVERY_SAMPLE_HAS}


def test_legends_name_labels_that_their_query_keeps() -> None:
    for panel in dashboard.PANELS:
        for query, legend in panel.queries:
            kept = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept


def test_a_node_shows_every_metric_that_is_asked_for(groups: Groups, tmp_path: Path) -> None:
    with run_node(tmp_path / "n") as node:
        node("env", "exec", create(node, groups.base), "cat", "/etc/passwd")
        shown = {family.name: family for family in text_string_to_metric_families(node("node", "metrics") + "\n")}
    for title, query in QUERIES:
        for name, _, _ in SELECTOR.findall(query):
            family = shown[definition_of(name).name]
            assert family.samples, f"{title}: {name} has no sample"


def test_the_files_are_those_of_the_tables() -> None:
    assert json.loads((ROOT / "deploy/grafana/weenv-node.json").read_text()) == dashboard.grafana()
    assert (ROOT / "deploy/prometheus/weenv.rules.yml").read_text() == dashboard.rules()


def test_every_alert_says_what_to_do() -> None:
    assert len({alert.name for alert in dashboard.ALERTS}) == len(dashboard.ALERTS)
    for alert in dashboard.ALERTS:
        assert alert.severity in ("page", "warn")
        assert alert.action.endswith(".")
