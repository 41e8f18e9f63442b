"""What the database merges at once is what the blocks give one by one, and a large run is shown before all is read."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.agent.runs.test_stored_run import answers, as_an_agent
from tests.dashboards.stored_runs import StoredCurves, store_run
from trainermon.agent.runs import stored_history
from trainermon.agent.runs.facts import RunFacts
from trainermon.agent.runs.model_order import ModelOrder
from trainermon.agent.runs.stored_history import StoredHistory
from trainermon.agent.runs.stored_run import StoredRun
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock
from trainermon.exporters.store.blocks import read_segment_blocks
from trainermon.exporters.store.segments import cover, read_metadata
from trainermon.exporters.store.store import SegmentWriter
from trainermon.exporters.views import LINES, RANK_QUANTITIES, RunHistory

RANKS = 6
SERIES = (
    SeriesKey(Kind.LOSS, "loss", micro_step=0),
    SeriesKey(Kind.LOSS, "loss", micro_step=1),
    SeriesKey(Kind.STEP, "duration_seconds"),
    SeriesKey(Kind.STEP, "learning_rate", "group.0"),
    SeriesKey(Kind.STEP, "learning_rate", "group.1"),
    SeriesKey(Kind.STEP, "tokens_per_second"),
    SeriesKey(Kind.COMM, "all_reduce", "wait_seconds", call=0),
    SeriesKey(Kind.COMM, "all_reduce", "wait_seconds", call=1),
    SeriesKey(Kind.COMM, "all_reduce", "pre.0", call=0),
    SeriesKey(Kind.FEATURE, "h.0", "attention_entropy"),
    SeriesKey(Kind.ACTV, "h.0", "output.0", micro_step=0),
    SeriesKey(Kind.ACTV, "h.0", "output.0", micro_step=1),
    SeriesKey(Kind.GRAD_REDUCED, "h.0.weight"),
    SeriesKey(Kind.GRAD_REDUCED, "h.1.weight", stage=1),
    SeriesKey(Kind.CHECKSUM, "h.0.weight"),
)


def rank_header(rank: int, attempt: int) -> Header:
    """Return a rank of two pipeline stages; only some copies count, and a loss scale is on the gradients."""
    place = Coordinates(rank=rank, world_size=RANKS, local_world_size=2, dp=rank % 3, pp=rank // 3, pp_size=2)
    placements = tuple(Placement(dtype="float32", shape=(8,), in_global_norm=rank % 3 == 0, scale=4.0) for _ in SERIES)
    made = Header(run_id="run", attempt=attempt, coordinates=place, host="node", pid=1, started_s=0.0)
    return dataclasses.replace(made, series=SERIES, placements=placements)


def block(random: np.random.Generator, step: int, rank: int) -> StatBlock:
    """Return a block of some series; numbers whose sums are exact in any order, some of them of no finite element."""
    series = np.flatnonzero(random.random(len(SERIES)) < 0.9).astype(np.uint32)
    size = len(series)
    count = random.integers(1, 100, size).astype(np.float64)
    low, high = -random.integers(0, 64, size) / 8, random.integers(0, 64, size) / 8
    values = np.stack([count, low, high, high * 4, high * high * 16, count // 2, 0 * count, 0 * count])
    lost = random.random(size) < 0.02
    values[6 + random.integers(0, 2), lost] = count[lost]
    values[1:5, lost] = [[np.inf], [-np.inf], [0.0], [0.0]]
    values[:, random.random(size) < 0.02] = np.array([[0, np.inf, -np.inf, 0, 0, 0, 0, 0]]).T
    return StatBlock(step=step, time_s=1000.0 + step + rank / 8, series=series, values=values)


def store_messy_run(run: Path, *, seed: int) -> None:
    """Write a run of three nodes that was started three times, on fewer ranks in the end; a rank misses steps."""
    random = np.random.default_rng(seed)
    for node in range(3):
        folder = run / "nodes" / f"node{node}" / "segments"
        folder.mkdir(parents=True)
        writer = SegmentWriter(folder)
        for attempt, steps in enumerate((range(90), range(60, 150), range(140, 200)), start=1):
            ranks = [rank for rank in (2 * node, 2 * node + 1) if attempt < 3 or rank != 5]
            for step, rank in itertools.product(steps, ranks):
                if random.random() < 0.97:
                    writer.add(rank_header(rank, attempt), SERIES, block(random, step, rank))
                if random.random() < 0.02:
                    writer.commit({})
        writer.commit({})


def by_blocks(run: Path) -> RunHistory:
    """Return the history to which all blocks were added, one after the other."""

    def of_node(folder: Path) -> Iterator[tuple[Header, StatBlock]]:
        for segment in cover(folder):
            yield from read_segment_blocks(segment.path, read_metadata(segment.path))

    history = RunHistory(order=ModelOrder(run))
    blocks = heapq.merge(
        *map(of_node, sorted(run.glob("nodes/*/segments"))),
        key=lambda entry: (entry[0].attempt, entry[1].step, entry[0].coordinates.rank),
    )
    for _, of_step in itertools.groupby(blocks, lambda entry: (entry[0].attempt, entry[1].step)):
        step = list(of_step)
        for made, _ in step:
            history.start(made)
        for made, told in step:
            history.add(made, made.series, told)
    return history


def segments_of(run: Path) -> list[list[Path]]:
    return [[segment.path for segment in cover(folder)] for folder in sorted(run.glob("nodes/*/segments"))]


def assert_same_answers(found: RunHistory, expected: RunHistory) -> None:
    assert found.lines(list(LINES)) == expected.lines(list(LINES))
    assert found.heatmaps() == expected.heatmaps()
    assert found.rank_quantities() == expected.rank_quantities()
    assert found.latest == expected.latest
    for quantity in RANK_QUANTITIES:
        assert found.ranks(quantity, 1000) == expected.ranks(quantity, 1000), quantity
    for entry in expected.heatmaps():
        for statistic in entry["statistics"]:
            what = (entry["kind"], statistic, 1000)
            assert found.heatmap(*what) == expected.heatmap(*what), what


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_ended", [False, True])
def test_merged_ranks_give_the_answers_of_their_blocks(tmp_path: Path, seed: int, has_ended: bool) -> None:
    store_messy_run(tmp_path, seed=seed)
    read, expected = StoredHistory(tmp_path), by_blocks(tmp_path)

    read.fill(segments_of(tmp_path), may_preview=False)
    if has_ended:
        read.history.end_all()
        expected.end_all()

    assert_same_answers(read.history, expected)


def test_what_comes_later_is_joined_to_the_steps_that_are_open(tmp_path: Path) -> None:
    store_messy_run(tmp_path, seed=3)
    read = StoredHistory(tmp_path)
    nodes = segments_of(tmp_path)

    read.fill([of_node[:-1] for of_node in nodes], may_preview=False)
    for step in read.read_more([of_node[-1:] for of_node in nodes]):
        read.add(step)

    history = RunHistory(order=ModelOrder(tmp_path))
    for part in (slice(None, -1), slice(-1, None)):
        for step_of_ranks in _blocks_by_step([of_node[part] for of_node in nodes]):
            for made, _ in step_of_ranks:
                history.start(made)
            for made, told in step_of_ranks:
                history.add(made, made.series, told)
    assert_same_answers(read.history, history)


def _blocks_by_step(nodes: list[list[Path]]) -> Iterator[list[tuple[Header, StatBlock]]]:
    blocks = [
        entry for of_node in nodes for path in of_node for entry in read_segment_blocks(path, read_metadata(path))
    ]
    blocks.sort(key=lambda entry: (entry[0].attempt, entry[1].step, entry[0].coordinates.rank))
    for _, of_step in itertools.groupby(blocks, lambda entry: (entry[0].attempt, entry[1].step)):
        yield list(of_step)


@pytest.mark.parametrize("preview_rows", [200, 1])
def test_a_large_run_is_shown_by_its_newest_steps_until_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preview_rows: int
) -> None:
    monkeypatch.setattr(stored_history, "PREVIEW_ROWS", preview_rows)
    curves = StoredCurves.made(40, seed=1)
    store_run(tmp_path / "run", curves, segments=4)
    expected = as_an_agent(curves, world_size=2)

    async def serve() -> None:
        with ThreadPoolExecutor(1) as executor:
            run = StoredRun(
                tmp_path / "run", executor=executor, facts=lambda: RunFacts(key="", name="", path="", state="finished")
            )
            await run.refresh(max_age_s=0)
            assert run.lines(["loss"])["steps"] == list(range(30, 40))
            assert bool(run.run()["heatmaps"]) == (preview_rows > 100)
            assert "newest steps only" in run.run()["left_out"]
            stream = run.feed.subscribe()
            assert stream is not None
            await anext(stream)
            await run.complete()
            assert (await anext(stream)).startswith(b"event: reload\n")
            assert run.run()["left_out"] is None
            assert (await answers(run))["lines"] == expected.lines(list(LINES))
            assert run.heatmap("grad_reduced", "rms", 1000) == expected.heatmap("grad_reduced", "rms", 1000)
            await run.close()

    asyncio.run(serve())
