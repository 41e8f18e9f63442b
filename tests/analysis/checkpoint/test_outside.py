"""What is beside the model of a checkpoint is compared, counted, and said in the first line."""

import collections
import math

import numpy as np
import pytest
import torch

from trainermon.cli import main


def first_line(capsys, *words):
    """Return the status of `trainermon checkpoint`, and the first line that it prints."""
    status = main(["checkpoint", *map(str, words)])
    return status, capsys.readouterr().out.partition("\n")[0]


def compared(folder, capsys, ours, theirs, *options):
    """Return status and first line of a comparison of two states."""
    for name, state in (("a", ours), ("b", theirs)):
        torch.save(state, folder / f"{name}.pt")
    return first_line(capsys, "compare", folder / "a.pt", folder / "b.pt", "--exit-code", *options)


def with_ema(value):
    return {"model": {"w": torch.ones(4, 4)}, "ema": {"w": torch.full((4, 4), value)}}


def test_tensors_outside_the_model_that_differ_are_in_the_first_line(tmp_path, capsys):
    said = "the same model, but 1 of 1 tensors of `ema` differ, "

    assert compared(tmp_path, capsys, with_ema(1.0), with_ema(math.nan)) == (3, f"{said}NaN or Inf in 1")
    assert compared(tmp_path, capsys, with_ema(1.0), with_ema(2.0)) == (3, f"{said}ΔW/W up to 50.00%")
    assert compared(tmp_path, capsys, with_ema(1.0), with_ema(1.0)) == (0, "the same model")


def test_weights_only_says_what_it_left_out(tmp_path, capsys):
    compared(tmp_path, capsys, with_ema(1.0), with_ema(math.nan))

    assert main(["checkpoint", "compare", *(str(tmp_path / f"{side}.pt") for side in "ab"), "--weights-only"]) == 0
    assert "left out by --weights-only: outside: ema, other values\n" in capsys.readouterr().out


def test_verify_counts_tensors_outside_the_model(tmp_path, capsys):
    torch.save(with_ema(math.nan), tmp_path / "x.pt")

    assert first_line(capsys, "verify", tmp_path / "x.pt") == (0, "whole: 2 tensors; 2 pieces; NaN or Inf in 1")


def test_a_tensor_in_an_object_of_an_unknown_class_is_compared(tmp_path, capsys):
    sides = [
        {"model": {"w": torch.ones(4)}, "ema": collections.UserDict(shadow=torch.full((2,), value))}
        for value in (1.0, 2.0)
    ]

    assert compared(tmp_path, capsys, *sides) == (
        3,
        "the same model, but 1 of 1 tensors of `ema` differ, ΔW/W up to 50.00%",
    )


@pytest.mark.parametrize("where", ["model", "beside", "alone"])
def test_numpy_arrays_that_differ_are_a_difference(tmp_path, capsys, where):
    def state(value):
        array, weights = np.full(3, value, np.float32), {"w": torch.ones(4)}
        return {
            "model": {"model": {**weights, "v": array}},
            "beside": {"model": weights, "ema": {"v": array}},
            "alone": {**weights, "v": array},
        }[where]

    place = {"model": "model.v", "beside": "ema.v", "alone": "v"}[where]
    assert compared(tmp_path, capsys, state(1.0), state(math.nan)) == (
        3,
        f"the same model, but 1 numpy array differs, first {place}",
    )
    assert compared(tmp_path, capsys, state(1.0), state(1.0)) == (0, "the same model")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"last_epoch": 1}, {"last_epoch": 2}),
        ({"scale": 65536.0}, {"scale": 0.0}),
        ([1, 2, 3], [1, 2, 4]),
        ({1, 2}, {1, 3}),
        (collections.deque([1, 2]), collections.deque([1, 3])),
        (np.arange(4), np.arange(1, 5)),
        (np.float64(1), np.float64(2)),
        (b"x" * 999 + b"a", b"x" * 999 + b"b"),
        (torch.zeros(5056, dtype=torch.uint8), torch.ones(5056, dtype=torch.uint8)),
    ],
)
@pytest.mark.parametrize("where", ["beside", "within", "alone"])
def test_other_values_that_differ_are_in_the_first_line(tmp_path, capsys, ours, theirs, where):
    weights = {"w": torch.ones(4)}
    if where != "beside" and isinstance(ours, torch.Tensor):
        return  # there it is one of the model
    sides = [
        {
            "beside": {"model": weights, "x": value},
            "within": {"model": {**weights, "x": value}},
            "alone": {**weights, "x": value},
        }[where]
        for value in (ours, theirs)
    ]

    assert compared(tmp_path, capsys, *sides) == (0, "the same model; 1 other value differs")
    assert compared(tmp_path, capsys, sides[0], sides[0]) == (0, "the same model")


def test_both_sides_of_a_value_that_differs_are_told_apart(tmp_path, capsys):
    sides = [{"model": {"w": torch.ones(4)}, "rng": torch.full((99,), value, dtype=torch.uint8)} for value in (1, 2)]
    compared(tmp_path, capsys, *sides)

    main(["checkpoint", "compare", *(str(tmp_path / f"{side}.pt") for side in "ab")])

    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["rng", "uint8[99]"])
    assert row.split()[2] != row.split()[4]


def test_state_of_the_optimizer_is_not_counted_twice(tmp_path, capsys):
    state = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"module": {"w": torch.ones(3)}, "optimizer": state}, tmp_path / "mp_rank_00_model_states.pt")

    status, said = first_line(capsys, "verify", tmp_path)

    assert (status, ": 2 tensors; 2 pieces" in said) == (0, True)
