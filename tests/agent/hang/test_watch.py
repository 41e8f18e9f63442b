"""When a rank is taken for hung or dead, and when that is over; ranks are pages and locks here, and time is made up."""

import asyncio
import dataclasses
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.agent.hang.watched_node import Node
from trainermon.agent.hang.deaths import EXIT_LIMIT_S, READ_LIMIT_S, SETTLE_ALONE_S, SETTLE_S
from trainermon.agent.hang.evidence import parse_evidence
from trainermon.agent.hang.ladder import EvidenceLadder
from trainermon.agent.hang.report import report_name
from trainermon.agent.hang.watch import NOBODY
from trainermon.core.config import HangConfig
from trainermon.core.control import Phase
from trainermon.core.events import FailedEvent
from trainermon.core.values import AlertState, Severity


@pytest.fixture
def play(tmp_path):
    """Run a scenario on a node."""

    def play(scenario, **options):
        async def run():
            with ThreadPoolExecutor(1) as executor:
                node = Node(tmp_path, executor, **options)
                try:
                    await scenario(node)
                finally:
                    await node.close()

        asyncio.run(run())

    return play


def told(alerts):
    return [(alert.rule, alert.state.value, alert.rank, alert.step) for alert in alerts]


def test_silence_beyond_the_limit_is_told_once_and_is_over_with_the_next_beat(play):
    async def scenario(node):
        assert await node.look(0.0) == []
        assert await node.look(10.0) == []
        (alert,) = await node.look(10.5)
        assert told([alert]) == [("hang", "firing", NOBODY, 7)]
        assert (alert.value, alert.baseline, alert.severity) == (10.5, 10.0, Severity.WARNING)
        assert "no rank has given a sign of life for 10 s (limit 10 s)" in alert.message
        assert node.watch.hung == {0, 1}
        assert await node.look(11.0) == []

        node.beat(0)
        assert await node.look(12.0) == []  # the other one is as silent as before
        node.beat(1)
        assert told(await node.look(13.0)) == [("hang", "resolved", NOBODY, 8)]
        assert node.watch.hung == set()

    play(scenario)


def test_post_mortem_is_written_and_handed_out(play):
    async def scenario(node):
        (node.folder / "node").mkdir()
        (node.folder / "node" / "agent.log").write_text("first\nlast\n")
        await node.look(0.0)
        (alert,) = await node.look(10.5)
        path = node.folder / "output" / "reports" / report_name(alert, "node")
        assert path.name == "post-mortem-hang-node-attempt1-step7"
        report = json.loads(path.with_suffix(".json").read_text())
        assert [one["rank"] for one in report["ranks"]] == [0, 1]
        assert report["log"] == ["first", "last"]
        assert report["verdict"]["text"] in path.with_suffix(".md").read_text()
        assert path.with_suffix(".md").stat().st_mode & 0o777 == 0o600
        plain = json.loads(json.dumps(node.watch.plain()))
        assert (plain["looked_into"], plain["verdict"]) == (True, report["verdict"])
        assert [parse_evidence(one).rank for one in plain["ranks"]] == [0, 1]

    play(scenario)


def test_before_anything_is_wrong_the_control_pages_are_handed_out(play):
    async def scenario(node):
        await node.look(0.0)
        plain = node.watch.plain()
        assert (plain["looked_into"], plain["verdict"]) == (False, None)
        assert [(one["phase"], one["life"], one["step"]) for one in plain["ranks"]] == [("step", "running", 7)] * 2

    play(scenario)


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [(Phase.CHECKPOINT, 100), (Phase.EVALUATION, 50), (Phase.SETUP, 200), (Phase.REPLAY, 100)],
)
def test_rank_that_is_known_to_be_busy_excuses_those_that_wait_for_it_until_its_own_limit(play, phase, limit_s):
    async def scenario(node):
        node.beat(0, phase=phase)
        assert await node.look(0.0) == []
        assert await node.look(limit_s) == []
        assert told(await node.look(limit_s + 1)) == [("hang", "firing", NOBODY, 8)]

    play(scenario)


@pytest.mark.parametrize("phase", [Phase.CLOSED, Phase.DETACHED])
def test_rank_that_does_not_beat_any_more_by_its_own_word_is_not_judged(play, phase):
    async def scenario(node):
        node.beat(0, 1, phase=phase)
        await node.look(0.0)
        assert await node.look(1e6) == []

    play(scenario)


def test_time_in_which_nobody_looked_does_not_count(play):
    async def scenario(node):
        await node.look(0.0)
        node.ranks.skip(100.0)
        assert await node.look(105.0) == []

    play(scenario)


def test_silence_before_and_after_a_time_in_which_nobody_looked_adds_up(play):
    """An agent that is stopped for 6 s every 2 s finds a hang as one that is not, only later."""

    async def scenario(node):
        now_s, told_at = 0.0, []
        for _ in range(20):
            told_at += [now_s for _ in await node.look(now_s)]
            now_s += 8.0
            node.ranks.skip(6.0)
        assert len(told_at) == 1

    play(scenario)


def test_usual_silences_raise_the_limit(play):
    async def scenario(node):
        now_s = 0.0
        for step in range(8, 12):
            await node.look(now_s)
            node.beat(0, 1, step=step)
            now_s += 9.0
        await node.look(now_s)
        assert await node.look(now_s + 44.0) == []
        assert told(await node.look(now_s + 46.0)) == [("hang", "firing", NOBODY, 11)]

    play(scenario)


def test_rank_that_was_only_slow_is_not_told(play, monkeypatch):
    async def scenario(node):
        async def climb(ladder, known):
            node.beat(1)
            node.ranks.look(10.6)
            return known

        monkeypatch.setattr(EvidenceLadder, "climb", climb)
        await node.look(0.0)
        assert await node.look(10.5) == []

    play(scenario)


def test_alert_that_no_rank_here_is_to_blame_for_has_no_rank(play, monkeypatch):
    async def scenario(node):
        async def climb(ladder, known):
            return known

        monkeypatch.setattr(EvidenceLadder, "climb", climb)  # nothing can be found out
        await node.look(0.0)
        assert told(await node.look(10.5)) == [("hang", "firing", NOBODY, 7)]

    play(scenario)


def test_rank_that_is_gone_without_a_word_is_dead_once_others_had_time_to_follow(play):
    async def scenario(node):
        await node.look(0.0)
        node.end(0)
        assert await node.look(1.0) == []
        assert not node.watch.idle
        assert await node.look(0.9 + SETTLE_S) == []
        (alert,) = await node.look(1.1 + SETTLE_S)
        assert told([alert]) == [("rank-dead", "firing", 0, 7)]
        assert "ended without closing the monitor" in alert.message
        assert node.watch.idle
        node.beat(1)
        assert await node.look(20.0) == []

    play(scenario)


def test_last_rank_is_not_waited_for(play):
    async def scenario(node):
        await node.look(0.0)
        node.end(0)
        node.end(1)
        await node.look(1.0)
        assert told(await node.look(1.1 + SETTLE_ALONE_S)) == [("rank-dead", "firing", 0, 7)]

    play(scenario)


def test_exception_that_a_rank_has_left_is_told(play):
    async def scenario(node):
        error = "Traceback …\nValueError: bad batch"
        node.records.on_event(node.headers[1], FailedEvent(step=8, message=error))
        node.beat(1, phase=Phase.FAILED)
        await node.look(0.0)
        node.end(1)
        await node.look(1.0)
        (alert,) = await node.look(5.0)
        assert alert.message == "rank-dead: rank 1 failed: ValueError: bad batch at step 8 (phase failed)"

    play(scenario)


def test_rank_that_closed_in_good_order_is_no_loss(play):
    async def scenario(node):
        node.beat(0, 1, phase=Phase.CLOSED)
        await node.look(0.0)
        node.end(0)
        node.end(1)
        assert await node.look(1.0) == []
        assert not node.watch.idle  # until it is seen by which status the processes end, or for a while
        assert await node.look(1.0 + EXIT_LIMIT_S) == []
        assert node.watch.idle
        assert node.watch.num_dead == 0

    play(scenario)


def test_dead_rank_is_back_with_the_next_attempt(play):
    async def scenario(node):
        await node.look(0.0)
        node.end(0)
        await node.look(1.0)
        assert told(await node.look(5.0)) == [("rank-dead", "firing", 0, 7)]
        node.start(0, attempt=2)
        node.beat(1)
        assert told(await node.look(9.0)) == [("rank-dead", "resolved", 0, 7)]
        node.end(0)
        await node.look(10.0)
        (again,) = await node.look(14.0)
        assert (again.rule, again.attempt) == ("rank-dead", 2)

    play(scenario)


def test_restarted_agent_ends_the_alerts_of_the_one_before(play):
    async def scenario(node):
        await node.look(0.0)
        (alert,) = await node.look(10.5)
        node.watch = node.make_watch([alert])
        assert await node.look(11.0) == []
        node.beat(0, 1)
        (over,) = await node.look(12.0)
        assert (over.id, over.state) == (alert.id, AlertState.RESOLVED)

    play(scenario)


def test_hang_ends_when_the_job_is_ended(play):
    async def scenario(node):
        await node.look(0.0)
        await node.look(10.5)
        node.end(0)
        node.end(1)
        (over,) = await node.look(11.0)
        assert (over.rule, over.state) == ("hang", AlertState.RESOLVED)
        assert "the ranks have gone" in over.message

    play(scenario)


class Shown:
    """Stands in for the exposition."""

    def __init__(self, watch):
        self.values = {}
        watch.show(self)

    def set(self, name, value, *, rank=None):
        self.values[name.removeprefix("trainermon_"), rank] = value


def test_metrics_tell_who_hangs_and_who_was_lost(play):
    async def scenario(node):
        def shown():
            values = Shown(node.watch).values
            hung = {rank: value for (name, rank), value in values.items() if name == "rank_hung"}
            return hung, values["lost_ranks_total", None], values["detached_ranks_total", None]

        await node.look(0.0)
        assert shown() == ({0: False, 1: False}, 0, 0)
        await node.look(10.5)
        assert shown() == ({0: True, 1: True}, 0, 0)
        node.beat(1, phase=Phase.DETACHED)
        node.end(0)
        await node.look(11.0)
        assert shown() == ({1: False}, 1, 1)

    play(scenario)


def test_switched_off_it_says_nothing(play):
    async def scenario(node):
        await node.look(0.0)
        node.end(0)
        assert await node.look(math.inf) == []
        assert node.watch.idle

    play(scenario, settings=HangConfig(enabled=False))


def test_rank_that_died_before_anybody_looked_is_told(play):
    """A slow machine starts an agent in seconds, and a rank may be gone by then."""

    async def scenario(node):
        node.end(1)
        assert told(await node.look(0.0)) == []
        (alert,) = await node.look(SETTLE_S + 0.1)
        assert told([alert]) == [("rank-dead", "firing", 1, 7)]
        assert "exit status not known here" in alert.message
        assert told(await node.look(SETTLE_S + 6.0)) == []

    play(scenario)


def test_nobody_is_blamed_before_what_the_dead_wrote_last_was_read(play):
    """An agent that starts late finds all ranks dead, and their journals before it."""

    async def scenario(node):
        node.has_read_all = False
        node.end(0)
        node.end(1)
        await node.look(0.0)
        assert await node.look(SETTLE_ALONE_S + 5.0) == []
        assert not node.watch.idle
        error = "RuntimeError: Connection reset by peer"
        node.records.on_event(node.headers[0], FailedEvent(step=7, message=error))
        node.has_read_all = True
        assert told(await node.look(SETTLE_ALONE_S + 6.0)) == [("rank-dead", "firing", 1, 7)]

    play(scenario)


def test_nobody_is_blamed_where_nobody_saw_who_died_first(play):
    async def scenario(node):
        node.end(0)
        node.end(1)
        await node.look(0.0)
        (alert,) = await node.look(SETTLE_ALONE_S + 0.1)
        assert "ended before anybody looked" in alert.message
        assert node.watch.plain()["verdict"]["culprits"] == []

    play(scenario)


def test_the_one_that_was_seen_to_die_first_is_named_though_no_status_is_known(play):
    async def scenario(node):
        await node.look(0.0)
        node.end(1)
        await node.look(1.0)
        node.end(0)
        await node.look(2.0)
        assert told(await node.look(6.0)) == [("rank-dead", "firing", 1, 7)]

    play(scenario)


def test_journal_that_never_ends_does_not_hold_up_the_verdict_for_good(play):
    async def scenario(node):
        node.has_read_all = False
        await node.look(0.0)
        node.end(1)
        await node.look(1.0)
        assert await node.look(0.9 + READ_LIMIT_S) == []
        assert told(await node.look(1.1 + READ_LIMIT_S)) == [("rank-dead", "firing", 1, 7)]

    play(scenario)


def test_rank_that_died_before_anybody_looked_and_was_not_collected_yet_tells_how(play):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    async def scenario(node):
        node.pages[1]._pid = child.pid
        node.beat(1)
        node.end(1)
        await node.look(0.0)
        (alert,) = await node.look(SETTLE_S + 0.1)
        assert "rank 1 was killed by SIGKILL" in alert.message

    play(scenario)
    child.wait()


@pytest.mark.parametrize("how", ["closed", "of an earlier attempt", "told of already"])
def test_rank_that_is_gone_for_good_reason_is_not_told(play, how):
    async def scenario(node):
        if how == "closed":
            node.beat(1, phase=Phase.CLOSED)
        elif how == "of an earlier attempt":
            node.headers[0] = dataclasses.replace(node.headers[0], attempt=2)
        else:
            node.end(1)
            await node.look(0.0)
            (alert,) = await node.look(SETTLE_S + 0.1)
            node.watch = node.make_watch([alert])
        node.end(1)
        for now_s in (SETTLE_S + 0.5, 2 * SETTLE_S + 1):
            assert told(await node.look(now_s)) == []

    play(scenario)
