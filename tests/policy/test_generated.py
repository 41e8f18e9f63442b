"""What is generated from the code says what the code says."""

from pathlib import Path

import pytest

from docs.compatibility import PAGE, with_versions
from docs.generate import RULES, render_configuration
from docs.python_reference import render_python_reference
from trainermon.alerts.prometheus.command import default_files
from trainermon.exporters.prometheus.reference import render_reference

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_configuration_page_is_up_to_date():
    assert (REFERENCE / "configuration.md").read_text() == render_configuration()


def test_the_metrics_page_is_up_to_date():
    assert (REFERENCE / "metrics.md").read_text() == render_reference()


def test_the_page_of_the_python_api_is_up_to_date():
    assert (REFERENCE / "python.md").read_text() == render_python_reference()


def test_the_versions_in_the_compatibility_page_are_those_that_tests_install():
    text = PAGE.read_text()

    assert text == with_versions(text)
    assert text != with_versions(text.replace("<!-- torch -->", "<!-- numpy -->"))


@pytest.fixture(scope="module")
def generated():
    return default_files()


@pytest.mark.parametrize("name", sorted(path.name for path in RULES.iterdir()))
def test_the_generated_rules_are_up_to_date(name, generated):
    assert (RULES / name).read_text() == generated.get(name, "")


def test_every_file_of_rules_is_there_and_none_is_left_from_before(generated):
    assert {path.name for path in RULES.iterdir()} == set(generated)
