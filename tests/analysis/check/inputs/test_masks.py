"""Dropouts with planted faults of their masks: the same mask twice, another one in the backward."""

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.recorded_dumps import recorded
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump

X = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))


class OtherMaskInBackward(TorchDispatchMode):
    """A device whose dropout gives its backward another mask than it used."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor and torch._C._current_graph_task_id() != -1:
            args = (args[0], args[1].flip(0))
        return func(*args, **(kwargs or {}))


def statuses(folder, step):
    torch.manual_seed(1)
    check = check_dump(recorded(folder, step))
    return {call.key: (call.status, call.reason) for call in check.calls if "dropout" in call.key}


def twice(reseed):
    def step():
        x = X.clone().requires_grad_()
        y = functional.dropout(x, 0.3)
        if reseed:
            torch.manual_seed(1)
        (functional.dropout(torch.sin(x), 0.3) * y).sum().backward()

    return step


def test_masks_of_their_own_pass(tmp_path):
    found = statuses(tmp_path, twice(reseed=False))

    assert {status for status, _ in found.values()} == {Status.PASS}


def test_the_same_mask_twice_is_an_error_of_the_second(tmp_path):
    found = statuses(tmp_path, twice(reseed=True))

    assert found["Functional.dropout.0.forward"] == (Status.PASS, "")
    expected = (Status.ERROR, "drops what Functional.dropout.0.forward dropped")
    assert found["Functional.dropout.1.forward"] == expected


def test_a_few_elements_may_be_dropped_alike_by_chance(tmp_path):
    def step():
        for _ in range(2):
            torch.manual_seed(1)
            functional.dropout(X[0, :9], 0.5)

    assert {status for status, _ in statuses(tmp_path, step).values()} == {Status.PASS}


def test_another_mask_in_the_backward_is_an_error(tmp_path):
    def step():
        x = X.clone().requires_grad_()
        with OtherMaskInBackward():
            functional.dropout(x, 0.3).sum().backward()

    found = statuses(tmp_path, step)

    assert found["Functional.dropout.0.forward"][0] is Status.PASS
    assert found["Functional.dropout.0.backward"][0] is Status.ERROR
