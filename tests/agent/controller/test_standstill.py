"""A rank on one node holds up those of another: each agent sees only its own, the controller names the one."""

from __future__ import annotations

import threading

from trainermon.agent.controller import standstill
from trainermon.agent.hang.evidence import GroupState, PendingCall, RankEvidence
from trainermon.core.values import as_plain

HANG = {"id": "h", "rule": "hang", "severity": "critical", "rank": 0, "step": 100, "message": "hang: rank 0 hangs"}


def evidence(rank, *, entered, waits=True, attempt=1):
    """A rank in the group of all four, which waits in its newest collective or has left that for something else."""
    calls = (PendingCall(op="all_reduce", sequence=entered),) if waits else ()
    world = GroupState(name="world", ranks=(0, 1, 2, 3), entered=entered, in_flight=calls)
    known = RankEvidence(rank=rank, attempt=attempt, silent_s=60.0, process_state="S", groups=(world,))
    return as_plain(known)


async def verdict_of(scene):
    """Look once more, and return the verdict, None if there is none."""
    await scene.controller.fleet.poll()
    await scene.controller.standstill.look()
    return scene.controller.standstill.verdicts.get("run")


def test_the_rank_that_has_not_entered_is_named_over_all_nodes(play):
    async def scenario(scene):
        scene.agents[0].evidence = [evidence(0, entered=7), evidence(1, entered=7)]
        scene.agents[1].evidence = [evidence(2, entered=7), evidence(3, entered=6, waits=False)]
        scene.agents[0].alerts = [HANG]
        return await verdict_of(scene)

    hang = play(scenario)

    assert [culprit.rank for culprit in hang.culprits] == [3]
    assert (hang.waiting, hang.op, hang.sequence) == ((0, 1, 2), "all_reduce", 7)
    assert hang.absent == ()


def test_a_node_without_an_answer_leaves_its_ranks_open_and_blames_no_other(play):
    async def scenario(scene):
        scene.agents[0].evidence = [evidence(0, entered=7), evidence(1, entered=7)]
        scene.agents[1].evidence = [{"rank": "nonsense"}]
        scene.agents[0].alerts = [HANG]
        return await verdict_of(scene)

    hang = play(scenario)

    assert hang.culprits == ()
    assert hang.absent == (2, 3)


def test_nobody_is_asked_while_no_rank_hangs_and_the_verdict_goes_with_the_alert(play):
    async def scenario(scene):
        scene.agents[0].evidence = [evidence(0, entered=7)]
        verdicts = []
        for alerts in ([], [HANG], []):
            scene.agents[0].alerts = alerts
            verdicts.append(await verdict_of(scene))
        return verdicts

    before, during, after = play(scenario)

    assert (before, after) == (None, None)
    assert during.waiting == (0,)


def test_evidence_of_an_earlier_attempt_says_nothing_of_this_one(play):
    async def scenario(scene):
        scene.agents[0].evidence = [evidence(0, entered=7), evidence(1, entered=7)]
        scene.agents[1].evidence = [evidence(2, entered=7, attempt=0), evidence(3, entered=6, waits=False, attempt=0)]
        scene.agents[0].alerts = [HANG]
        return await verdict_of(scene)

    assert play(scenario).absent == (2, 3)


def test_evidence_is_read_and_judged_outside_of_the_event_loop(play, monkeypatch):
    threads = []

    def noted(judge):
        def wrapper(known):
            threads.append(threading.current_thread())
            return judge(known)

        return wrapper

    for name in ("parse_evidence", "verdict"):
        monkeypatch.setattr(standstill, name, noted(getattr(standstill, name)))

    async def scenario(scene):
        scene.agents[0].evidence = [evidence(0, entered=7)]
        scene.agents[0].alerts = [HANG]
        await verdict_of(scene)
        return threading.current_thread()

    of_loop = play(scenario)

    assert len(threads) >= 2
    assert of_loop not in threads
