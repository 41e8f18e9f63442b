"""A call is followed from beginning to end, on classes of C++ too, and nothing is left when the patch is gone."""

import contextlib
import inspect
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainermon.core.errors import AttachError
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch


class Group:
    """Stands for a class of torch."""

    def reduce(self, value, factor=1):
        """Return the product."""
        if value is None:
            raise ValueError("no value")
        return value * factor


def follow(owner, name, *, token=object()):  # noqa: B008  # one token for all
    seen = []

    def begins(args, kwargs):
        seen.append((args, kwargs))
        return token

    return CallPatch(owner, name, begins=begins, ends=lambda *end: seen.append(end)), seen, token


def test_begin_and_end_of_a_call_belong_together():
    patch, seen, token = follow(Group, "reduce")
    group = Group()
    patch.attach()

    assert group.reduce(2, factor=3) == 6

    assert seen == [((group, 2), {"factor": 3}), (token, 6)]
    patch.detach()


def test_call_that_is_not_to_be_followed_has_no_end():
    patch, seen, _ = follow(Group, "reduce", token=None)
    patch.attach()
    Group().reduce(2)
    patch.detach()

    assert len(seen) == 1


def test_call_that_fails_has_no_end_and_its_error_arrives():
    patch, seen, _ = follow(Group, "reduce")
    patch.attach()
    with pytest.raises(ValueError, match="no value"):
        Group().reduce(None)
    patch.detach()

    assert len(seen) == 1


@pytest.mark.parametrize("failing", ["begins", "ends", "fails"])
def test_error_of_a_callback_reaches_its_border_and_not_the_caller(failing):
    told, fault = [], ZeroDivisionError("of the monitor")
    border = FaultGuard(told.append)

    def callback(name):
        def call(*_):
            if name == failing:
                raise fault
            return name

        return call

    callbacks: dict[str, Any] = {name: callback(name) for name in ("begins", "ends", "fails")}
    patch = CallPatch(Group, "reduce", border=border, **callbacks)
    patch.attach()
    try:
        with pytest.raises(ValueError, match="no value") if failing == "fails" else contextlib.nullcontext():
            assert Group().reduce(None if failing == "fails" else 2, factor=3) == 6
        assert Group().reduce(5) == 5
    finally:
        patch.detach()

    assert border.tripped
    assert len(told) == 1
    assert "of the monitor" in told[0]


def test_replacement_is_the_same_every_time_and_the_original_comes_back():
    original = vars(Group)["reduce"]
    patch, seen, _ = follow(Group, "reduce")
    assert vars(Group)["reduce"] is original

    replacements = []
    for _ in range(3):
        patch.attach()
        patch.attach()
        replacements.append(vars(Group)["reduce"])
        patch.detach()
        patch.detach()
        assert vars(Group)["reduce"] is original

    assert replacements[0] is replacements[1] is replacements[2]
    assert inspect.signature(replacements[0]) == inspect.signature(original)
    assert replacements[0].__doc__ == original.__doc__
    Group().reduce(1)
    assert seen == []


def test_wrapper_of_somebody_else_stays_and_is_noticed(monkeypatch):
    patch, seen, _ = follow(Group, "reduce")
    patch.attach()
    ours = Group.reduce
    monkeypatch.setattr(Group, "reduce", lambda *args: ours(*args))

    patch.detach()

    assert not patch.fits
    assert Group().reduce(4) == 4
    assert seen == []


@pytest.mark.parametrize("name", ["absent", "__doc__"])
def test_what_is_not_there_is_refused(name):
    with pytest.raises(AttachError, match=rf"Group: found no method {name}, which this version of trainermon watches"):
        follow(Group, name)


def test_inherited_method_is_refused_because_others_inherit_it_too():
    class Special(Group):
        pass

    with pytest.raises(AttachError):
        follow(Special, "reduce")


def test_method_of_a_class_of_torch_comes_back_identical():
    original = vars(dist.Work)["wait"]
    patch, _, _ = follow(dist.Work, "wait")
    patch.attach()
    patch.detach()

    assert vars(dist.Work)["wait"] is original


def test_function_of_a_module_is_left_alone_while_torch_compiles(monkeypatch):
    module = types.ModuleType("functions")
    vars(module)["double"] = lambda value: 2 * value
    patch, seen, token = follow(module, "double")
    patch.attach()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert module.double(2) == 4
    assert seen == []
    monkeypatch.undo()

    assert module.double(3) == 6
    assert seen == [((3,), {}), (token, 6)]
