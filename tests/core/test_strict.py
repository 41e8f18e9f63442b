"""What a dataclass is built from: every mistake is named by the path of its key."""

import dataclasses
import math
from typing import Literal

import pytest

from trainermon.core.errors import ConfigError
from trainermon.core.strict import build
from trainermon.core.values import as_plain


@dataclasses.dataclass(frozen=True)
class Server:
    host: str
    port: int = 80
    share: float | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    servers: tuple[Server, ...] = ()


def test_a_missing_key_is_named_by_its_path():
    with pytest.raises(ConfigError, match=r"^servers\[1\].host: missing; it has no default$"):
        build(Site, {"servers": [{"host": "a"}, {"port": 1}]})


def test_an_unknown_key_that_resembles_none_is_told_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"^servers\[0\].zzz: unknown key; known keys: host, port, share$"):
        build(Site, {"servers": [{"zzz": 1}]})


@pytest.mark.parametrize("found", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(found):
    with pytest.raises(ConfigError, match=rf"^share: found {found}, expected a finite number$"):
        build(Server, {"host": "a", "share": found})


def test_what_may_be_left_open_may_be_given_as_nothing_or_as_a_whole_number():
    assert build(Server, {"host": "a", "share": None}).share is None
    assert isinstance(build(Server, {"host": "a", "share": 1}).share, float)


@dataclasses.dataclass(frozen=True)
class Measured:
    number: float
    source: Literal["table", "measured"] = "table"


def test_numbers_that_are_not_finite_are_read_only_if_they_may_be():
    read = [
        build(Measured, as_plain(Measured(value)), finite=False).number for value in (math.nan, math.inf, -math.inf)
    ]

    assert [str(value) for value in read] == ["nan", "inf", "-inf"]
    for text in ("NaN", math.nan):
        with pytest.raises(ConfigError, match=r"^number: found"):
            build(Measured, {"number": text})


def test_a_literal_is_one_of_its_values():
    assert build(Measured, {"number": 1, "source": "measured"}).source == "measured"
    with pytest.raises(ConfigError, match="source: found 'guess', expected 'table' or 'measured'"):
        build(Measured, {"number": 1, "source": "guess"})
