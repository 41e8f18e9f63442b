"""What is the same, and what only looks so: infinities, NaN of other bits, large integers."""

import numpy as np
import pytest
import torch

from trainermon.analysis.checkpoint.comparison import compare_checkpoints
from trainermon.cli import main


def compared(folder, capsys, ours, theirs):
    """Return the status of a comparison of two tensors, and its first line."""
    for name, tensor in (("a", ours), ("b", theirs)):
        torch.save({"w": tensor}, folder / f"{name}.pt")
    status = main(["checkpoint", "compare", str(folder / "a.pt"), str(folder / "b.pt"), "--exit-code"])
    return status, capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_became_infinite_on_one_side_was_not_rounded(tmp_path, capsys, is_swapped):
    wide = torch.full((256,), 1e6)
    wide[:19] = 1.0
    sides = (wide, wide.half())

    found = compared(tmp_path, capsys, *(sides[::-1] if is_swapped else sides))

    assert found == (3, "differs in 1 of 1 tensors, NaN or Inf in 1, first w")


def test_rounding_with_nan_in_the_same_places_says_so(tmp_path, capsys):
    wide = torch.randn(64, generator=torch.Generator().manual_seed(1))
    wide[3], wide[4] = torch.nan, torch.inf

    assert compared(tmp_path, capsys, wide, wide.bfloat16()) == (
        0,
        "the same after rounding to bfloat16, with NaN or Inf in 1 tensors of both",
    )


@pytest.mark.parametrize("is_all", [False, True])
def test_nan_of_other_bits_is_no_rounding(tmp_path, capsys, is_all):
    bits = np.full(8, 0x7FC00000, np.uint32)
    sides = [torch.from_numpy((bits + more).astype(np.uint32).view(np.float32).copy()) for more in (0, 1)]
    if not is_all:
        for side in sides:
            side[0] = 1.0

    assert compared(tmp_path, capsys, *sides) == (3, "differs in 1 of 1 tensors, NaN or Inf in 1, first w")
    (tensor,) = compare_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").tensors
    assert ("every element is NaN on both sides, some in other bits" in tensor.notes) == is_all


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("other", [torch.int64, torch.uint64])
def test_integers_are_equal_or_different(tmp_path, capsys, dtype, other):
    for large in (2**53, 2**62, 10**9):
        sides = [torch.tensor([large, 1]).to(dtype), torch.tensor([large + 1, 1]).to(other)]

        assert compared(tmp_path, capsys, *sides) == (3, "differs in 1 of 1 tensors, first w")
        assert compared(tmp_path, capsys, sides[0], sides[0].to(other)) == (0, "the same model")
