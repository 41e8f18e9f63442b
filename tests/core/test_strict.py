"""What a dataclass is built from: every mistake is named by the path of its key."""

import dataclasses

import pytest

from trainermon.core.errors import ConfigError
from trainermon.core.strict import build


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
