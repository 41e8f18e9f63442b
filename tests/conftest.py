"""What holds for every test: the same search for properties on every machine, and a log as if no other test had run."""

import logging

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def log_as_found():
    """Put back what a monitor or an agent in this process sets up for its log; other tests look for lines in it."""
    logger = logging.getLogger("trainermon")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
