"""Every query of every dashboard is asked of the real server that it is for, on a recorded run, and answers."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards.grafana.recorded_run import RUN_ID, GrafanaRun
from tests.dashboards.grafana.servers import History, Points, influxdb_with, interpolate, prometheus_with
from trainermon.dashboards.grafana.files import dashboards

pytestmark = pytest.mark.server

NUM_STEPS = 96
# What the recorded run has nothing of, because nothing of it went wrong.
QUIET = {
    "trainermon_dump_failures_total",
    'trainermon_alerts_total{run="$run",severity="critical"}',
    'trainermon_alerts_total{run="$run",severity="info"}',
}


def panels(source: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{file.name}: {panel['title']}", panel)
        for file in dashboards(source)
        for panel in file.body["panels"]
        if panel["type"] != "row"
    ]


@pytest.fixture(scope="module")
def run() -> GrafanaRun:
    return GrafanaRun(NUM_STEPS, float(int(time.time())))


@pytest.fixture(scope="module")
def history(run: GrafanaRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    with prometheus_with(run, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture(scope="module")
def points(run: GrafanaRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Points]:
    with influxdb_with(run, tmp_path_factory.mktemp("influxdb")) as server:
        yield server


def has_number(series: dict[str, Any]) -> bool:
    samples = series.get("values") or [series["value"]]
    return any(value not in ("NaN", "+Inf", "-Inf") for _, value in samples)


def test_every_query_of_prometheus_answers(history: History):
    silent = [
        f"{title}: {target['expr']}"
        for title, panel in panels("prometheus")
        for target in panel["targets"]
        if not any(name in target["expr"] for name in QUIET) and not any(map(has_number, history.query(target)))
    ]

    assert silent == []


def test_quiet_queries_are_understood_too(history: History):
    quiet = [
        target
        for _, panel in panels("prometheus")
        for target in panel["targets"]
        if any(name in target["expr"] for name in QUIET)
    ]

    assert quiet
    for target in quiet:
        history.query(target)


def test_every_query_of_influxdb_answers(points: Points):
    silent = [
        f"{title}: {target['query']}"
        for title, panel in panels("influxdb")
        for target in panel["targets"]
        if not any(
            isinstance(value, int | float)
            for row in points.query(target["query"])
            for key, value in row.items()
            if key != "time"
        )
    ]

    assert silent == []


def test_variables_of_prometheus_offer_what_the_run_has(history: History):
    expected = {
        "run": {RUN_ID},
        "stage": {"0", "1"},
        "rank": {str(rank) for rank in range(8)},
    }
    for file in dashboards("prometheus"):
        for variable in file.body["templating"]["list"][1:]:
            selector, _, label = variable["query"]["query"].removeprefix("label_values(").rpartition(", ")
            match = interpolate(selector, history.variables())
            found = set(history.ask("series", {"match[]": match}) and values_of(history, match, label.rstrip(")")))
            if variable["name"] == "module":
                assert {"h.11.mlp", "wte", "head"} <= shortened(found, variable["regex"])
            else:
                assert found == expected[variable["name"]], file.name


def shortened(values: set[str], expression: str) -> set[str]:
    """Return what Grafana offers of the values: the first group of the variable's regular expression."""
    return {re.match(expression.strip("/"), value)[1] for value in values}


def values_of(history: History, match: str, label: str) -> list[str]:
    return [series[label] for series in history.ask("series", {"match[]": match}) if label in series]


def test_variables_of_influxdb_offer_what_the_run_has(points: Points):
    for file in dashboards("influxdb"):
        for variable in file.body["templating"]["list"][1:]:
            found = {row["value"] for row in points.query(variable["query"])}
            if variable["name"] == "module":
                assert {"h.11.mlp", "wte", "head"} <= shortened(found, variable["regex"])
            else:
                assert found == {"run": {RUN_ID}, "rank": {str(rank) for rank in range(8)}}[variable["name"]]


def test_annotations_mark_the_time_of_the_alerts(history: History):
    for file in dashboards("prometheus"):
        marks = {mark["name"]: mark for mark in file.body["annotations"]["list"]}
        fired = history.query({"expr": marks["Alerts"]["expr"], "instant": False})
        ordered = history.query({"expr": marks["Escalations"]["expr"], "instant": False})

        first = {series["metric"]["rule"]: float(series["values"][0][0]) for series in fired}
        fault = history.run.start_s + 0.75 * (history.run.end_s - history.run.start_s)
        assert set(first) == {"straggler", "gradient-nonfinite", "loss-spike"}
        assert abs(first["loss-spike"] - fault) <= 15
        assert abs(float(ordered[0]["values"][0][0]) - fault) <= 30


def test_layers_stand_in_the_order_of_the_model(history: History):
    layers = next(file for file in dashboards("prometheus") if file.name == "layers.json")
    heat = next(
        panel for panel in layers.body["panels"] if panel["title"] == "Gradients" and panel["type"] == "heatmap"
    )

    modules = [series["metric"]["module"] for series in history.query(heat["targets"][0])]

    blocks = [f"h.{layer}.{part}.weight" for layer in range(16) for part in ("attn", "mlp")]
    assert [module for module in modules if module.startswith("h.")] == blocks
