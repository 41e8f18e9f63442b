"""What tools for tensors say does not depend on the size of the numbers: squares that leave float64 hide nothing."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger
from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.analysis.checkpoint.inspection import check_tensors
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.checkpoint.verdicts import SAME
from trainermon.analysis.tensor.difference import diff_tensors
from trainermon.analysis.tensor.profile import profile
from trainermon.analysis.tensor.selection import parse_target
from trainermon.cli import main

EXPONENTS = (-1040, -700, -560, -530, 530, 1000)
"""Of powers of two, which keep every digit but at the lowest."""
DAMAGES = {
    "one element": lambda values: np.where(np.arange(len(values)) == 3, values * 1.5, values),
    "zeroed": lambda values: values * 0,
    "negated": lambda values: -values,
    "scaled": lambda values: values * 0.75,
    "reversed": lambda values: values[::-1].copy(),
}


def sound():
    return np.round(np.random.default_rng(1).uniform(0.25, 1.0, 12), 4) * np.where(np.arange(12) % 2, 1, -1)


def scaled(values, exponent):
    return np.ldexp(values, exponent)


@pytest.fixture(params=EXPONENTS)
def exponent(request):
    return request.param


@pytest.fixture(params=DAMAGES)
def damage(request):
    return DAMAGES[request.param]


def close(found, exponent):
    """Return what is nearly equal: at the lowest numbers only a few digits are left."""
    return pytest.approx(found, rel=1e-2 if exponent < -1000 else 1e-9)


def test_a_difference_of_tensors(tmp_path, exponent, damage):
    def differ(exponent):
        sides = (damage(sound()), sound())
        for name, values in zip("ab", sides, strict=True):
            np.save(tmp_path / f"{name}{exponent}.npy", scaled(values, exponent))
        return diff_tensors(*(parse_target(str(tmp_path / f"{name}{exponent}.npy")).one() for name in "ab"))

    usual, found = differ(0), differ(exponent)

    assert (found.differing, found.relative) == (usual.differing, close(usual.relative, exponent))
    assert found.distance == close(float(scaled(usual.distance, exponent)), exponent)
    assert found.norm_ratio == close(usual.norm_ratio, exponent)
    assert found.cosine == (None if usual.cosine is None else close(usual.cosine, exponent))


def test_the_statistics_of_a_tensor(tmp_path, exponent):
    def shown(exponent):
        np.save(tmp_path / f"x{exponent}.npy", scaled(sound(), exponent))
        found = profile(parse_target(str(tmp_path / f"x{exponent}.npy")).one())
        return found.norm, found.rms, found.std

    usual, found = shown(0), shown(exponent)

    assert found == close(tuple(float(scaled(number, exponent)) for number in usual), exponent)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_comparison_of_checkpoints(tmp_path, exponent, damage, dtype):
    def compared(exponent):
        for name, values in (("a", damage(sound())), ("b", sound())):
            tensor = torch.from_numpy(scaled(values, exponent))
            torch.save(
                {"w": torch.complex(tensor, tensor) if dtype == "complex128" else tensor}, tmp_path / f"{name}.pt"
            )
        sides = [open_checkpoint(tmp_path / f"{name}.pt") for name in "ab"]
        norms = [check_tensors(side)[0].norm for side in sides]
        return compare_checkpoints(*sides).tensors[0], norms

    (usual, usual_norms), (found, norms) = compared(0), compared(exponent)

    assert found.verdict not in SAME
    assert found.verdict == usual.verdict
    assert found.relative == close(usual.relative, exponent)
    assert norms == close([float(scaled(norm, exponent)) for norm in usual_norms], exponent)
    assert found.cosine == (None if usual.cosine is None else close(usual.cosine, exponent))


class Shows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, values):
        return self.inner(values)


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_comparison_of_dumps(tmp_path, capsys, exponent, damage, task):
    for name, values in (("a", damage(sound())), ("b", sound())):
        debugger = PrecisionDebugger(dump_path=str(tmp_path / name), level="L0", task=task)
        model = Shows()
        debugger.start(model)
        model(torch.from_numpy(scaled(values, exponent)))
        debugger.stop()
        debugger.step()
        debugger.close()
    if task == "statistics":
        found = json.loads((tmp_path / "b/step0/rank0/dump.json").read_text())
        (record,) = found["data"]["Module.inner.Identity.forward.0"]["output"]
        assert record["Norm"] is None or record["Norm"] == close(
            float(scaled(np.linalg.norm(sound()), exponent)), exponent
        )

    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])

    same_numbers = task == "statistics" and sorted(damage(sound())) == sorted(sound())
    assert ("The dumps agree" in capsys.readouterr().out) == same_numbers
