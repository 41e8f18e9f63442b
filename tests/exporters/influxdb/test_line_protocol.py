"""Line protocol, read back by an own reader that follows the specification word by word."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.exporters.influxdb.line_protocol import point, series_text, time_text

WORD = r"(?:[^\\,= ]|\\.|\\(?![,= ]))+"


def read(line: str) -> tuple[str, dict[str, str], dict[str, str], int]:
    """Return measurement, tags, fields and time of a line whose fields are numbers."""
    series, fields, time = re.fullmatch(rf"((?:{WORD}|[,=])+) (\S*) (-?\d+)", line).groups()
    measurement, *tags = re.split(r"(?<!\\),", series)
    pairs = [re.split(r"(?<!\\)=", tag) for tag in tags]
    plain = {key: re.sub(r"\\([,= ])", r"\1", value) for key, value in pairs}
    return measurement, plain, dict(field.split("=") for field in fields.split(",")), int(time)


@given(st.dictionaries(st.sampled_from(["run", "rank", "module"]), st.text("ab .,=é\"'", min_size=1), min_size=1))
def test_tags_come_back_and_stand_in_order(tags: dict[str, str]):
    line, _ = point(series_text("m", tags), {"step": 1}, {}, time_text(0))

    measurement, found, fields, time = read(line)

    assert (measurement, found, fields, time) == ("m", tags, {"step": "1i"}, 0)
    assert list(found) == sorted(found)


@pytest.mark.parametrize("name", ["a\nb", "a\\", "a\\,b", "a\\ b", "\\\\", "tab\t"])
def test_what_the_format_cannot_carry_is_replaced_and_the_line_stays_one(name: str):
    line, _ = point(series_text("m", {"module": name, "run": "r"}), {"step": 1}, {}, time_text(0))

    assert "\n" not in line
    assert read(line)[1]["run"] == "r"


def test_an_empty_tag_is_left_out():
    assert series_text("m", {"run": "r", "module": ""}) == "m,run=r "


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats()), st.integers(0, 2**53))
def test_every_bit_of_a_finite_value_comes_back_and_others_are_counted(values: dict[str, float], step: int):
    line, num_missing = point(series_text("m", {}), {"step": step}, values, time_text(12.5))

    _, _, fields, time = read(line)

    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    assert fields.pop("step") == f"{step}i"
    assert {name: float(text) for name, text in fields.items()} == finite
    assert num_missing == len(values) - len(finite)
    assert time == 12_500_000
