"""Which level the log has, by the environment."""

import logging
import os
import subprocess
import sys

import pytest

from trainermon.core.log import chosen_level

LINES = """
import logging, trainermon
from trainermon.core.log import make_log_visible
make_log_visible(quiet=False)
log = logging.getLogger("trainermon")
print(log.getEffectiveLevel())
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    log.log(level, "line at %s", logging.getLevelName(level))
"""


def run(script=LINES, **variables):
    known = {key: value for key, value in os.environ.items() if not key.endswith("_LOG_LEVEL")}
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**known, **variables}, capture_output=True, text=True, check=True
    )
    return ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("number", "level"), [("0", "DEBUG"), ("1", "INFO"), ("2", "WARNING"), ("3", "ERROR"), ("4", None)]
)
def test_msprobes_numbers_set_what_is_shown(number, level):
    _, shown = run(MSPROBE_LOG_LEVEL=number)

    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    wanted = levels[levels.index(level) :] if level else []
    assert [line.rpartition(" ")[2] for line in shown.splitlines() if "line at" in line] == wanted


def test_another_value_is_told_once_and_stops_nothing():
    level, shown = run(MSPROBE_LOG_LEVEL="loud")

    assert int(level) == logging.INFO
    assert [line for line in shown.splitlines() if "LOG_LEVEL" in line] == [
        "MSPROBE_LOG_LEVEL: found 'loud', expected 0 to 4, or one of debug, info, warning, error, critical, silent; "
        "it is passed over"
    ]


@pytest.mark.extras
def test_a_debugger_alone_follows_it_too():
    script = """
from trainermon import PrecisionDebugger
for _ in range(2):
    PrecisionDebugger(dump_path="/nowhere", level="L1")
"""

    _, shown = run(script, TRAINERMON_LOG_LEVEL="info")

    assert shown == "trainermon: there is a PrecisionDebugger already; it stays as it is\n"


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, None),
        ({"TRAINERMON_LOG_LEVEL": ""}, None),
        ({"TRAINERMON_LOG_LEVEL": "ERROR"}, logging.ERROR),
        ({"TRAINERMON_LOG_LEVEL": " warn "}, logging.WARNING),
        ({"TRAINERMON_LOG_LEVEL": "2"}, logging.WARNING),
        ({"TRAINERMON_LOG_LEVEL": "40"}, logging.ERROR),
        ({"TRAINERMON_LOG_LEVEL": "debug", "MSPROBE_LOG_LEVEL": "3"}, logging.DEBUG),
        ({"TRAINERMON_LOG_LEVEL": "5", "MSPROBE_LOG_LEVEL": "3"}, logging.ERROR),
        ({"MSPROBE_LOG_LEVEL": "-1"}, None),
    ],
)
def test_names_and_numbers_are_levels_and_our_variable_comes_first(variables, level):
    assert chosen_level(variables) == level
