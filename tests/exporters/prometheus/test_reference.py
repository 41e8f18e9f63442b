from trainermon.core.metrics import METRICS
from trainermon.exporters.prometheus.reference import render_reference


def test_every_metric_has_a_section():
    page = render_reference()

    assert all(f"### `{metric.name}`\n\n{metric.help}\n" in page for metric in METRICS.values())
