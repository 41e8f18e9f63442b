"""The common step, and what agents' answers mean: by hand, and whatever agents there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.agent.controller.client import AgentAddress
from trainermon.agent.controller.fleet import AgentHandle
from trainermon.agent.controller.journal import EscalationPlan
from trainermon.agent.controller.planning import (
    AgentAnswer,
    OrderMargin,
    OrderReceipt,
    assign,
    coverage_of,
    make_plan,
    outcome_of,
    read_answer,
)
from trainermon.agent.orders.answers import AgentReport, RankSummary
from trainermon.agent.orders.webhook import DumpRequest

MARGIN = OrderMargin(tries=3, timeout_s=0.5)


def request(ranks=None, **changes):
    plain = {"id": "Spike-1", "run": "run", "task": "statistics", "num_steps": 1, "reason": "", "alerts": ("a/1/dump",)}
    return DumpRequest(**{**plain, "ranks": ranks, **changes})


def agent(url, steps, *, pace=1.0, attempt=1, seen_s=0.0, problem="", dead=()):
    """An agent whose ranks are on the steps given, by rank."""
    ranks = tuple(
        RankSummary(rank=rank, alive=rank not in dead, step=step, phase="step", lag_s=0.0, place={})
        for rank, step in steps.items()
    )
    report = AgentReport(
        run_id="run",
        attempt=attempt,
        host=url,
        world_size=8,
        step=None,
        steps_per_s=pace,
        ranks=ranks,
        alerts=(),
        dumps={},
    )
    return AgentHandle(AgentAddress(url), report, seen_s, problem)


@pytest.mark.parametrize(("pace", "steps"), [(10.0, 17), (2.0, 5), (1.0, 4), (0.01, 3), (0.0, 2)])
def test_margin_covers_every_try_and_the_step_that_is_under_way(pace, steps):
    # ceil(tries x time-out x pace) + 2; measured: 10 and 5 steps lost none at 10 and 2 steps per second
    assert MARGIN.steps(pace) == steps


def test_margin_covers_the_time_that_it_takes_to_speak_to_all_agents():
    assert OrderMargin(tries=3, timeout_s=0.5, round_s=2.0).steps(10.0) == 15 + 20 + 2


def test_agents_that_answer_hear_of_an_order_before_those_that_do_not():
    agents = [agent("a/", {0: 1}, problem="no answer in time"), agent("b/", {1: 1}), agent("c/", {2: 1, 3: 1})]

    assert list(assign([0, 1, 3], agents).items()) == [("b/", (1,)), ("c/", (3,)), ("a/", (0,))]


def test_the_step_is_ahead_of_the_fastest_rank_of_any_agent():
    agents = [agent("a/", {0: 100, 1: 101}, pace=2.0), agent("b/", {2: 103, 3: 90}, pace=1.0)]

    plan = make_plan(request(), agents, 1, MARGIN, now_s=0.0)

    assert plan == EscalationPlan(id="Spike-1", issue=1, attempt=1, first_step=103 + 5, ranks=(0, 1, 2, 3))


def test_an_agent_that_does_not_answer_is_thought_to_have_gone_on():
    agents = [agent("a/", {0: 100}, pace=2.0, seen_s=10.0, problem="no answer in time")]

    assert make_plan(request(), agents, 1, MARGIN, now_s=14.0).first_step == 100 + 8 + 5


def test_an_agent_that_answers_is_believed_rather_than_a_guess():
    silent = agent("a/", {0: 100}, pace=2.0, seen_s=0.0, problem="no answer in time")

    assert make_plan(request(), [silent, agent("b/", {1: 107})], 1, MARGIN, now_s=3600.0).first_step == 107 + 5


def test_only_living_ranks_that_are_meant_are_planned_for():
    agents = [agent("a/", {0: 5, 1: 5}, dead={1}), agent("b/", {2: 5})]

    assert make_plan(request((1, 2)), agents, 1, MARGIN, now_s=0.0).ranks == (2,)
    assert make_plan(request((1,)), agents, 1, MARGIN, now_s=0.0) is None
    assert make_plan(request(), [], 1, MARGIN, now_s=0.0) is None


def test_a_later_issue_has_a_name_of_its_own():
    assert make_plan(request(), [agent("a/", {0: 5})], 2, MARGIN, now_s=0.0).id == "Spike-1-2"


def test_ranks_go_to_the_agent_that_has_them_now():
    agents = [agent("new-a/", {0: 5, 1: 5}), agent("b/", {2: 5})]

    assert assign((0, 2, 3), agents) == {"new-a/": (0,), "b/": (2,)}


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (202, {"status": "accepted", "ranks": [0], "late": []}, OrderReceipt.ORDERED),
        (200, {"status": "duplicate", "ranks": [0]}, OrderReceipt.ORDERED),
        (200, {"status": "suppressed", "reason": "3 dumps in the last hour"}, OrderReceipt.SUPPRESSED),
        (200, {"status": "late", "late": [0]}, OrderReceipt.LATE),
        (409, {"detail": "attempt: found 1"}, OrderReceipt.LATE),
        (401, {"detail": "token"}, OrderReceipt.REFUSED),
        (400, {"detail": "run"}, OrderReceipt.REFUSED),
        (503, {"detail": "disk"}, OrderReceipt.UNREACHABLE),
        (200, {"status": "something new"}, OrderReceipt.UNREACHABLE),
        (200, "text", OrderReceipt.UNREACHABLE),
    ],
)
def test_an_answer_means_what_it_says(status, body, told):
    assert read_answer(status, body).told is told


def test_coverage_tells_of_every_rank():
    plan = EscalationPlan(id="x", issue=1, attempt=1, first_step=9, ranks=(0, 1, 2, 3, 4))
    assigned = {"a/": (0, 1), "b/": (2,), "c/": (3,)}
    answers = {
        "a/": AgentAnswer(OrderReceipt.ORDERED, (0,), (1,)),
        "b/": AgentAnswer(OrderReceipt.SUPPRESSED),
        "c/": AgentAnswer(OrderReceipt.ORDERED, ()),
    }

    assert coverage_of(plan, assigned, answers) == {
        0: "ordered",
        1: "late",
        2: "suppressed",
        3: "late",
        4: "unreachable",
    }


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        (["written", "nonfinite", "clean"], "done"),
        (["written", "late"], "partial"),
        (["written", "over quota"], "partial"),
        (["late", "unreachable"], "failed"),
        (["suppressed", "suppressed"], "suppressed"),
        (["suppressed", "late"], "failed"),
        ([], "failed"),
    ],
)
def test_the_outcome_is_that_of_all_ranks(statuses, outcome):
    assert outcome_of(statuses) == outcome


@given(
    steps=st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), min_size=1, max_size=5),
    pace=st.floats(0.0, 1000.0),
    tries=st.integers(1, 5),
    timeout_s=st.floats(0.01, 5.0),
)
def test_no_rank_reaches_the_step_before_it_can_have_heard_of_it(steps, pace, tries, timeout_s):
    numbers = iter(range(100))
    agents = [agent(f"{n}/", {next(numbers): step for step in own}, pace=pace) for n, own in enumerate(steps)]

    plan = make_plan(request(), agents, 1, OrderMargin(tries=tries, timeout_s=timeout_s), now_s=0.0)

    newest = max(step for own in steps for step in own)
    assert plan.first_step > newest + pace * tries * timeout_s
    assert plan.ranks == tuple(range(sum(map(len, steps))))
