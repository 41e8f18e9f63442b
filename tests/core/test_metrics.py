import re

import pytest

from trainermon.core.metric import Metric, MetricType
from trainermon.core.metrics import METRICS, MODULE_METRICS
from trainermon.core.values import Kind

BASE_UNITS = {"seconds", "bytes", "ratio", "elements", "series", "records", "files", "watts", "celsius", "hertz"}
# Names that scrape configurations attach to targets, and words that belong into another place.
FORBIDDEN_LABELS = {"type", "service", "env", "stage", "cluster", "region", "node", "step", "le", "job", "instance"}

every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


@every_metric
def test_name_is_plain_snake_case_with_the_prefix(metric: Metric):
    assert re.fullmatch(r"trainermon(_[a-z0-9]+)+", metric.name)


@every_metric
def test_suffix_follows_the_type(metric: Metric):
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert metric.name.endswith("_info") == (metric.type is MetricType.INFO)
    assert not metric.name.endswith(("_sum", "_count", "_bucket", "_created"))


@every_metric
def test_unit_is_a_base_unit_and_the_last_word_of_the_family(metric: Metric):
    last = metric.family.rpartition("_")[2]

    assert metric.unit in {"", last}
    assert (last in BASE_UNITS) == bool(metric.unit)


@every_metric
def test_labels_are_few_known_and_not_those_of_targets(metric: Metric):
    assert metric.labels[0] == "run"
    assert len(set(metric.labels)) == len(metric.labels)
    assert not FORBIDDEN_LABELS.intersection(metric.labels)
    names_a_tensor = metric.name == "trainermon_alert_first_step"  # of an alert, of which there are few
    assert len(metric.labels) <= 4 + names_a_tensor or metric.type is MetricType.INFO


@every_metric
def test_help_and_cost_are_written_for_people(metric: Metric):
    assert metric.help[0].isupper()
    assert metric.help.endswith(".")
    assert len(metric.help.split()) >= 3
    assert metric.cost


@every_metric
def test_buckets_belong_to_histograms_and_are_few_and_ascending(metric: Metric):
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert len(metric.buckets) + 1 <= 12, "with +Inf"


def test_no_two_metrics_share_a_family():
    families = [metric.family for metric in METRICS.values()]

    assert len(set(families)) == len(families)


def test_every_kind_of_a_tensors_elements_is_shown_per_module():
    assert set(MODULE_METRICS) == set(Kind) - {Kind.LOSS, Kind.STEP, Kind.CHECKSUM}
    assert all(metric.labels[:3] == ("run", "rank", "module") for metric in MODULE_METRICS.values())
