"""What `make bench-check` judges: faults change something, halves are halves, and its first findings hold."""

import pytest
import torch

from benchmarks.checks.database import database_calls
from benchmarks.checks.faults import result_faults
from benchmarks.checks.grid import wrong_kernel_verdicts
from benchmarks.checks.healthy import decomposed, eager, in_blocks, wide_inside
from benchmarks.checks.models import checked_models
from trainermon.accuracy.calls import OperationCall


def test_every_kernel_that_computes_something_else_in_float32_is_found():
    assert {one.what for one in wrong_kernel_verdicts(torch.float32, 1) if one.kind != "right"} == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_one_in_16_bits_is_noticed(dtype):
    found = {one.what: one.status for one in wrong_kernel_verdicts(dtype, 1) if one.kind != "right"}

    assert set(found.values()) <= {"warning"}, found


def test_every_fault_changes_a_result_and_nothing_else():
    given = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    before = given.clone()

    for fault in result_faults():
        changed = fault.change(given.clone(), torch.Generator().manual_seed(2))
        assert changed.shape == given.shape, fault.name
        assert not torch.equal(changed, given) or fault.roundoffs == 1, fault.name
    assert torch.equal(given, before)


@pytest.mark.parametrize("compute", [decomposed, wide_inside, in_blocks])
def test_every_way_to_compute_is_sound(compute):
    torch.manual_seed(4)
    call = OperationCall(lambda one, other: (one @ other).mean(0), [torch.randn(33, 70), torch.randn(70, 9)], {})

    result = compute(call)

    result = result[0] if isinstance(result, list) else result
    torch.testing.assert_close(result, eager(call))


def test_half_of_the_calls_is_held_out_and_all_of_float16():
    calls = list(database_calls(torch.float32, 1, every=4))
    held = sum(one.is_held_out for one in calls)

    assert 0.35 < held / len(calls) < 0.65
    assert all(one.is_held_out for one in database_calls(torch.float16, 1, every=16))


def test_a_step_of_a_model_is_right_and_its_one_wrong_call_is_found():
    found = list(checked_models("tabular"))

    assert [one.variant for one in found if not one.is_right and one.precision == "fp32"] == []
    assert [one.variant for one in found if not one.kind and one.errors] == []
    assert {one.kind for one in found} == {"", "operation", "backward"}
