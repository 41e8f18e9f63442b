"""A bad step of DeepSpeed is replayed at every stage of ZeRO and in a pipeline, and the run keeps every bit."""

import pytest

from tests.frameworks.replay.checks import Results, assert_located

pytestmark = pytest.mark.distributed

NAMES = ["stage0-fp32-backward", "stage0-bf16-weight", "stage1-fp32-weight", "stage1-bf16-transient"]
NAMES += ["stage2-fp32-transient", "stage2-bf16-backward"]
NAMES += ["stage3-fp32-weight", "stage3-bf16-transient", "stage3-fp32-backward"]
NAMES += ["pipeline-first", "pipeline-last"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of("deepspeed_worker", tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)
