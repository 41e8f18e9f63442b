"""What an agent folds of its ranks' gradients, and that the laws say of the folds what they say of all ranks' rows."""

import dataclasses
import functools

import numpy as np
import pytest

from trainermon.agent.across_nodes.folded_rows import EVERY_STEPS, MAX_STEPS, FoldedRows
from trainermon.agent.controller import laws
from trainermon.agent.controller.laws import JUDGED, _AttemptLaws, _told
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, Placement, SeriesKey, StatBlock

NAMES = [f"layers.{number}.{part}" for number in range(6) for part in ("weight", "bias")]
RANKS = 4


def moments(values):
    values = np.asarray(values, np.float64)
    return [values.size, values.min(), values.max(), values.sum(), (values**2).sum(), (values == 0).sum(), 0, 0]


def header_of(rank, placement, *, attempt=0):
    series = [SeriesKey(kind, name) for kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED) for name in NAMES]
    return Header(
        run_id="run",
        host="node",
        pid=1,
        started_s=0.0,
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=RANKS, dp=rank, dp_size=RANKS),
        series=tuple(series),
        placements=(dataclasses.replace(placement, partitioned_over=(), length=None),) * len(NAMES)
        + (placement,) * len(NAMES),
    )


def block_of(given, reduced, *, step=EVERY_STEPS):
    rows = np.array([moments(values) for values in [*given, *reduced]]).T.copy()
    return StatBlock(step=step, time_s=0.0, series=np.arange(rows.shape[1], dtype=np.uint32), values=rows)


@functools.cache
def gradients():
    """The gradients of all ranks before their reduction, `[rank][parameter]`."""
    draw = np.random.default_rng(0)
    return [[draw.normal(size=24) * 2.0 ** (number % 4) for number in range(len(NAMES))] for _ in range(RANKS)]


def means():
    return [sum(rank[number] for rank in gradients()) / RANKS for number in range(len(NAMES))]


COPIES = Placement(dtype="float32", shape=(24,), replicated_over=("dp",))
PARTS = Placement(dtype="float32", shape=(24,), length=6, partitioned_over=("dp",))


def broken_by(placement, given, reduced_of):
    """Return the laws that are broken where rank r has `given[r]` and gets `reduced_of(r)`, told by two agents."""
    agents = [FoldedRows(), FoldedRows()]
    for rank in range(RANKS):
        agents[rank // 2].on_block(header_of(rank, placement), (), block_of(given[rank], reduced_of(rank)))
    told = [(None, _told(agent.rows()["steps"][str(EVERY_STEPS)])) for agent in agents]
    judged = _AttemptLaws(0)
    assert judged.judge("run", EVERY_STEPS, told) >= 2
    return {name: found.ranks for name, found in judged.broken.items()}


def part_of(values, rank):
    return [each[6 * rank : 6 * rank + 6] for each in values]


def test_a_sound_reduction_breaks_no_law_whether_copies_or_parts_come_of_it():
    assert broken_by(COPIES, gradients(), lambda rank: means()) == {}
    assert broken_by(PARTS, gradients(), lambda rank: part_of(means(), rank)) == {}


@pytest.mark.parametrize("lost", range(len(NAMES)))
def test_one_parameter_that_is_not_reduced_breaks_the_law_on_all_ranks(lost):
    def own(rank):
        return [gradients()[0][number] if number == lost else mean for number, mean in enumerate(means())]

    assert broken_by(COPIES, gradients(), own)["linear"] == (0, 1, 2, 3)
    assert broken_by(PARTS, gradients(), lambda rank: part_of(own(rank), rank))["linear"] == (0, 1, 2, 3)


def test_a_rank_of_another_node_whose_copy_differs_is_named():
    def odd(rank):
        return [mean * (1.01 if rank == 3 else 1.0) for mean in means()]

    assert broken_by(COPIES, gradients(), odd)["equal-gradients"] == (3,)


def test_ranks_of_different_nodes_with_the_same_data_are_named():
    same = [*gradients()[:3], gradients()[0]]
    reduced = [sum(rank[number] for rank in same) / RANKS for number in range(len(NAMES))]

    assert broken_by(COPIES, same, lambda rank: reduced) == {"own-gradients": (0, 3)}


def test_what_an_agent_keeps_is_bounded_and_of_the_newest_attempt():
    kept = FoldedRows()
    for step in range(1, 1000):
        kept.on_block(header_of(0, COPIES), (), block_of(gradients()[0], means(), step=step))
    steps = [int(step) for step in kept.rows(after=900)["steps"]]
    assert steps == [920, 940, 960, 980]
    assert len(kept.rows()["steps"]) == MAX_STEPS

    kept.on_block(header_of(0, COPIES, attempt=1), (), block_of(gradients()[0], means(), step=20))
    kept.on_block(header_of(1, COPIES), (), block_of(gradients()[1], means(), step=40))
    assert (kept.rows()["attempt"], list(kept.rows()["steps"])) == (1, ["20"])


def test_of_gradients_that_are_not_finite_nothing_is_told():
    kept = FoldedRows()
    bad = block_of(gradients()[0], means())
    bad.values[4, 3] = np.inf
    kept.on_block(header_of(0, COPIES), (), bad)
    assert kept.rows()["steps"] == {}


def test_laws_that_hold_for_sums_are_judged():
    assert {"linear", "equal-gradients", "own-gradients"} <= set(JUDGED)
    assert laws.FEWEST > 1
