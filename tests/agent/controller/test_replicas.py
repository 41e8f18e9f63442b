"""Copies on several nodes: equal ones cost a digest, unequal ones name parameters and ranks, and those dump."""

import asyncio
import time

import pytest

from trainermon.agent.controller.replicas import CopyDivergence, ReplicaWatch, divergences

GROUP = "tp0 pp0 cp0"


@pytest.mark.parametrize(
    ("held", "ranks", "others"),
    [
        ({0: 7, 1: 8}, (0, 1), ()),
        ({0: 7, 1: 8, 2: 7}, (1,), (0, 2)),
        ({0: 7, 1: 8, 2: 8, 3: 7}, (0, 1, 2, 3), ()),
        ({0: 7, 1: 8, 2: 9, 3: 7}, (1, 2), (0, 3)),
        ({0: 5, 1: 6, 2: 7}, (0, 1, 2), ()),
    ],
)
def test_the_ranks_that_differ_from_most_are_named_or_all_where_nobody_can_tell(held, ranks, others):
    reports = {rank: {"w": checksum} for rank, checksum in held.items()}

    assert divergences(reports) == [CopyDivergence(copies="w", ranks=ranks, others=others)]


def test_equal_copies_and_a_rank_without_fellows_are_no_divergence():
    assert divergences({0: {"w": 7}, 1: {"w": 7, "other": 3}}) == []
    assert divergences({}) == []


def checksums(*ranks, **odd):
    """Return what ranks hold of two parameters; `r3=8` gives rank 3 another bias."""
    return {rank: {"weight": 5, "bias": odd.get(f"r{rank}", 7)} for rank in ranks}


def show(scene, step, **odd):
    for number, agent in enumerate(scene.agents):
        agent.checksums[step] = {GROUP: checksums(2 * number, 2 * number + 1, **odd)}


async def look(scene):
    await scene.controller.fleet.poll()
    await scene.controller.replicas.look()
    return scene.controller.replicas.findings.get("run", {}).get(GROUP)


async def until(condition, *, within_s=900.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_the_one_rank_of_all_nodes_that_differs_is_named_with_its_parameter_and_dumps(play):
    async def scenario(scene):
        show(scene, 100)
        before = await look(scene)
        show(scene, 120, r3=8)
        during = await look(scene)
        await until(lambda: scene.orders)
        show(scene, 140, r3=8)
        still = await look(scene)
        show(scene, 160)
        return before, during, still, await look(scene), scene.controller.replicas, list(scene.orders)

    before, during, still, after, watch, orders = play(scenario)

    assert (before, after) == (None, None)
    assert (during.step, during.ranks, during.others, during.names) == (120, (3,), (0, 1, 2), ("bias",))
    assert during.text == "1 parameter of rank 3 differs from the copies on ranks 0–2, found at step 120: bias"
    assert still == during
    assert [(order["agent"], order["ranks"], order["task"]) for order in orders] == [(1, [3], "statistics")]
    assert "replica-divergence: 1 parameter of rank 3" in orders[0]["reason"]
    assert (watch.num_comparisons, watch.num_mismatches) == (4, 2)


def test_what_a_node_alone_can_tell_or_not_is_told_over_all_nodes(play):
    """Each agent sees a tie of its own two ranks, or none; over all nodes ranks 0 and 2 are not like most."""

    async def scenario(scene):
        show(scene, 100, r0=1, r2=2)
        return await look(scene)

    assert play(scenario, num_agents=3).ranks == (0, 2)


def test_two_nodes_that_differ_as_wholes_are_both_named(play):
    async def scenario(scene):
        show(scene, 100, r2=8, r3=8)
        return await look(scene)

    found = play(scenario)

    assert (found.ranks, found.others) == ((0, 1, 2, 3), ())
    assert "nobody can tell which is right" in found.text


def test_a_step_waits_until_every_node_has_come_as_far(play):
    async def scenario(scene):
        show(scene, 100)
        del scene.agents[1].checksums[100]
        scene.agents[1].checksums[80] = {GROUP: checksums(2, 3)}
        waited = await look(scene), scene.controller.replicas.num_comparisons
        show(scene, 100, r1=8)
        scene.agents[0].checksums[100] = {GROUP: checksums(0, 1)}
        scene.agents[1].checksums[100] = {GROUP: checksums(2, 3, r3=9)}
        return waited, await look(scene)

    waited, found = play(scenario)

    assert waited == (None, 0)
    assert found.ranks == (3,)


def test_a_node_that_answers_nonsense_keeps_nobody_from_being_compared(play):
    async def scenario(scene):
        show(scene, 100, r1=8)
        scene.agents[2].digests = lambda after: {"attempt": 1, "steps": {"x": 3}}
        return await look(scene)

    assert play(scenario, num_agents=3).ranks == (1,)


def test_where_nobody_tells_the_single_parameters_the_ranks_are_named_by_their_digests(play):
    async def scenario(scene):
        show(scene, 100, r3=8)
        for agent in scene.agents:
            agent.copies = lambda step, group: {"ranks": {}}
        return await look(scene)

    found = play(scenario)

    assert (found.ranks, found.names) == ((3,), ())


def test_a_new_attempt_begins_anew(play):
    async def scenario(scene):
        show(scene, 100, r3=8)
        first = await look(scene)
        for agent in scene.agents:
            agent.attempt, agent.checksums = 2, {}
        show(scene, 40)
        return first, await look(scene), scene.controller.replicas.num_comparisons

    first, second, num_comparisons = play(scenario)

    assert first.ranks == (3,)
    assert (second, num_comparisons) == (None, 2)


def test_agents_of_an_earlier_version_are_silent(play, monkeypatch):
    async def scenario(scene):
        async def missing(*arguments):
            raise ValueError("status 404: there is no such page")

        monkeypatch.setattr(scene.controller.client, "get", missing)
        await scene.controller.replicas.look()
        return scene.controller.replicas

    watch = play(scenario)

    assert isinstance(watch, ReplicaWatch)
    assert watch.findings == {}
