"""A round has at most one block of each rank, and ends when no more of it is likely to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainermon.agent.consumers import RecordConsumer
from trainermon.agent.pipeline import ROUND_S, RecordPipeline
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock

KEYS = (SeriesKey(Kind.LOSS, "loss"),)


class Rounds(RecordConsumer):
    """Keeps which rank showed which step in each round, and in the last one that has not ended."""

    def __init__(self) -> None:
        self.ended: list[list[tuple[int, int]]] = []
        self.begun: list[tuple[int, int]] = []

    def on_block(self, header: Header, keys: Sequence[SeriesKey], block: StatBlock) -> None:
        self.begun.append((header.coordinates.rank, block.step))

    def end_round(self) -> None:
        self.ended.append(self.begun)
        self.begun = []


class Never(Executor):
    """Takes jobs and never runs them."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        return Future()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Job:
    """Two ranks and the pipeline that follows them."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.rounds = Clock(), Rounds()
        spool = folder / "spool"
        spool.mkdir(mode=0o700)
        self._journals = [self._open(spool, rank) for rank in (0, 1)]
        self.pipeline = RecordPipeline(
            spool, folder / "segments", executor=Never(), consumers=[self.rounds], clock=self.clock
        )
        self.pipeline.step()

    @staticmethod
    def _open(spool: Path, rank: int) -> JournalWriter:
        place = Coordinates(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        header = Header(
            run_id="r", attempt=0, coordinates=place, host="n", pid=1, started_s=0.0, series=KEYS, placements=(None,)
        )
        return JournalWriter(spool, header)

    def write(self, rank: int, step: int) -> None:
        block = StatBlock(step=step, time_s=0.0, series=np.zeros(1, np.uint32), values=np.ones((8, 1)))
        self._journals[rank].append_block(block)

    def close(self) -> None:
        self.pipeline.close()
        for journal in self._journals:
            journal.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def test_ranks_that_end_a_step_in_different_turns_share_a_round(job: Job) -> None:
    job.write(0, 0)
    job.pipeline.step()
    job.write(1, 0)
    job.pipeline.step()
    assert job.rounds.ended == []

    job.pipeline.step()
    assert job.rounds.ended == [[(0, 0), (1, 0)]]

    job.pipeline.step()
    assert len(job.rounds.ended) == 1, "a round without a block is none"


def test_the_next_step_of_a_rank_begins_another_round(job: Job) -> None:
    for step in range(2):
        job.write(0, step)
        job.write(1, step)
    job.pipeline.step()
    job.pipeline.step()

    assert [sorted(shown) for shown in job.rounds.ended] == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_a_round_does_not_wait_for_ever_while_others_write(job: Job) -> None:
    job.write(0, 0)
    job.clock.now_s += ROUND_S
    job.pipeline.step()

    assert job.rounds.ended == [[(0, 0)]]


def test_what_is_about_to_be_stored_has_been_looked_at(job: Job) -> None:
    job.write(0, 0)
    job.pipeline.flush()
    job.pipeline.step()

    assert job.rounds.ended == [[(0, 0)]]
