"""ZeRO on one, two and four ranks: every statistic against float64 training, DeepSpeed's accessors and its norm."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
STAGES, DTYPES = (0, 1, 2, 3), ("fp32", "bf16", "fp16")


def case(stage, dtype="bf16", gas=2, **options):
    return {"stage": stage, "dtype": dtype, "gas": gas, **options}


SMALL_BUCKETS = {"overlap_comm": True, "reduce_bucket_size": 40}
ALL_TRUTH = [
    *(case(stage, dtype, gas) for stage in STAGES for dtype in DTYPES for gas in (1, 2)),
    *(case(stage, dtype, gas, offload=True) for stage in (1, 2, 3) for dtype in DTYPES for gas in (1, 2)),
    *(case(stage, accumulate_in_fp32=True) for stage in (1, 2, 3)),
    *(case(1, dtype, 1, accumulate_in_fp32=True) for dtype in ("bf16", "fp16")),
    *(case(stage, zero={"round_robin_gradients": True}) for stage in (1, 2)),
    *(case(stage, zero={"contiguous_gradients": False}) for stage in (1, 2, 3)),
    *(case(stage, zero=SMALL_BUCKETS) for stage in (1, 2, 3)),
    case(3, zero={"sub_group_size": 30}),
    case(3, offload=True, zero={"offload_param": {"device": "cpu"}}),
    *(case(0, dtype, fused=True) for dtype in ("bf16", "fp16")),
]
ALL_OVERFLOWS = [
    *({"stage": stage, "dtype": dtype} for stage in STAGES for dtype in ("bf16", "fp16")),
    *({"stage": stage, "dtype": "bf16", "offload": True} for stage in (1, 2, 3)),
    *({"stage": 0, "dtype": dtype, "fused": True} for dtype in ("bf16", "fp16")),
    *({"stage": stage, "dtype": "bf16", "unchecked": True} for stage in (1, 2)),
    {"stage": 1, "dtype": "bf16", "accumulate_in_fp32": True},
]
QUICK_TRUTH = {
    1: [case(stage) for stage in STAGES],
    2: [
        *(case(stage, dtype) for stage in STAGES for dtype in DTYPES),
        *(case(stage, offload=True) for stage in (1, 2, 3)),
        case(1, accumulate_in_fp32=True),
        case(2, zero={"round_robin_gradients": True}),
        case(0, "fp16", fused=True),
    ],
    4: [*(case(stage) for stage in STAGES), case(3, "fp32", 1), case(1, "fp16", 1, offload=True)],
}
QUICK_OVERFLOWS = {1: [], 2: [*({"stage": stage, "dtype": "fp16"} for stage in STAGES), ALL_OVERFLOWS[-2]], 4: []}


def launch(folder, worker, *arguments, size, **variables):
    """Run a worker on CPU ranks; what DeepSpeed may compile on the way stays in `folder`."""
    places: Any = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), "PYTHONWARNINGS": "ignore"}
    return run_ranks(HERE / worker, *arguments, world_size=size, timeout_s=900, **places, **variables)


def assert_true(folder, truth, overflow, size, **variables):
    texts = launch(
        folder, "truth_worker.py", json.dumps({"truth": truth, "overflow": overflow}), size=size, **variables
    )
    for text in texts:
        assert text.count("\ntruth ") + text.startswith("truth ") == len(truth)
        assert text.count("\noverflow ") == len(overflow)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_read_of_each_stage_is_true(tmp_path, size):
    assert_true(tmp_path, QUICK_TRUTH[size], QUICK_OVERFLOWS[size], size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_read_in_every_configuration_is_true(tmp_path, size):
    assert_true(tmp_path, ALL_TRUTH, ALL_OVERFLOWS, size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_has_each_parameter_once_by_its_global_name(tmp_path, size):
    (text, *_) = launch(tmp_path, "pipeline_worker.py", size=size)

    assert text.count("\npipeline ") == 4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_have_global_numbers_and_count_once(tmp_path, size):
    (text, *_) = launch(tmp_path, "moe_worker.py", size=size)

    assert text.count("\nmoe ") == 4
