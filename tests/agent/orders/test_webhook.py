"""What a notification of Alertmanager asks for; what it may not be; and that its repetition is recognised."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.notifications import alert, notification
from trainermon.agent.orders.commands import parse_command
from trainermon.agent.orders.webhook import make_requests, parse_notification
from trainermon.core.errors import ConfigError

NOW_S = 1_790_000_000.0


def parse(*alerts, **changes):
    return parse_notification(notification(*alerts, **changes), now_s=NOW_S)


def fired(rule="Spike", **labels):
    return alert(rule, starts_s=NOW_S - 10, **labels)


def test_labels_say_run_rank_kind_and_length():
    (found,) = parse(fired(rank=3, escalate="tensor", escalate_steps=2)).alerts

    assert (found.rule, found.run, found.rank, found.task, found.num_steps) == ("Spike", "run", 3, "tensor", 2)
    assert found.summary == "Spike on run"
    assert found.starts_s == pytest.approx(NOW_S - 10)


def test_the_rule_of_the_agents_is_preferred_to_the_name_of_the_alert():
    assert parse(fired(rule_="x", rule="gradient-spike")).alerts[0].rule == "gradient-spike"


def test_a_repetition_has_the_same_key_and_another_alert_another():
    key = parse(fired(rank=3)).alerts[0].key

    assert parse(fired(rank=3)).alerts[0].key == key
    later = alert("Spike", starts_s=NOW_S - 9, rank=3)
    others = [parse(other).alerts[0].key for other in (fired(rank=4), fired(rank=3, escalate="tensor"), later)]
    assert len({key, *others}) == 4


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (alert("A", starts_s=NOW_S, escalate=None), "A: it has no label escalate"),
        (alert("A", starts_s=NOW_S, status="resolved"), "A: resolved"),
        (alert("A", starts_s=NOW_S - 901), "A: it began 901 s ago, more than 900 s"),
        (alert("A", starts_s=NOW_S + 901), "A: it began -901 s ago, more than 900 s"),
        (alert("A", starts_s=NOW_S, escalate="everything"), "label escalate: found 'everything'"),
        (alert("A", starts_s=NOW_S, rank="x"), "label rank: found 'x'"),
        (alert("A", starts_s=NOW_S, rank="-1"), "label rank: found '-1'"),
        (alert("A", starts_s=NOW_S, rank="٣"), "label rank"),
        (alert("A", starts_s=NOW_S, escalate_steps=0), "label escalate_steps: found '0', expected 1 to 100"),
    ],
)
def test_an_alert_that_asks_for_nothing_possible_is_told_why_and_holds_up_no_other(entry, reason):
    found = parse(entry, fired("B"))

    assert [each.rule for each in found.alerts] == ["B"]
    assert reason in found.ignored[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "3"}, "version"),
        ({"version": 4}, "version"),
        ({"version": None}, "version"),
        ({"alerts": None}, "alerts"),
        ({"alerts": {}}, "alerts"),
        ({"alerts": [1]}, "alerts[0]"),
        ({"alerts": [{**alert(), "status": "odd"}]}, "alerts[0].status"),
        ({"alerts": [{**alert(), "labels": {"a": 1}}]}, "alerts[0].labels"),
        ({"alerts": [{**alert(), "labels": []}]}, "alerts[0].labels"),
        ({"alerts": [{**alert(), "annotations": "x"}]}, "alerts[0].annotations"),
        ({"alerts": [{**alert(), "fingerprint": "../x"}]}, "alerts[0].fingerprint"),
        ({"alerts": [{**alert(), "fingerprint": None}]}, "alerts[0].fingerprint"),
        ({"alerts": [{**alert(), "startsAt": "yesterday"}]}, "alerts[0].startsAt"),
        ({"alerts": [{**alert(), "startsAt": "2026-13-01T00:00:00Z"}]}, "alerts[0].startsAt"),
        ({"alerts": [{**alert(), "startsAt": "9" * 10**6}]}, "alerts[0].startsAt"),
        ({"truncatedAlerts": -1}, "truncatedAlerts"),
        ({"truncatedAlerts": True}, "truncatedAlerts"),
    ],
)
def test_a_body_that_is_no_notification_is_refused_by_name_and_in_few_words(change, named):
    with pytest.raises(ConfigError) as caught:
        parse(**change)

    assert str(caught.value).startswith(f"{named}:")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("body", [None, [], "text", 4])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ConfigError, match="the body"):
        parse_notification(body, now_s=NOW_S)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-09-21T12:13:20.123456789Z", datetime.datetime(2026, 9, 21, 12, 13, 20, 123456, datetime.timezone.utc)),
        ("2026-09-21T14:13:20+02:00", datetime.datetime(2026, 9, 21, 12, 13, 20, 0, datetime.timezone.utc)),
    ],
)
def test_times_are_read_as_go_writes_them(text, expected):
    body = notification({**alert(), "startsAt": text})
    found = parse_notification(body, now_s=expected.timestamp()).alerts[0]

    assert found.starts_s == pytest.approx(expected.timestamp(), abs=1e-5)


def requests(*alerts, **changes):
    found = parse(*alerts, **changes)
    return make_requests(found.alerts, truncated=found.truncated)


def test_alerts_of_one_run_become_one_request_for_all_their_ranks():
    (found,) = requests(fired(rank=3), fired("Other", rank=1, escalate="tensor"), fired(rank=3, x="1"))

    assert (found.ranks, found.task, found.run) == ((1, 3), "tensor", "run")
    assert found.reason == "Spike: Spike on run (and 2 more alerts)"


@pytest.mark.parametrize(
    ("alerts", "changes"), [((fired(rank=3), fired()), {}), ((fired(rank=3),), {"truncatedAlerts": 1})]
)
def test_no_rank_or_a_truncated_group_means_all_ranks(alerts, changes):
    assert requests(*alerts, **changes)[0].ranks is None


def test_each_run_has_a_request_of_its_own():
    found = requests(fired(run="a", rank=1), fired(run="b", rank=2), fired(run="a", rank=3))

    assert [(each.run, each.ranks) for each in found] == [("a", (1, 3)), ("b", (2,))]


def test_the_name_depends_on_the_alerts_only_not_on_their_order():
    one, other = fired(rank=3), fired("Other", rank=1)

    assert requests(one, other)[0].alerts == requests(other, one)[0].alerts
    assert requests(one)[0].id == requests(one)[0].id != requests(other)[0].id


@given(st.text(max_size=300), st.text(max_size=600), st.text(max_size=40))
def test_any_text_in_labels_gives_a_command_that_ranks_accept(rule, summary, run):
    entry = fired(run=run, rule=rule)
    entry["annotations"]["summary"] = summary
    for request in requests(entry):
        command = parse_command({"id": request.id, "action": "dump", "reason": request.reason}, next_step=1)

        assert command.id == request.id
