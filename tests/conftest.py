"""What holds for every test: the same search for properties on every machine, and a log as if no other test had run."""

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


@pytest.fixture(autouse=True)
def log_as_imported():
    """Start and end with a fresh log: what fixtures of whole modules set up counts as little as what tests do."""
    reset_log()
    yield
    reset_log()
