"""A bad step of DeepSpeed is replayed at every stage of ZeRO and in a pipeline, and the run keeps every bit."""

import pytest

from tests.frameworks.replay.checks import Results, assert_gradients, assert_located, assert_ordered, cases, chosen

pytestmark = pytest.mark.distributed

QUICK = ["stage0-fp32-backward", "stage1-bf16-transient", "stage2-bf16-backward"]
QUICK += ["stage3-fp32-weight", "stage3-checkpoint", "pipeline-first"]
SLOW = ["stage0-bf16-weight", "stage1-fp32-weight", "stage2-fp32-transient", "stage3-fp32-backward"]
SLOW += ["stage3-bf16-transient", "pipeline-last"]
NAMES = cases(QUICK, SLOW)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return Results.of("deepspeed_worker", tmp_path_factory.mktemp("deepspeed"), *chosen(request))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)


@pytest.mark.parametrize("name", ["stage3-gradients"])
def test_a_replay_has_the_gradients_that_the_step_had(results, name):
    assert_gradients(results, name, number=30)


@pytest.mark.parametrize("name", ["stage3-ordered"])
def test_an_ordered_dump_reads_gathered_parameters_and_changes_nothing(results, name):
    assert_ordered(results, name, number=[30, 30])


@pytest.mark.parametrize("name", ["stage3-reentrant"])
def test_reentrant_checkpointing_at_stage_3_is_refused_on_both_ranks(results, name):
    for of_rank in results.of_rank:
        (event,) = of_rank[name]["replays"]
        assert of_rank[name]["same"]
        assert event["status"] == "refused"
        assert "reentrant" in event["reason"]


@pytest.mark.parametrize("name", ["stage1-fp16"])
def test_an_overflow_under_a_dynamic_loss_scale_is_no_fault(results, name):
    assert all(of_rank[name]["same"] for of_rank in results.of_rank)
    assert all(of_rank[name]["replays"] == [] for of_rank in results.of_rank)
