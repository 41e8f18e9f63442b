"""What holds for every test: its turn, the same search for properties everywhere, and a log as if it were the first."""

import logging

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("ci")


LOGGER = logging.getLogger("trainermon")
AS_IMPORTED = (LOGGER.handlers[:], LOGGER.level, LOGGER.propagate)


def reset_log():
    """Undo what a monitor or an agent in this process has set up for its log; tests look for lines in it."""
    LOGGER.handlers[:], level, LOGGER.propagate = AS_IMPORTED
    LOGGER.setLevel(level)


def pytest_collection_modifyitems(items):
    """Begin with the files that start processes: so the last ones, for which some worker may wait, are short."""
    long = {item.path for item in items if item.get_closest_marker("distributed") or item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True)
def log_as_imported():
    """Start and end with a fresh log: what fixtures of whole modules set up counts as little as what tests do."""
    reset_log()
    yield
    reset_log()
