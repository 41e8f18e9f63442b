"""FSDP1, FSDP2, hybrid sharding and tensor-parallel DTensors, held against unsharded copies of the same training."""

from pathlib import Path

import pytest

from tests.frameworks import torch_truth as truth
from tests.frameworks.fsdp.worker import VARIANTS
from tests.frameworks.launches import Launches, jobs

pytestmark = pytest.mark.distributed

FP32, BF16 = 1e-5, 0.05
SLOW: tuple[str, ...] = ("fsdp2-bf16-reduce", "fsdp2-compiled", "fsdp1-none", "fsdp1-checkpoint")
SLOW += ("fsdp1-bf16", "fsdp1-grad-op", "fsdp1-hybrid-flat")  # each option of theirs is in another variant as well
QUICK = {
    1: ["fsdp2-bf16", "fsdp1-full", "fsdp1-full-flat"],
    2: [name for name in VARIANTS if name not in SLOW],
    4: ["fsdp2", "fsdp2-hsdp", "fsdp2-tp", "fsdp1-full", "fsdp1-hybrid", "fsdp1-grad-op-flat-bf16"],
}
EVERY_MICRO_STEP = ("fsdp2-every", "fsdp1-every")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    return Launches(Path(__file__).with_name("worker.py"), request, tmp_path_factory)


@pytest.mark.parametrize(("size", "name"), jobs(VARIANTS, QUICK))
def test_every_statistic_is_that_of_the_unsharded_training(trained, size, name):
    job = truth.Job(trained(size), name, size)
    tolerance = BF16 if "bf16" in name or name == "fsdp2-checkpoint" else FP32

    truth.assert_monitor_changed_nothing(job)
    truth.assert_rows_merge_to_whole_tensors(job)
    truth.assert_histograms_add_up_to_those_of_whole_tensors(job)
    truth.assert_signs_are_those_of_whole_gradients(job)
    truth.assert_every_row_is_its_slice(job, sharded_dim=columns(size) if name == "fsdp2-columns" else first)
    truth.assert_norm_is_the_frameworks_own(job)
    truth.assert_reduced_is_the_unsharded_reference(job, rel=tolerance)
    if name != "tp-only":
        truth.assert_unreduced_is_the_ranks_own(job, rel=tolerance, accumulated=name not in EVERY_MICRO_STEP)
    truth.assert_micro_gradients_are_the_ranks_own(job, rel=tolerance)


def first(_name, _shape):
    return 0


def columns(size):
    """Return which dimension the variant `fsdp2-columns` shards."""
    return lambda _name, shape: int(len(shape) == 2 and shape[1] % size == 0)
