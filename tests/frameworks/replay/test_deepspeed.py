"""A bad step of DeepSpeed is replayed at every stage of ZeRO and in a pipeline, and the run keeps every bit."""

import pytest

from tests.frameworks.replay.checks import Results, assert_gradients, assert_located, assert_ordered

pytestmark = pytest.mark.distributed

NAMES = ["stage0-fp32-backward", "stage0-bf16-weight", "stage1-fp32-weight", "stage1-bf16-transient"]
NAMES += ["stage2-fp32-transient", "stage2-bf16-backward"]
NAMES += ["stage3-fp32-weight", "stage3-bf16-transient", "stage3-fp32-backward", "stage3-checkpoint"]
NAMES += ["pipeline-first", "pipeline-last"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of("deepspeed_worker", tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)


def test_a_replay_has_the_gradients_that_the_step_had(results):
    assert_gradients(results, "stage3-gradients", number=30)


def test_an_ordered_dump_reads_gathered_parameters_and_changes_nothing(results):
    assert_ordered(results, "stage3-ordered", number=[30, 30])


def test_reentrant_checkpointing_at_stage_3_is_refused_on_both_ranks(results):
    for of_rank in results.of_rank:
        (event,) = of_rank["stage3-reentrant"]["replays"]
        assert of_rank["stage3-reentrant"]["same"]
        assert event["status"] == "refused"
        assert "reentrant" in event["reason"]


def test_an_overflow_under_a_dynamic_loss_scale_is_no_fault(results):
    assert all(of_rank["stage1-fp16"]["same"] for of_rank in results.of_rank)
    assert all(of_rank["stage1-fp16"]["replays"] == [] for of_rank in results.of_rank)
