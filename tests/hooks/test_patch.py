"""A patched method calls the original once, returns its result, and is put back as it was."""

import copy
import pickle
from typing import Any

import pytest
import torch

from trainermon.core.errors import AttachError
from trainermon.hooks.patch import Patch


class Optimizer:
    """Stands for any framework's optimizer."""

    def step(self, scale=1):
        """Return what was asked for."""
        return ("stepped", scale)


def test_what_comes_before_and_after_sees_arguments_and_result():
    seen = []
    owner = Optimizer()
    patch = Patch(owner, "step", before=lambda args, kwargs: seen.append((args, kwargs)), after=seen.append)

    assert owner.step(3) == ("stepped", 3)
    assert owner.step(scale=2) == ("stepped", 2)

    assert seen == [((3,), {}), ("stepped", 3), ((), {"scale": 2}), ("stepped", 2)]
    patch.remove()
    patch.remove()
    assert "step" not in vars(owner)


def test_a_patched_method_is_bound_like_the_original_and_a_scheduler_may_wrap_it():
    model = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    patch = Patch(optimizer, "step", after=calls.append)
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__func__.__name__ == "step"

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert calls == [None]
    patch.remove()  # the scheduler has wrapped the method since: the patch only falls silent
    optimizer.step()
    assert calls == [None]


def test_a_method_of_a_class_is_replaced_for_all_and_the_identical_one_put_back():
    original = Optimizer.step
    seen = []
    patch = Patch(Optimizer, "step", before=lambda args, _: seen.append(args))
    one = Optimizer()
    assert one.step(5) == ("stepped", 5)
    patch.remove()

    assert Optimizer.step is original
    assert seen == [(one, 5)]


def test_an_exception_of_the_original_goes_through_and_nothing_comes_after():
    class Broken:
        def step(self):
            raise RuntimeError("the framework's own")

    after = []
    owner = Broken()
    Patch(owner, "step", after=after.append)

    with pytest.raises(RuntimeError, match="own"):
        owner.step()
    assert after == []


def test_a_method_that_does_not_exist_is_refused():
    with pytest.raises(AttachError, match="found no method prepare_grads"):
        Patch(Optimizer(), "prepare_grads")


def test_a_copy_of_a_patched_object_works():
    owner = Optimizer()
    Patch(owner, "step")
    assert copy.copy(owner).step(2) == ("stepped", 2)
    assert pickle.loads(pickle.dumps(owner)).step(4) == ("stepped", 4)
