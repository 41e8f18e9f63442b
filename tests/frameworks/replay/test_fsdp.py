"""A bad step of FSDP is replayed by both ranks, the run keeps every bit, and the diagnosis names what went wrong."""

import pytest

from tests.frameworks.replay.checks import Results, assert_gradients, assert_located, assert_ordered, cases, chosen

pytestmark = pytest.mark.distributed

QUICK = ["fsdp2-backward", "fsdp2-bf16", "fsdp2-reentrant", "fsdp2-checkpoint"]
QUICK += ["fsdp1-original-transient", "fsdp1-flat-weight"]
NAMES = cases(QUICK, slow=["fsdp2-weight", "fsdp2-transient", "fsdp1-original-backward", "fsdp1-flat-transient"])


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return Results.of("fsdp_worker", tmp_path_factory.mktemp("fsdp"), *chosen(request))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)


@pytest.mark.parametrize("name", cases(["fsdp2-gradients"], slow=["fsdp1-gradients"]))
def test_a_replay_has_the_gradients_that_the_step_had(results, name):
    assert_gradients(results, name, number=30)


@pytest.mark.parametrize("name", ["fsdp2-ordered", "fsdp1-ordered"])
def test_an_ordered_dump_reads_gathered_parameters_and_changes_nothing(results, name):
    assert_ordered(results, name, number=[30, 30])
