"""A bad step of FSDP is replayed by both ranks, the run keeps every bit, and the diagnosis names what went wrong."""

import pytest

from tests.frameworks.replay import fsdp_worker
from tests.frameworks.replay.checks import Results, assert_located

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results.of(fsdp_worker, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("case", fsdp_worker.CASES, ids=lambda case: case.name)
def test_the_guilty_rank_and_module_are_named_and_no_bit_differs(results, case):
    assert_located(results, case)
