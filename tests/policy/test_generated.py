"""What is generated from the code says what the code says."""

from pathlib import Path

import pytest

from docs.generate import RULES, render_configuration
from trainermon.alerts.prometheus.command import default_files
from trainermon.exporters.prometheus.reference import render_reference

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_configuration_page_is_up_to_date():
    assert (REFERENCE / "configuration.md").read_text() == render_configuration()


def test_the_metrics_page_is_up_to_date():
    assert (REFERENCE / "metrics.md").read_text() == render_reference()


@pytest.fixture(scope="module")
def generated():
    return default_files()


@pytest.mark.parametrize("name", sorted(path.name for path in RULES.iterdir()))
def test_the_generated_rules_are_up_to_date(name, generated):
    assert (RULES / name).read_text() == generated.get(name, "")


def test_every_file_of_rules_is_there_and_none_is_left_from_before(generated):
    assert {path.name for path in RULES.iterdir()} == set(generated)
