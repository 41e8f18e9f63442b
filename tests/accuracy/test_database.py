"""The operator database of torch: a healthy CPU is right, and every operation has a family that somebody decided on."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.operators import operator_database
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import undecided
from trainermon.accuracy.judge import Status, judge_call

# In 16 bits torch's own CPU gives NaN for the exponential of this sample, where float64 gives some 2400.
KNOWN = {("matrix_exp", torch.bfloat16), ("matrix_exp", torch.float16)}


def test_the_family_of_every_operation_is_decided():
    assert undecided({op.name for op in operator_database()}) == []


def sampled(op, dtype):
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=False)))
    given = (sample.input, *sample.args), dict(sample.kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, given)
    return OperationCall(op.op, *given), op.op(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "most_warnings", "every"),
    [
        (torch.float32, 0.02, 1),
        (torch.complex64, 0.02, 4),
        (torch.bfloat16, 0.06, 4),
        (torch.float16, 0.06, 4),
        pytest.param(torch.complex64, 0.02, 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0.06, 1, marks=pytest.mark.slow),
        pytest.param(torch.float16, 0.06, 1, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_cpu_is_right(dtype, most_warnings, every):
    judged, wrong, coarse = 0, [], []
    for op in operator_database()[::every]:
        if dtype not in op.supported_dtypes("cpu") or (op.name, dtype) in KNOWN or op.name.startswith("jiterator"):
            continue
        try:
            call, result = sampled(op, dtype)
        except (RuntimeError, StopIteration):  # the sample is for another device
            continue
        found = judge_call(op.name, call, result)
        judged += sum(one.status is not Status.SKIP for one in found)
        wrong += [(op.name, one.reason, one.worst) for one in found if one.status is Status.ERROR]
        coarse += [op.name for one in found if one.status is Status.WARNING]

    assert judged > 350 / every
    assert len(wrong) <= 0.003 * judged, wrong
    assert len(coarse) <= most_warnings * judged, coarse
