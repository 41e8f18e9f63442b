"""What ranks report: the JSON is that of docs/reference/journal.md, and any JSON is read without an error."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.events import (
    ConfigurationEvent,
    ConfigurationStatus,
    DetachedEvent,
    DumpEvent,
    DumpStatus,
    EventType,
    FailedEvent,
    GapEvent,
    RankEvent,
    ReplayEvent,
    UnknownEvent,
    WarningEvent,
    decode,
    encode,
)

EVENTS: list[tuple[RankEvent, dict[str, Any]]] = [
    (WarningEvent(message="m"), {"type": "warning", "message": "m"}),
    (DetachedEvent(message="m"), {"type": "detached", "message": "m"}),
    (GapEvent(first=4, last=5, message="m"), {"type": "gap", "first": 4, "last": 5, "message": "m"}),
    (GapEvent(first=4, last=None, message="m"), {"type": "gap", "first": 4, "last": None, "message": "m"}),
    (
        GapEvent(first=4, last=None, message="m", what="cats"),
        {"type": "gap", "first": 4, "last": None, "message": "m", "what": "cats"},
    ),
    (
        FailedEvent(step=3, message="boom", time_s=9.5),
        {"type": "failed", "step": 3, "message": "boom", "time_s": 9.5},
    ),
    (
        ConfigurationEvent(step=7, command="edit", status=ConfigurationStatus.APPLIED, reason=""),
        {"type": "configuration", "step": 7, "command": "edit", "status": "applied", "reason": ""},
    ),
    (
        ReplayEvent(step=4, status=DumpStatus.REFUSED, dump=None, reason="why", seconds=0.5, micro_steps=0, bytes=0),
        {
            "type": "replay",
            "step": 4,
            "status": "refused",
            "dump": None,
            "reason": "why",
            "seconds": 0.5,
            "micro_steps": 0,
            "bytes": 0,
        },
    ),
    (
        DumpEvent(step=5, command="look", status=DumpStatus.OVER_QUOTA, dump="dumps/look", bytes=10),
        {"type": "dump", "step": 5, "command": "look", "status": "over quota", "dump": "dumps/look", "bytes": 10},
    ),
    (
        DumpEvent(step=5, command="look", status=DumpStatus.LATE),
        {"type": "dump", "step": 5, "command": "look", "status": "late"},
    ),
]


@pytest.mark.parametrize(
    ("event", "plain"), EVENTS, ids=lambda value: value.get("type") if isinstance(value, dict) else ""
)
def test_an_event_is_written_and_read_as_documented(event, plain):
    assert json.loads(json.dumps(encode(event))) == plain
    assert decode(plain) == event


def test_every_type_has_an_example_here():
    assert {event.type for event, _ in EVENTS} == set(EventType)


@pytest.mark.parametrize("name", ["", "novelty", "Warning", "dump "])
def test_a_type_of_another_version_is_unknown(name):
    assert decode({"type": name, "message": "m"}) == UnknownEvent(type=name)


@pytest.mark.parametrize("plain", [{}, {"type": None}, {"type": ["dump"]}, {"type": {"a": 1}}, {"type": 3}])
def test_what_has_no_type_is_unknown(plain):
    assert decode(plain) == UnknownEvent(type="")


@pytest.mark.parametrize("value", [None, [], {}, True, "x", 1.5])
def test_a_field_of_another_type_is_empty(value):
    found = decode({"type": "dump", "step": value, "command": [value], "status": [value], "dump": 3, "bytes": value})

    assert found == DumpEvent(step=None, command="", status=DumpStatus.UNKNOWN)


@pytest.mark.parametrize("value", ["NaN", None, [], 10**400, True])
def test_a_duration_that_is_no_number_is_nan(value):
    found = decode({"type": "replay", "seconds": value})

    assert isinstance(found, ReplayEvent)
    assert math.isnan(found.seconds)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["type", "step", "command", "status", "dump", "bytes", "reason", "message", "seconds", "micro_steps"]
)


@given(st.sampled_from(EventType), st.dictionaries(KEYS, JSON))
def test_any_json_is_read_and_what_was_read_is_stable(kind, plain):
    event = decode({**plain, "type": kind.value})

    assert event.type is kind
    again = decode(json.loads(json.dumps(encode(event))))
    assert json.dumps(encode(again)) == json.dumps(encode(event))  # as text, since NaN is not equal to itself


def test_messages_and_reasons_are_written_without_secrets():
    said = "cannot reach https://anne:kumquat1@example.org with api_key=kumquat1"
    for event in (
        WarningEvent(message=said),
        DetachedEvent(message=said),
        FailedEvent(step=1, message=said),
        ConfigurationEvent(step=1, command="look", status=ConfigurationStatus.REFUSED, reason=said),
        DumpEvent(step=1, command="look", status=DumpStatus.FAILED, reason=said),
    ):
        plain = encode(event)
        assert "kumquat1" not in str(plain)
        assert "cannot reach https://<redacted>@example.org" in str(plain)
