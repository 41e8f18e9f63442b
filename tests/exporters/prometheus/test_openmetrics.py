import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from trainermon.core.metric import Metric, MetricType
from trainermon.core.metrics import METRICS
from trainermon.exporters.prometheus.openmetrics import (
    BucketCounts,
    BucketExemplar,
    MetricSamples,
    label_text,
    prefers_openmetrics,
    render_families,
    sample_prefix,
)

GAUGE = METRICS["trainermon_gradient_rms"]
COUNTER = METRICS["trainermon_nonfinite_elements_total"]
INFO = METRICS["trainermon_rank_info"]
HISTOGRAM = METRICS["trainermon_step_duration_seconds"]
PARSERS = {False: parse_text, True: parse_openmetrics}

both_formats = pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])


def parsed(families, *, openmetrics: bool):
    text = render_families(families, openmetrics=openmetrics).decode()
    return list(PARSERS[openmetrics](text))


def bits(value: float) -> bytes:
    return struct.pack("<d", math.nan if math.isnan(value) else value)


@both_formats
@given(rows=st.dictionaries(st.text(min_size=1, max_size=20), st.floats(), min_size=1, max_size=5))
@example(rows={'a"b\\c\nd': math.inf, "\\n": -math.inf, "\\": math.nan, "}": -0.0, ",": 1e-300, '="': 5e-324, " ": 0.1})
def test_parsers_read_back_every_label_and_every_bit_of_the_value(openmetrics: bool, rows: dict[str, float]):
    prefixes = [sample_prefix(GAUGE, {"run": "r", "rank": "0", "module": module}) for module in rows]

    (family,) = parsed([(GAUGE, [MetricSamples(prefixes, list(rows.values()))])], openmetrics=openmetrics)

    assert {s.labels["module"]: bits(s.value) for s in family.samples} == {m: bits(v) for m, v in rows.items()}
    assert {(s.name, s.labels["run"], s.labels["rank"], s.timestamp) for s in family.samples} == {
        (GAUGE.name, "r", "0", None)
    }


@both_formats
def test_types_units_and_help_come_from_the_catalogue(openmetrics: bool):
    labels = {"run": "r", "rank": "0"}
    families: list[Any] = [(m, [MetricSamples([sample_prefix(m, labels)], [1.0])]) for m in (GAUGE, COUNTER, INFO)]
    families.append((HISTOGRAM, [BucketCounts(HISTOGRAM, labels)]))

    found = {family.name: family for family in parsed(families, openmetrics=openmetrics)}

    types = {"trainermon_gradient_rms": "gauge", "trainermon_nonfinite_elements": "counter"}
    types |= {"trainermon_rank": "info"} if openmetrics else {"trainermon_rank_info": "gauge"}
    types |= {"trainermon_step_duration_seconds": "histogram"}
    assert {name: family.type for name, family in found.items()} == types
    assert found["trainermon_nonfinite_elements"].documentation == COUNTER.help
    assert found["trainermon_nonfinite_elements"].samples[0].name == COUNTER.name
    assert found["trainermon_step_duration_seconds"].unit == ("seconds" if openmetrics else "")


@both_formats
@given(values=st.lists(st.floats(0, 1e6), max_size=30))
def test_a_histogram_counts_as_numpy_does(openmetrics: bool, values: list[float]):
    histogram = BucketCounts(HISTOGRAM, {"run": "r"})
    for step, value in enumerate(values):
        histogram.observe(BucketExemplar(label_text({"step": str(step)}), value, 1.7e9 + step))

    (family,) = parsed([(HISTOGRAM, [histogram])], openmetrics=openmetrics)

    counts = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
    assert counts == {bound: np.sum(np.array(values) <= bound) for bound in (*HISTOGRAM.buckets, math.inf)}
    rest = {s.name.rpartition("_")[2]: s.value for s in family.samples if "le" not in s.labels}
    assert rest == {"count": len(values), "sum": pytest.approx(math.fsum(values))}
    assert len(histogram) == len(family.samples) == 14


def test_exemplars_are_the_newest_of_their_bucket_and_only_in_openmetrics():
    histogram = BucketCounts(HISTOGRAM, {"run": "r"})
    for step, value in ((1, 0.2), (2, 0.15), (3, 40.0)):
        histogram.observe(BucketExemplar(label_text({"step": str(step)}), value, 1.7e9 + step))

    (family,) = parsed([(HISTOGRAM, [histogram])], openmetrics=True)

    exemplars = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar}
    assert {le: (e.labels, e.value, float(e.timestamp)) for le, e in exemplars.items()} == {
        "0.25": ({"step": "2"}, 0.15, 1.7e9 + 2),
        "60.0": ({"step": "3"}, 40.0, 1.7e9 + 3),
    }
    assert b"step=" not in render_families([(HISTOGRAM, [histogram])], openmetrics=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.001])
def test_a_histogram_ignores_what_would_spoil_its_sum(value: float):
    histogram = BucketCounts(HISTOGRAM, {"run": "r"})
    before = list(histogram.lines(openmetrics=True))

    histogram.observe(BucketExemplar("", value, 0.0))

    assert list(histogram.lines(openmetrics=True)) == before


@both_formats
def test_help_is_escaped(openmetrics: bool):
    metric = Metric(name="trainermon_x", type=MetricType.GAUGE, help='a "b" \\ c\nd\\n.')

    (family,) = parsed([(metric, [MetricSamples(["trainermon_x "], [1.0])])], openmetrics=openmetrics)

    assert family.documentation == metric.help


@both_formats
def test_metrics_without_samples_are_left_out_and_an_empty_exposition_is_valid(openmetrics: bool):
    body = render_families([(GAUGE, []), (COUNTER, [MetricSamples([], [])])], openmetrics=openmetrics)

    assert body == (b"# EOF\n" if openmetrics else b"")


@pytest.mark.parametrize("values", [[0.5, 3], [0.5, np.nan]])
def test_numpy_values_are_written_as_plain_numbers(values: list[float]):
    array: Any = np.array(values)
    body = render_families([(GAUGE, [MetricSamples(["x "] * 2, array)])], openmetrics=False)

    assert body.decode().splitlines()[2:] == ["x 0.5", "x NaN" if np.isnan(values[1]) else "x 3.0"]


def test_a_name_that_is_no_unicode_costs_a_question_mark_and_not_the_scrape():
    body = render_families(
        [(GAUGE, [MetricSamples([sample_prefix(GAUGE, {"module": "a\udc80"})], [1.0])])], openmetrics=True
    )

    assert b'module="a?"' in body


def test_a_metric_that_is_not_in_the_catalogue_is_refused():
    stranger = Metric(name="trainermon_stranger", type=MetricType.GAUGE, help="Not catalogued.")

    with pytest.raises(
        ValueError, match=r"metric 'trainermon_stranger' is not in trainermon/core/metrics.py; add it there"
    ):
        sample_prefix(stranger, {})


def test_a_label_that_is_not_in_the_catalogue_is_refused():
    with pytest.raises(ValueError, match=r"trainermon_gradient_rms has labels .* found \['step'\]"):
        sample_prefix(GAUGE, {"run": "r", "step": "812"})


PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," + PROMETHEUS_3
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        (BROWSER, False),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", False),
        (PROMETHEUS_2_42, True),
        (PROMETHEUS_3, True),
        (PROMETHEUS_3_PROTOBUF_FIRST, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; Version="1.0.0"; charset=utf-8', True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.6", False),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.1", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nonsense,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=nan", False),
        ("image/png", False),
        (";;,=,;q", False),
    ],
)
def test_the_format_is_what_the_client_asks_for(accept: str | None, openmetrics: bool):
    assert prefers_openmetrics(accept) == openmetrics


@given(st.text())
def test_no_accept_header_is_an_error(accept: str):
    assert prefers_openmetrics(accept) in {True, False}
