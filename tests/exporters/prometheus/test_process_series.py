"""What a process tells of itself is what prometheus_client tells of it."""

import platform
import re

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import trainermon
from trainermon.exporters.prometheus.openmetrics import render_families
from trainermon.exporters.prometheus.process_series import process_families


def test_the_values_are_those_of_prometheus_client():
    text = render_families(process_families(), openmetrics=True).decode()
    found = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    theirs = [s for family in ProcessCollector(registry=CollectorRegistry()).collect() for s in family.samples]

    build = found.pop("trainermon_build_info")
    assert build.labels == {"version": trainermon.__version__, "python_version": platform.python_version()}
    assert found.keys() == {sample.name for sample in theirs}
    for sample in theirs:
        # Read at two moments; theirs has the time of boot in whole seconds, and CPU time in ticks.
        margin = 1.1 if re.search("seconds", sample.name) else sample.value * 0.02 + 1
        assert found[sample.name].value == pytest.approx(sample.value, abs=margin), sample.name
