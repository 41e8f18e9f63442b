"""Text of points as InfluxDB reads them.

Source: InfluxData, "Line protocol" (v2 reference), and "Optimize writes": tags sorted by key, few digits of time. Keys
are our own and need no escape. Names come from a model and may hold anything: what the format cannot carry at all, line
ends and a backslash in front of a delimiter, is replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_DELIMITER = re.compile(r"([,= ])")
_UNSPEAKABLE = re.compile(r"[\n\r\t]|\\(?=[,= \\]|$)")


class PointLines(NamedTuple):
    """Points in InfluxDB's line protocol.

    Attributes:
        text: One line per point.
        num_nonfinite: How many values are missing from them because they are not finite.
    """

    text: list[str]
    num_nonfinite: int


def series_text(measurement: str, tags: Mapping[str, str]) -> str:
    r"""Return the text before a point's fields in line protocol: measurement, tags in order of their keys, one space.

    A tag without a value is left out, as the format has no empty ones.

    >>> print(series_text("trainermon_step", {"run": "my run", "rank": "0"}) + "step=7i")
    trainermon_step,rank=0,run=my\ run step=7i
    """
    pairs = [f"{name}={_escape(tags[name])}" for name in sorted(tags) if tags[name]]
    return f"{','.join([measurement, *pairs])} "


def time_text(time_s: float) -> str:
    """Return a Unix time as the last word of a line, in whole microseconds, with the space in front.

    >>> time_text(1700000000.25)
    ' 1700000000250000'
    """
    return f" {round(time_s * 1e6)}"


def point(series: str, integers: Mapping[str, int], floats: Mapping[str, float], time: str) -> tuple[str, int]:
    """Return the line of a point in line protocol, and how many of `floats` are left out because they are not finite.

    `series` is from `series_text`, `time` from `time_text`.

    >>> point("m,rank=0 ", {"step": 7}, {"loss": 0.1, "norm": float("inf")}, " 12")
    ('m,rank=0 step=7i,loss=0.1 12', 1)
    """
    known = [f"{name}={value!r}" for name, value in floats.items() if math.isfinite(value)]
    whole = [f"{name}={value}i" for name, value in integers.items()]
    return f"{series}{','.join([*whole, *known])}{time}", len(floats) - len(known)


def _escape(value: str) -> str:
    return _DELIMITER.sub(r"\\\1", _UNSPEAKABLE.sub("_", value))
