"""What the ranks of a `torch_job` wrote, merged by the placements they gave, and held against the truth."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.journal_rows import RankJournal
from tests.reference import assert_equal
from tests.sign_truth import assert_signs_are_of
from tests.statistics.histogram_truth import numpy_histogram
from tests.statistics.numpy_moments import elements_of
from trainermon.analysis.gradients.runs import open_gradients
from trainermon.core.values import NO_ELEMENTS, Kind

HELD = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
COUNTED = (Kind.GRAD_REDUCED, Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG)
MODEL_AXES = {"tp", "ep"}


class PlacedJournal(RankJournal):
    """A rank's journal, with the placement of every series."""

    def __init__(self, spool, rank):
        self.placements = {}
        super().__init__(spool, rank)

    def _add(self, record):
        known = len(self.keys)
        super()._add(record)
        told = getattr(record, "header", record)
        if len(self.keys) > known:
            self.placements |= dict(zip(self.keys[known:], told.placements, strict=True))


class Job:
    """All ranks of one variant."""

    def __init__(self, folder, name, world_size):
        self.journals = [PlacedJournal(folder / "spool" / name, rank) for rank in range(world_size)]
        self.told = [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(world_size)]
        self.steps = range(len(self.told[0]["steps"]))
        self.run_directory = folder / "output" / name

    def rows(self, step, kind, micro_step=None):
        """Yield (rank, name, row, placement)."""
        for rank, journal in enumerate(self.journals):
            for key, row in journal.rows[step].items():
                if key.kind == kind and key.micro_step == micro_step:
                    yield rank, key.name, row, journal.placements[key]

    def merged(self, step, kind, micro_step=None):
        """Return, by name, the moments of the whole tensor: what counts in a global norm, merged over the ranks."""
        whole = {}
        for _, name, row, placement in self.rows(step, kind, micro_step):
            if placement.in_global_norm:
                whole[name] = whole.get(name, NO_ELEMENTS).merge(row)
        return whole


def assert_monitor_changed_nothing(job):
    assert [told["identical"] for told in job.told] == [True] * len(job.told)
    for journal in job.journals:
        assert [event for event in journal.events if event["type"] == "detached"] == []


def assert_rows_merge_to_whole_tensors(job):
    for step in job.steps:
        for kind in HELD:
            truth = job.told[0]["steps"][step][str(kind)]
            merged = job.merged(step, kind)
            assert merged.keys() == truth.keys(), kind
            for name, row in merged.items():
                assert row.count == truth[name].numel(), (kind, name)
                assert_equal(row, truth[name])


def assert_histograms_add_up_to_those_of_whole_tensors(job):
    for step, kind in itertools.product(job.steps, COUNTED):
        truth, added = job.told[0]["steps"][step][str(kind)], {}
        for rank, name, row, placement in job.rows(step, kind):
            (key,) = [key for key in job.journals[rank].rows[step] if (key.kind, key.name) == (kind, name)]
            counts = np.array(job.journals[rank].histograms[step][key])
            assert counts.sum() == row.count
            if placement.in_global_norm:
                added[name] = added.get(name, 0) + counts
        assert added.keys() == truth.keys(), kind
        for name, counts in added.items():
            np.testing.assert_array_equal(counts, numpy_histogram(elements_of(truth[name])), f"{kind} {name}")


def assert_every_row_is_its_slice(job, *, sharded_dim=lambda name, shape: 0):
    for step in job.steps:
        for kind in HELD:
            truth = job.told[0]["steps"][step][str(kind)]
            for _, name, row, placement in job.rows(step, kind):
                assert placement.shape == tuple(truth[name].shape)
                if MODEL_AXES.isdisjoint(placement.partitioned_over):
                    flat = truth[name].movedim(sharded_dim(name, placement.shape), 0).flatten()
                    end = placement.offset + (
                        math.prod(placement.shape) if placement.length is None else placement.length
                    )
                    assert_equal(row, flat[placement.offset : end])


def assert_signs_are_those_of_whole_gradients(job):
    found = open_gradients(job.run_directory).steps
    assert sorted(found) == list(job.steps)
    for step in job.steps:
        ranks = [read() for read in found[step].values()]
        assert_signs_are_of(ranks, job.told[0]["steps"][step]["grad_reduced"])


def assert_norm_is_the_frameworks_own(job, *, rel=1e-6):
    for step in job.steps:
        squares = sum(row.sum_sq for row in job.merged(step, Kind.GRAD_REDUCED).values())
        assert math.sqrt(squares) == pytest.approx(job.told[0]["steps"][step]["norm"], rel=rel)


def assert_all_close(rows, truth, *, rel):
    """Fail unless each (name, row) is that of a tensor of `truth`, computed in a precision of `rel`.

    Rounding is that of the terms, not of their sum: where those cancel, the error is relative to what gradients usually
    are in this step.
    """
    usual = math.sqrt(sum(float(t.square().sum()) for t in truth.values()) / sum(t.numel() for t in truth.values()))
    for name, row in rows:
        tensor, floor = truth[name], rel * usual
        count, largest = tensor.numel(), float(tensor.abs().max())
        assert (row.count, row.nonfinite) == (count, 0)
        assert row.norm == pytest.approx(float(tensor.norm()), rel=rel, abs=floor * math.sqrt(count)), name
        assert row.min == pytest.approx(float(tensor.min()), abs=rel * largest + floor), name
        assert row.max == pytest.approx(float(tensor.max()), abs=rel * largest + floor), name
        assert row.sum == pytest.approx(float(tensor.sum()), abs=rel * float(tensor.abs().sum()) + floor * count), name


def assert_reduced_is_the_unsharded_reference(job, *, rel):
    for step in job.steps:
        truth = job.told[0]["steps"][step]["reference"]
        merged = job.merged(step, Kind.GRAD_REDUCED)
        assert merged.keys() == truth.keys()
        assert_all_close(merged.items(), truth, rel=rel)


def assert_unreduced_is_the_ranks_own(job, *, rel, accumulated=True):
    """Before reduction each rank has the gradient of its own batches, whole; tensor-parallel parts are counted only."""
    for step in job.steps:
        found = list(job.rows(step, Kind.GRAD_UNREDUCED))
        assert bool(found) is accumulated
        if accumulated:
            _assert_own(job, found, [told["steps"][step]["unreduced"] for told in job.told], rel=rel)


def assert_micro_gradients_are_the_ranks_own(job, *, rel):
    for step in job.steps:
        for micro, _ in enumerate(job.told[0]["steps"][step]["micro"]):
            found = list(job.rows(step, Kind.GRAD_UNREDUCED, micro))
            _assert_own(job, found, [told["steps"][step]["micro"][micro] for told in job.told], rel=rel)


def _assert_own(job, found, truths, *, rel):
    for rank, truth in enumerate(truths):
        mine = [(name, row, placement) for owner, name, row, placement in found if owner == rank]
        assert {name for name, _, _ in mine} == truth.keys()
        whole = [(name, row) for name, row, placement in mine if not placement.partitioned_over]
        assert_all_close(whole, truth, rel=rel)
    counts = dict.fromkeys(truths[0], 0)
    for _, name, row, placement in found:
        counts[name] += row.count * placement.in_global_norm
    assert counts == {name: gradient.numel() for name, gradient in truths[0].items()}
