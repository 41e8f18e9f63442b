"""Plain training, DistributedDataParallel and ZeroRedundancyOptimizer, held against float64 copies of the training."""

from pathlib import Path

import pytest

from tests.frameworks import torch_truth as truth
from tests.frameworks.launches import Launches, jobs
from tests.frameworks.plain.worker import VARIANTS

pytestmark = pytest.mark.distributed

FP32, BF16 = 1e-5, 0.05
PLAIN = [name for name in VARIANTS if name.startswith("plain")]
WRAPPED = [name for name in VARIANTS if name not in PLAIN]
QUICK = {1: [*PLAIN, "ddp"], 2: WRAPPED, 4: ["ddp", "ddp-bf16", "zero"]}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    return Launches(Path(__file__).with_name("worker.py"), request, tmp_path_factory)


@pytest.mark.parametrize(
    ("size", "name"), [job for job in jobs(VARIANTS, QUICK) if job.values[0] == 1 or job.values[1] in WRAPPED]
)
def test_every_statistic_is_that_of_the_reference(trained, size, name):
    job = truth.Job(trained(size), name, size)
    tolerance = BF16 if "bf16" in name else FP32

    truth.assert_monitor_changed_nothing(job)
    truth.assert_rows_merge_to_whole_tensors(job)
    truth.assert_histograms_add_up_to_those_of_whole_tensors(job)
    truth.assert_signs_are_those_of_whole_gradients(job)
    truth.assert_every_row_is_its_slice(job)
    truth.assert_norm_is_the_frameworks_own(job, rel=0.01 if "bf16" in name else 1e-6)  # torch's is a bf16 number
    truth.assert_reduced_is_the_unsharded_reference(job, rel=tolerance)
    truth.assert_unreduced_is_the_ranks_own(job, rel=tolerance, accumulated=name != "ddp-every")
    truth.assert_micro_gradients_are_the_ranks_own(job, rel=tolerance)
