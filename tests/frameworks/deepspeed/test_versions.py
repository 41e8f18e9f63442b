"""Each supported series of DeepSpeed: installed beside the tests, and held against the same truth.

Left out is what the release itself gets wrong, so that there is no truth to hold: 0.17 never clears gradients at stage
0 in bfloat16, and accumulates wrongly at stage 2; 0.18 does not reduce the last micro step in `BF16_Optimizer`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.deepspeed.test_truth import assert_true, case

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
ROOT = Path(__file__).parents[3]
BF16_OPTIMIZER = case(1, accumulate_in_fp32=True)
TRUTH = [
    *(case(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16", "fp16")),
    *(case(stage, "bf16", 1, offload=True) for stage in (1, 2, 3)),
    case(2, "bf16", 1),
    case(2, "bf16", 1, zero={"round_robin_gradients": True}),
    case(3, zero={"sub_group_size": 30}),
    BF16_OPTIMIZER,
]
OVERFLOWS = [{"stage": stage, "dtype": "fp16"} for stage in (0, 1, 2, 3)]
OVERFLOWS += [{"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)]
WRONG = {
    "0.16.9": lambda _: False,
    "0.17.6": lambda one: one == case(0, "bf16") or (one["stage"], one["gas"]) == (2, 2),
    "0.18.9": lambda one: one == BF16_OPTIMIZER,
    "0.19.8": lambda _: False,
}


@pytest.mark.parametrize("version", WRONG)
def test_what_is_read_is_true(tmp_path, version):
    site = tmp_path / "site"
    subprocess.run(
        [*INSTALL, "--target", str(site), f"deepspeed=={version}"],
        env=os.environ | {"DS_BUILD_OPS": "0"},
        check=True,
    )

    truth = [one for one in TRUTH if not WRONG[version](one)]
    assert_true(tmp_path, truth, OVERFLOWS, 2, PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
