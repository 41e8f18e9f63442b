"""A turn of the agent is bounded, whatever there is to follow."""

from __future__ import annotations

import urllib.request

from tests.agent.nodes import wait_for
from tests.agent.test_daemon import follow_in_this_process
from tests.agent.test_follower import KEYS, ROW_BYTES, LaterExecutor, Recorder, block, open_journal
from tests.agent.test_follower import run_dir as run_dir
from tests.agent.test_follower import segments as segments
from tests.agent.test_follower import spool as spool
from trainermon.agent import pipeline as pipeline_module
from trainermon.agent.pipeline import TURN_S, RecordPipeline
from trainermon.exporters.store.store import open_run


class WorkClock:
    """Goes on by a millisecond whenever somebody looks at it: time is counted in work."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 0.001
        return self.now_s


def test_a_turn_is_bounded_in_time_and_ranks_stay_together_however_large_the_backlog(spool, segments):
    num_ranks, num_steps = 64, 20
    for rank in range(num_ranks):
        journal = open_journal(spool, rank)
        for step in range(num_steps):
            journal.append_block(block(step))
    recorder = Recorder()
    pipeline = RecordPipeline(spool, segments, executor=LaterExecutor(), consumers=[recorder], clock=WorkClock())

    turns = []
    while sum(turns) < num_ranks * (num_steps + 1):
        turns.append(pipeline.step())
        reached = [len(recorder.steps(rank)) for rank in range(num_ranks)]
        assert max(reached) - min(reached) <= 1

    assert max(turns) <= 1000 * TURN_S + 2
    assert reached == [num_steps] * num_ranks


def test_a_store_that_is_behind_has_half_of_each_turn(spool, segments):
    journal = open_journal(spool)
    for step in range(400):
        journal.append_block(block(step))
    executor = LaterExecutor()
    pipeline = RecordPipeline(
        spool, segments, executor=executor, flush_bytes=40 * len(KEYS) * ROW_BYTES, clock=WorkClock()
    )
    seen = [pipeline.step() for _ in range(4)]  # the first commit hangs
    assert max(seen) <= 1000 * TURN_S + 2

    while pipeline.step():
        pass
    done = pipeline.flush()
    while not done.done():
        if executor.jobs:
            executor.run()
        pipeline.step()

    with open_run(segments.parents[2]) as connection:
        assert connection.execute("SELECT count(DISTINCT step), count(*) FROM all_stats").fetchall() == [(400, 1600)]


def test_a_page_answers_while_a_backlog_of_many_ranks_is_followed(make_run, monkeypatch):
    num_ranks, num_steps = 64, 6
    run = make_run(world_size=num_ranks)
    for rank in range(num_ranks):
        journal = open_journal(run.spool, rank)
        for step in range(num_steps):
            journal.append_block(block(step))
        journal.close()
    monkeypatch.setattr(pipeline_module, "TURN_S", 0.005)
    told, turns, step_of = [], [], RecordPipeline.step

    def counted(pipeline):
        told.append(run.status().get("url"))
        turns.append(step_of(pipeline))
        return turns[-1]

    monkeypatch.setattr(RecordPipeline, "step", counted)

    def talk(agent):
        url = wait_for(lambda: run.status().get("url"), "an address")
        began = len(turns)
        with urllib.request.urlopen(f"{url}healthz", timeout=60) as answer:
            assert answer.status == 200
        waited, left = len(turns) - began, sum(turns) < num_ranks * num_steps
        wait_for(lambda: agent.run and sum(turns) >= num_ranks * (num_steps + 2), "all records")
        return waited, left

    waited, left = follow_in_this_process(run, talk)

    assert told[0]  # before the first turn
    assert left
    assert waited <= 30
