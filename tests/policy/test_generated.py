"""What is generated from the code says what the code says."""

from pathlib import Path

from docs.generate import render_configuration
from trainermon.exporters.reference import render_reference

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_configuration_page_is_up_to_date():
    assert (REFERENCE / "configuration.md").read_text() == render_configuration()


def test_the_metrics_page_is_up_to_date():
    assert (REFERENCE / "metrics.md").read_text() == render_reference()
