"""A bad step of FSDP is replayed by both ranks, the run keeps every bit, and the diagnosis names what went wrong."""

import pytest

from tests.frameworks.replay.checks import Results, assert_located

pytestmark = pytest.mark.distributed


NAMES = ["fsdp2-weight", "fsdp2-transient", "fsdp2-backward", "fsdp2-bf16", "fsdp2-reentrant", "fsdp2-checkpoint"]
NAMES += ["fsdp1-original-transient", "fsdp1-original-backward", "fsdp1-flat-transient"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of("fsdp_worker", tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("name", NAMES)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, name):
    assert_located(results, name)
