"""The Grafana dashboard asks for metrics that servers have, by labels that they have; the page of metrics
names them all.
"""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from deltasync.serve.metrics import Metrics
from tests.docs.pages import ROOT, metrics

DASHBOARD = json.loads((ROOT / "deploy/grafana/replicas.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
FROM_THE_SCRAPE = {"job", "instance"}


def labels_of_samples() -> dict[str, set[str]]:
    """The label names of each sample that a server offers."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.failed(ValueError("one, so that its labels are told"))
    return {sample.name: set(sample.labels) for metric in registry.collect() for sample in metric.samples}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_are_there(expression: str) -> None:
    samples = labels_of_samples()
    names = set(re.findall(r"\bdeltasync_\w+", expression))
    assert names and names <= set(samples)
    grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
    assert grouped <= FROM_THE_SCRAPE.union(*(samples[name] for name in names))


def test_each_metric_of_a_server_is_shown() -> None:
    shown = " ".join(EXPRESSIONS)
    kinds = ("_total", "_bucket", "")
    described = {metric.name: metric for metric in _metrics()}
    assert [name for name in described if not any(f"{name}{kind}" in shown for kind in kinds)] == []


def test_the_page_names_each_metric_of_a_server() -> None:
    samples = {name.removesuffix("_bucket") for name in labels_of_samples()}
    exported = {name for name in samples if not name.endswith(("_created", "_sum", "_count"))}
    assert {name for name in metrics() if not name.startswith("delta_sync/")} == exported


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def _metrics() -> list[object]:
    registry = CollectorRegistry()
    Metrics(registry)
    return list(registry.collect())
