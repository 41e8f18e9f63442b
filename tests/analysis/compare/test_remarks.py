"""What passes as rounding and is not equal is said: from the first row on, and of numbers too small to be normal."""

import json

import pytest
import torch

from trainermon.analysis.compare import compare
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.verdicts import ERROR, NOT_COMPARED, PASS


def dump(folder, *, given, made, task):
    """Write a dump of one call of a module that was given one tensor and made another."""
    (folder / "dump_tensor_data").mkdir(parents=True)
    forms = []
    for place, value in (("input.0", given), ("output.0", made)):
        name, wide = f"Module.first.Custom.forward.0.{place}.pt", value.double()
        torch.save(value, folder / "dump_tensor_data" / name)
        form = {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape), "requires_grad": False}
        form |= {"Max": wide.max().item(), "Min": wide.min().item(), "Mean": wide.mean().item()}
        form |= {"Norm": wide.norm().item()} | ({"data_name": name} if task == "tensor" else {})
        forms.append(form)
    call = {"input_args": [forms[0]], "input_kwargs": {}, "output": [forms[1]]}
    data = {"Module.first.Custom.forward.0": call}
    (folder / "dump.json").write_text(json.dumps({"task": task, "level": "L0", "data": data}))
    return folder


def compared(tmp_path, ours, theirs, *, task):
    sides = [
        dump(tmp_path / name, given=given, made=made, task=task)
        for name, (given, made) in {"target": ours, "golden": theirs}.items()
    ]
    (comparison,) = compare(*sides)
    return comparison


NEXT = {  # the number behind 1 in each type
    torch.float32: 1 + 2.0**-23,
    torch.float16: 1 + 2.0**-10,
    torch.bfloat16: 1 + 2.0**-7,
    torch.float8_e4m3fn: 1 + 2.0**-3,
    torch.float8_e5m2: 1 + 2.0**-2,
}


@pytest.mark.parametrize("where", ["given", "made"])
@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("dtype", NEXT)
def test_what_the_very_first_call_was_given_is_said_not_to_be_equal(tmp_path, dtype, task, where):
    base = torch.linspace(-4, 4, 64)
    moved = base.clone()
    base[63], moved[63] = 4.0, 4 * NEXT[dtype]
    ours, theirs = moved.to(dtype), base.to(dtype)
    assert torch.count_nonzero(ours.float() != theirs.float()) == 1
    sides = ((ours, theirs), (theirs, theirs)) if where == "given" else ((theirs, ours), (theirs, theirs))

    comparison = compared(tmp_path, *sides, task=task)

    results = [row.result for row in comparison.rows()]
    if task == "statistics" and dtype.itemsize == 1:
        assert NOT_COMPARED in results
    else:
        assert results == [PASS, PASS]
        is_said = where == "given" or dtype.itemsize == 1  # what float32 rounds to by chance says nothing
        assert ("Module.first.Custom.forward.0 (" in headline(comparison)) is is_said


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-39, 1e-44])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_statistics_too_small_to_be_normal_are_equal_or_not_compared(tmp_path, size, factor):
    theirs = size * torch.linspace(-4, 4, 64)
    ours = (factor * size) * torch.linspace(-4, 4, 64)
    assert torch.equal(ours, theirs) is (factor == 1.0)

    comparison = compared(tmp_path, (theirs, ours), (theirs, theirs), task="statistics")

    given, made = (row.result for row in comparison.rows())
    assert given == PASS
    assert made == (PASS if factor == 1.0 else NOT_COMPARED if size < 1e-38 else ERROR)
