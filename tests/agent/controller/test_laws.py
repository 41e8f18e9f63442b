"""Laws over the ranks of several nodes: told when one is broken on two judged steps, gone when it holds again."""

import json

from tests.agent.test_folded_rows import COPIES, block_of, gradients, header_of, means
from trainermon.agent.across_nodes.folded_rows import FoldedRows
from trainermon.agent.controller.overview import render_job


def show(scene, step, *, lost=False, attempt=1):
    """Let both agents tell of a step of their two ranks; of a reduction that is lost each rank keeps its own."""
    for number, agent in enumerate(scene.agents):
        kept = FoldedRows()
        for rank in (2 * number, 2 * number + 1):
            reduced = gradients()[rank] if lost else means()
            kept.on_block(header_of(rank, COPIES, attempt=attempt), (), block_of(gradients()[rank], reduced, step=step))
        agent.folded |= {int(told): ranks for told, ranks in kept.rows()["steps"].items()}


async def look(scene):
    await scene.controller.fleet.poll()
    await scene.controller.laws.look()
    return {found.law.name: found for found in scene.controller.laws.findings.get("run", ())}


def test_a_law_that_is_broken_over_nodes_is_told_and_is_over_when_it_holds(play):
    async def scenario(scene):
        found = []
        for step, lost in ((20, False), (40, True), (60, True), (80, True), (100, False)):
            show(scene, step, lost=lost)
            found.append(await look(scene))
            if step == 80:
                shown = json.loads(render_job(scene.controller))["broken_laws"]["run"]
        return found, shown

    (sound, once, twice, still, over), shown = play(scenario)

    assert (sound, once, over) == ({}, {}, {})
    assert set(twice) == set(still) == {"linear", "equal-gradients"}
    assert (still["linear"].step, still["linear"].ranks) == (40, (0, 1, 2, 3))
    assert "Reduced gradients are not the sum" in still["linear"].text
    assert {(each["step"], tuple(each["ranks"])) for each in shown} == {(40, (0, 1, 2, 3))}


def test_a_new_attempt_begins_anew(play):
    async def scenario(scene):
        show(scene, 20, lost=True)
        await look(scene)
        for agent in scene.agents:
            agent.attempt, agent.folded = 2, {}
        show(scene, 20, lost=True, attempt=2)
        return await look(scene)

    assert play(scenario) == {}


def test_while_a_node_does_not_tell_no_reduction_is_judged(play):
    async def scenario(scene):
        show(scene, 20, lost=True)
        show(scene, 40, lost=True)
        scene.agents[1].folded = {}
        return await look(scene)

    assert "linear" not in play(scenario)
