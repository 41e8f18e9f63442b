"""A bad step of Megatron is replayed by both ranks in every layout, stage by stage, and the run keeps every bit."""

import pytest

from tests.frameworks.replay.checks import Results, assert_located

pytestmark = pytest.mark.distributed

NAMES = ["tp-weight", "tp-transient", "sp-backward", "tp-recompute", "pp-first", "pp-last", "vpp", "cp", "dp", "ep"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of("megatron_worker", tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)
