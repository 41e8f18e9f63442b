"""Where a call comes from."""

import re

import pytest

from trainermon.core.errors import ConfigError
from trainermon.monitor.taps import call_lines
from trainermon.monitor.taps.call_lines import CallLine, CallLines


def outer(lines):
    return inner(lines)


def inner(lines):
    return lines.here()


def test_text_names_file_line_and_function_innermost_first():
    frames = CallLines().here().text.split(";")

    assert re.fullmatch(
        r".*/test_call_lines\.py\[\d+\] test_text_names_file_line_and_function_innermost_first", frames[0]
    )


def test_callers_follow():
    frames = [frame.rpartition(" ")[2] for frame in outer(CallLines()).text.split(";")]

    assert frames[:3] == ["inner", "outer", "test_callers_follow"]


@pytest.mark.parametrize(
    ("patterns", "is_wanted"),
    [
        ((), True),
        (("outer",), True),
        ((r"inner;.*outer",), True),
        (("nowhere", "test_call"), True),
        (("nowhere",), False),
    ],
)
def test_one_pattern_that_is_found_is_enough(patterns, is_wanted):
    assert outer(CallLines(patterns)).is_wanted is is_wanted


def test_line_is_known_again():
    lines = CallLines()
    first, second = (outer(lines) for _ in range(2))

    assert first is second
    assert outer(lines) is not first  # from another line of this test


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(call_lines, "MAX_REMEMBERED", 1)
    lines = CallLines()
    outer(lines)
    inner(lines)

    assert len(lines._known) == 1


def test_place_is_the_script_not_torch():
    text = "/x/torch/distributed/distributed_c10d.py[3] all_reduce;/x/train.py[7] step;/x/train.py[9] main"

    assert CallLine(text, is_wanted=True).place == "/x/train.py[7] step"


def test_bad_pattern_is_refused():
    with pytest.raises(ConfigError, match=r"cc_codeline\[1\]: found '\[', expected a regular expression"):
        CallLines(("good", "["))
