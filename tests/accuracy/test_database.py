"""The operator database of torch: a healthy CPU is right, and every operation has a family that somebody decided on."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.operators import operator_database
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.families import undecided
from trainermon.accuracy.judge import Status, judge_call

# In 16 bits torch's own CPU gives NaN for the exponential of a matrix, where float64 gives some ten or some thousand;
# and before the logarithm of `logit` it rounds the quotient to 16 bits, which costs all that is near one half.
KNOWN = {(name, dtype) for name in ("matrix_exp", "logit") for dtype in (torch.bfloat16, torch.float16)}


def test_the_family_of_every_operation_is_decided():
    assert undecided({op.name for op in operator_database()}) == []


def sampled(op, dtype):
    torch.manual_seed(0)
    # `op.sample_inputs` looks through the whole stack, with its sources, for every sample
    sample = next(iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad=False)))
    given = (sample.input, *sample.args), dict(sample.kwargs)
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, given)
    return OperationCall(op.op, *given), op.op(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "most_warnings"),
    [(torch.float32, 0.02), (torch.complex64, 0.02), (torch.bfloat16, 0.06), (torch.float16, 0.06)],
)
def test_a_healthy_cpu_is_right(dtype, most_warnings):
    judged, wrong, coarse = 0, [], []
    for op in operator_database():
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

    assert judged > 350
    assert len(wrong) <= 0.003 * judged, wrong
    assert len(coarse) <= most_warnings * judged, coarse
