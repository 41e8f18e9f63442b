"""A bad step of Megatron is replayed by both ranks in every layout, stage by stage, and the run keeps every bit."""

import pytest

from tests.frameworks.replay.checks import Results, assert_gradients, assert_located, assert_ordered, cases, chosen

pytestmark = pytest.mark.distributed

QUICK = ["sp-backward", "tp-recompute", "pp-last", "vpp", "cp", "dp", "ep"]
NAMES = cases(QUICK, slow=["tp-weight", "tp-transient", "pp-first"])


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return Results.of("megatron_worker", tmp_path_factory.mktemp("megatron"), *chosen(request))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)


@pytest.mark.parametrize(
    ("name", "number"), [("tp-gradients", 56), pytest.param("ep-gradients", 52, marks=pytest.mark.slow)]
)
def test_a_replay_has_the_gradients_that_the_step_had(results, name, number):
    assert_gradients(results, name, number=number)


@pytest.mark.parametrize("name", ["pp-ordered"])
def test_an_ordered_dump_of_a_stage_changes_nothing(results, name):
    assert_ordered(results, name, number=[28, 30])
