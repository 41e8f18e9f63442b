"""NaN, Inf and nothing on both sides: what is not equal is never called so, or what was not looked at is said."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.dumped_kinds import TASKS
from trainermon import PrecisionDebugger
from trainermon.cli import main

INF, NAN = math.inf, math.nan
PAIRS = {
    "Inf twice": ([1, INF, 3], [1, INF, 3]),
    "Inf of other signs": ([1, INF, 3], [1, -INF, 3]),
    "NaN twice": ([1, NAN, 3], [1, NAN, 3]),
    "NaN for Inf": ([1, NAN, 3], [1, INF, 3]),
    "all Inf": ([INF, INF], [INF, INF]),
    "all Inf, negated": ([INF, INF], [-INF, -INF]),
    "all NaN": ([NAN, NAN], [NAN, NAN]),
    "Inf for a number": ([INF, 1.0], [5.0, 1.0]),
    "beside NaN": ([NAN, 1, 2.0], [NAN, 1, 2.5]),
    "beside Inf": ([INF, 1, 2.0], [INF, 1, 2.5]),
    "nothing": ([], []),
}
DTYPES = ("float32", "float64", "bfloat16", "complex64")
NAMES = (
    "ünï→名",
    "sp ace",
    "a/b",
    "..",
    "-1",
    "007",
    "1e5",
    "None",
    "x" * 300,
    "<b>&",
    "new\nline",
    "[0]",
    "a:b",
    "\x1b[31m",
)


def tensors(name, dtype):
    return [torch.tensor(values, dtype=getattr(torch, dtype)) for values in PAIRS[name]]


def are_equal(ours, theirs):
    one, other = (side.to(torch.complex128).numpy() for side in (ours, theirs))
    return np.array_equal(one, other, equal_nan=True)


class Shows(nn.Module):
    """Gives what it is given to a module of any name."""

    def __init__(self, name):
        super().__init__()
        self._modules[name] = nn.Identity()

    def forward(self, values):
        for module in self.children():
            values = module(values)
        return values


def dump(folder, values, task, name="inner"):
    debugger = PrecisionDebugger(dump_path=str(folder), level="L0", task=TASKS[task]["task"])
    model = Shows(name)
    debugger.start(model)
    model(values)
    debugger.stop()
    debugger.step()
    debugger.close()
    return str(folder)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRS)
def test_files_are_equal_only_if_numpy_says_so(tmp_path, capsys, name, dtype):
    sides = tensors(name, dtype)
    files = [str(tmp_path / f"{side}.pt") for side in "ab"]
    for file, tensor in zip(files, sides, strict=True):
        torch.save({"w": tensor}, file)

    main(["checkpoint", "compare", *files])
    compared = capsys.readouterr().out
    main(["tensor", "diff", *(f"{file}::w" for file in files)])
    differing = capsys.readouterr().out

    assert compared.startswith("the same model") == are_equal(*sides)
    assert ("differ     none" in differing) == are_equal(*sides)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("name", PAIRS)
def test_dumps_agree_only_if_numpy_says_so_or_they_say_what_they_did_not_look_at(tmp_path, capsys, name, task):
    sides = tensors(name, "float32")
    folders = [dump(tmp_path / side, tensor, task) for side, tensor in zip("ab", sides, strict=True)]

    for command in (["compare", *folders], ["graph", *folders]):
        assert main(command) == 0
        first = capsys.readouterr().out.splitlines()[0]
        unseen = task == "statistics" and (name.startswith("all") or "its sign not looked at" in first)
        assert first.startswith("The dumps agree") == are_equal(*sides) or unseen


@pytest.mark.parametrize("name", NAMES)
def test_any_name_goes_through_every_tool(tmp_path, capsys, name):
    sides = [torch.ones(3), torch.ones(3) * 1.5]
    files = [str(tmp_path / f"{side}.pt") for side in "ab"]
    for file, tensor in zip(files, sides, strict=True):
        torch.save({name: tensor, "other": torch.ones(2)}, file)
    folders = [
        dump(tmp_path / side, tensor, "tensor", name.replace(".", "·"))
        for side, tensor in zip("ab", sides, strict=True)
    ]

    for command in (
        ["checkpoint", "compare", *files],
        ["checkpoint", "verify", files[0]],
        ["tensor", "show", f"{files[0]}::{name}"],
        ["tensor", "diff", *files],
        ["compare", *folders],
        ["graph", *folders],
        ["graph", folders[0], "-o", str(tmp_path / "graph.html")],
    ):
        assert main(command) in (0, 3), command
        printed = capsys.readouterr().out
        assert "\x1b[31m" not in printed
        assert "agree" not in printed
        assert "same model" not in printed
