"""The generated dashboards: up to date, valid by Grafana's own types, complete, consistent, and linked."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainermon.core.metric import MetricType
from trainermon.core.metrics import METRICS
from trainermon.dashboards.grafana.files import FOLDER, DashboardFile, dashboards

FILES = [*dashboards("prometheus"), *dashboards("influxdb")]
SCHEMA = json.loads((Path(__file__).parent / "schema.json").read_text())
# The type of the data source's own part of an annotation is in no package; see PromAnnotation in Grafana's source.
OF_PROMETHEUS = {"expr", "step", "tagKeys", "textFormat", "titleFormat", "useValueForTime"}
FIELD_TYPES = {"timeseries": "timeseriesField", "table": "tableField", "heatmap": "heatmapField"}
OF_NOW = ("table", "bargauge")


def named(file: DashboardFile) -> str:
    return f"{file.source}/{file.name}"


def panels(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in body["panels"] if panel["type"] != "row"]


def violations(name: str, value: Any) -> list[str]:
    schema = {**SCHEMA["properties"][name], "definitions": SCHEMA["definitions"]}
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(value)]


def dashboard_violations(body: dict[str, Any]) -> list[str]:
    for mark in body["annotations"]["list"]:
        for name in OF_PROMETHEUS:
            mark.pop(name, None)
    found = violations("dashboard", body)
    for panel in panels(body):
        found += [f"{panel['title']}: {text}" for text in violations(panel["type"], panel["options"])]
        if panel["type"] in FIELD_TYPES:
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            found += [f"{panel['title']}: {text}" for text in violations(FIELD_TYPES[panel["type"]], custom)]
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_making_them_again_changes_nothing():
    from trainermon.dashboards.grafana.generate import render_all

    made = {str(path): text for path, text in render_all().items()}

    assert made == {named(file): file.text for file in FILES}
    assert len(made) == len(list(FOLDER.rglob("*.*")))


@pytest.mark.parametrize("file", FILES, ids=named)
def test_grafanas_own_types_accept_it(file: DashboardFile):
    assert dashboard_violations(file.body) == []


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda body: body["time"].update(frm="now-1h"), "frm"),
        (lambda body: body["panels"][1].update(gridpos={}), "gridpos"),
        (lambda body: body["panels"][1]["options"].update(colourMode="value"), "colourMode"),
        (lambda body: body["panels"][10]["fieldConfig"]["defaults"]["custom"].update(drawStyle="lines"), "lines"),
    ],
)
def test_a_misspelt_option_is_seen(broken: Any, expected: str):
    body = next(file.body for file in FILES if named(file) == "prometheus/overview.json")
    broken(body)

    assert any(expected in text for text in dashboard_violations(body))


@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_panel_is_complete(file: DashboardFile):
    places: set[tuple[int, int]] = set()
    for panel in panels(file.body):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert defaults["unit"], panel["title"]
        assert defaults["noValue"], panel["title"]
        assert panel["targets"], panel["title"]
        for asking in (panel, *panel["targets"]):
            assert asking["datasource"] == {"type": file.source, "uid": "${datasource}"}, panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & places, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        places |= cells
    ids = [panel["id"] for panel in file.body["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("file", FILES, ids=named)
def test_it_can_be_provisioned(file: DashboardFile):
    body = file.body

    assert len(file.text.encode()) < 1 << 20, "a ConfigMap holds 1 MiB"
    assert "id" not in body
    assert "__inputs" not in body
    assert body["editable"] is False
    assert len(body["uid"]) <= 40
    assert {"trainermon", file.source} <= set(body["tags"])
    names = [variable["name"] for variable in body["templating"]["list"]]
    assert names[:2] == ["datasource", "run"]
    assert {variable["refresh"] for variable in body["templating"]["list"][1:]} == {2}, "with the time range"


def test_uids_differ():
    uids = [file.body["uid"] for file in FILES]

    assert len(uids) == len(set(uids)) == len(FILES) > 10


@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_link_leads_to_a_dashboard_of_the_same_data_source(file: DashboardFile):
    known = {other.body["uid"]: other.body for other in FILES if other.source == file.source}
    found = re.findall(r'"url": "/d/([\w-]+)\?([^"]*)"', file.text)

    assert set(re.findall(r'"url": "([^"]{3})', file.text)) <= {"/d/"}
    for uid, query in found:
        variables = {variable["name"] for variable in known[uid]["templating"]["list"]}
        passed = {a or b for a, b in re.findall(r"\$\{(\w+):queryparam\}|var-(\w+)=", query)}
        assert {"datasource", "run"} <= passed <= variables, (uid, query)
        assert "${__url_time_range}" in query


@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_variable_in_a_query_is_one_of_the_dashboard(file: DashboardFile):
    known = {variable["name"] for variable in file.body["templating"]["list"]}
    built_in = {"__rate_interval", "__range", "__interval", "timeFilter"}
    for panel in panels(file.body):
        for target in panel["targets"]:
            text = target.get("expr") or re.sub(r"\$tag_\w+", "", target["query"])
            assert set(re.findall(r"\$([a-z_]\w*)", text)) <= known | built_in, panel["title"]


@pytest.mark.parametrize("file", dashboards("prometheus"), ids=named)
def test_metrics_are_those_of_the_catalogue_and_counters_are_rates(file: DashboardFile):
    ends = ("_bucket", "_sum", "_count")
    for panel in panels(file.body):
        for target in panel["targets"]:
            expression = target["expr"]
            for name in re.findall(r"\btrainermon_\w+(?=[{\s\[)])", expression):
                metric = METRICS.get(name) or METRICS[re.sub(f"({'|'.join(ends)})$", "", name)]
                if metric.type is MetricType.HISTOGRAM:
                    assert re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression), name
                elif metric.type is MetricType.COUNTER and target["range"] and panel["type"] != "stat":
                    is_rate = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression)
                    assert is_rate or name in MUST_STAY_ZERO, f"{panel['title']}: {name} is a counter"


# Totals that are 0 in a healthy run: shown as they are, so that one event does not pass between two looks.
MUST_STAY_ZERO = {
    "trainermon_lost_ranks_total",
    "trainermon_detached_ranks_total",
    "trainermon_skipped_records_total",
    "trainermon_lost_files_total",
    "trainermon_refused_rows_total",
    "trainermon_errors_total",
    "trainermon_refused_configurations_total",
    "trainermon_integrity_mismatches_total",
    "trainermon_collectives_total",  # compared between ranks
}


def test_every_metric_of_the_catalogue_is_on_a_dashboard():
    text = "".join(file.text for file in dashboards("prometheus"))

    assert {name for name in METRICS if name not in text} == {
        "trainermon_accelerator_info",
        "trainermon_accelerator_memory_size_bytes",
        "trainermon_buffer_rms",
        "trainermon_commits_total",
        "trainermon_optimizer_state_rms",
        "trainermon_recomputed_activation_rms",
        "trainermon_updated_parameter_rms",
        "trainermon_used_parameter_rms",
    }


def test_colours_of_severities_are_the_same_everywhere():
    colours: dict[str, set[str]] = {}
    for file in dashboards("prometheus"):
        for panel in panels(file.body):
            for name in ("Fatal", "Critical", "Warning", "Info"):
                if panel["title"] == name:
                    step = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]
                    colours.setdefault(name.lower(), set()).add(step["color"])
            for override in panel["fieldConfig"]["overrides"]:
                for item in override["properties"]:
                    if item["id"] == "mappings" and "fatal" in item["value"][0]["options"]:
                        for name, shown in item["value"][0]["options"].items():
                            colours.setdefault(name, set()).add(shown["color"])

    assert colours == {"fatal": {"purple"}, "critical": {"red"}, "warning": {"orange"}, "info": {"blue"}}
