"""What holds for every test: its turn, the same search for properties everywhere, and a process left as found."""

import gc
import importlib
import importlib.util
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.process_state import changes, process_state

if importlib.util.find_spec("setuptools") is not None:
    importlib.import_module("setuptools")  # takes the place of distutils, whichever test imports that first

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("ci")


HAS_MINDSPORE = importlib.util.find_spec("mindspore") is not None


def pytest_ignore_collect(collection_path):
    """Leave out what needs MindSpore where that is not installed: it is in the environment of `make test-mindspore`."""
    folders = collection_path.relative_to(Path(__file__).parent).parts
    return True if "mindspore" in folders and not HAS_MINDSPORE else None


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


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail a test file whose import changes a switch of the process."""
    before = process_state()
    report = yield
    left = changes(before, process_state()) if isinstance(collector, pytest.Module) else []
    if left:
        report.outcome, report.longrepr = "failed", "The import leaves changed:\n" + "\n".join(left)
    return report


# The fixtures of the widest scope are set up first and end last: this one is for what fixtures of a module leave.
@pytest.fixture(autouse=True, scope="module")
def module_leaves_no_change():
    """Fail with the last test of a file where its module's fixtures leave a switch of the process changed."""
    before = process_state()
    yield
    left = changes(before, process_state())
    assert left == []


def pytest_collection_finish():
    """Have no collection of garbage look at what stays to the end: thousands of tests, and all that they import."""
    gc.freeze()


@pytest.fixture(autouse=True)
def process_as_found():
    """Fail a test that leaves a switch of the process changed; 0.15 ms a test.

    The log starts and ends fresh: what fixtures of whole modules set up counts as little as what tests do.
    """
    reset_log()
    before = process_state()
    yield
    reset_log()
    left = changes(before, process_state())
    assert left == []
