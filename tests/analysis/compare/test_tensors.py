"""Element by element: metrics held against numpy in one go, whatever the chunks."""

import json
import math
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainermon import PrecisionDebugger
from trainermon.analysis.compare import CompareOptions, compare, tensors
from trainermon.analysis.compare.answer.summary import headline
from trainermon.analysis.compare.comparison import compare_pair
from trainermon.analysis.compare.merging.places import find_places, pair_places
from trainermon.cli import main


def dump(folder, arrays):
    """Write a dump in tensor mode of one call that gives `arrays`."""
    (folder / "dump_tensor_data").mkdir(parents=True)
    forms: list[dict[str, Any]] = []
    for index, array in enumerate(arrays):
        name = f"Functional.gelu.0.forward.output.{index}.npy"
        np.save(folder / "dump_tensor_data" / name, array)
        forms.append({"type": "torch.Tensor", "dtype": f"torch.{array.dtype}", "shape": list(array.shape)})
        forms[-1] |= {"Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 3.0, "requires_grad": False, "data_name": name}
    data = {"Functional.gelu.0.forward": {"input_args": [], "input_kwargs": {}, "output": forms}}
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "data": data}))
    return folder


def columns_of(tmp_path, ours, theirs):
    (comparison,) = compare(dump(tmp_path / "a", [ours]), dump(tmp_path / "b", [theirs]))
    (row,) = comparison.rows()
    return row, row.difference.columns


@pytest.mark.parametrize("chunk", [1, 7, 1 << 13])
def test_metrics_are_those_of_numpy_in_one_go(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    random = np.random.default_rng(0)
    theirs = random.normal(size=(10, 5)).astype(np.float32)
    ours = (theirs * (1 + random.normal(size=theirs.shape) * 3e-3)).astype(np.float32)

    row, columns = columns_of(tmp_path, ours, theirs)

    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    share = np.abs((a - b) / b)
    expected = [
        np.corrcoef(a, b)[0, 1] * 0 + a @ b / np.linalg.norm(a) / np.linalg.norm(b),
        np.linalg.norm(a - b),
        np.abs(a - b).max(),
        share.max(),
        (share < 1e-3).mean(),
        (share < 5e-3).mean(),
        share.mean(),
        (np.abs(a - b) / np.spacing(np.maximum(np.abs(ours), np.abs(theirs)).ravel())).max(),
        np.linalg.norm(a) / np.linalg.norm(b),
        0,
        0,
    ]
    assert columns == pytest.approx(expected, rel=1e-12)
    assert row.result == "error"


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_last_places_are_those_of_the_type_in_torch_s_files_too(dtype, digits, tmp_path):
    theirs = torch.tensor([1.0, -2.0, 3.0, 100.0], dtype=dtype)
    ours = theirs.clone()
    ours[2] += 3 * 2.0 ** (2 - digits)  # numbers from 2 to 4 are so far apart
    folders = [dump(tmp_path / name, [np.zeros(4, np.float32)]) for name in "ab"]
    for folder, tensor in zip(folders, (ours, theirs), strict=True):
        torch.save(tensor, folder / "dump_tensor_data" / "x.pt")
        text = (folder / "dump.json").read_text().replace("Functional.gelu.0.forward.output.0.npy", "x.pt")
        (folder / "dump.json").write_text(text.replace("torch.float32", str(dtype)))

    (comparison,) = compare(*folders)
    (row,) = comparison.rows()
    assert row.difference.columns[7] == 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_last_places_are_numpy_s_at_every_magnitude(dtype, tmp_path):
    random = np.random.default_rng(4)
    kind = np.finfo(dtype)
    least = int(np.log2(float(kind.tiny))) - kind.nmant
    exponents = random.integers(least + 3, int(np.log2(float(kind.max))) - 1, size=400)
    theirs = [
        np.array([sign * np.ldexp(1.3, exponent)]).astype(dtype)
        for exponent, sign in zip(exponents, [1, -1] * 200, strict=True)
    ]
    ours = [np.nextafter(value, dtype(math.inf)) for value in theirs]

    (comparison,) = compare(dump(tmp_path / "a", ours), dump(tmp_path / "b", theirs))
    assert [row.difference.columns[7] for row in comparison.rows()] == [1.0] * 400


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_keep_the_order_of_the_rows(threads, tmp_path):
    random = np.random.default_rng(0)
    arrays = [random.normal(size=int(random.integers(1, 50_000))) for _ in range(60)]
    a = dump(tmp_path / "a", [array + index for index, array in enumerate(arrays)])
    b = dump(tmp_path / "b", arrays)

    (pair,) = pair_places(find_places(a), find_places(b))
    rows = list(compare_pair(pair, CompareOptions(), threads=threads).rows())
    assert [row.difference.columns[2] for row in rows] == pytest.approx(range(60), abs=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_finite_on_one_side_only_is_an_error(value, tmp_path):
    theirs = np.ones(6, np.float32)
    ours = theirs.copy()
    ours[3] = value

    row, columns = columns_of(tmp_path, ours, theirs)

    assert row.result == "error"
    assert math.isnan(row.difference.relative)
    assert columns[9:] == (1, 0)
    assert columns[0] == pytest.approx(1.0)


def test_the_same_nonfinite_values_are_equal(tmp_path):
    values = np.array([1, math.nan, math.inf, -math.inf], np.float32)

    row, _ = columns_of(tmp_path, values, values)

    assert (row.result, row.difference.relative) == ("pass", 0.0)


def test_a_permutation_is_seen(tmp_path):
    values = np.arange(8, dtype=np.float32)

    row, _ = columns_of(tmp_path, values[::-1].copy(), values)

    assert row.result == "error"


def test_twice_a_small_tensor_is_not_the_same(tmp_path):
    theirs = np.full(9, 1e-4, np.float32)

    row, _ = columns_of(tmp_path, theirs * 2, theirs)

    assert row.result == "error"


@pytest.mark.parametrize("values", [np.zeros(0, np.float32), np.zeros(3, np.float32), np.array(2.0, np.float32)])
def test_empty_zero_and_scalar_tensors_agree_with_themselves(values, tmp_path):
    row, columns = columns_of(tmp_path, values, values)

    assert row.result == "pass"
    assert columns[0] == pytest.approx(1.0)


def test_a_text_is_no_tensor(tmp_path, capsys):
    a, b = dump(tmp_path / "a", [np.ones(3, np.float32)]), dump(tmp_path / "b", [np.ones(3, np.float32)])
    text = (a / "dump.json").read_text().replace(".npy", ".pt")
    (a / "dump.json").write_text(text)
    (a / "dump_tensor_data" / "Functional.gelu.0.forward.output.0.pt").write_text("root:x:0:0")

    assert main(["compare", str(a), str(b), "--exit-code"]) == 4
    assert "is not a tensor file" in capsys.readouterr().out.partition("\n")[0]


def test_a_pickle_is_not_loaded(tmp_path, capsys):
    a, b = dump(tmp_path / "a", [np.ones(3, np.float32)]), dump(tmp_path / "b", [np.ones(3, np.float32)])
    evil = a / "dump_tensor_data" / "Functional.gelu.0.forward.output.0.npy"
    np.save(evil, np.array([object()]), allow_pickle=True)

    assert main(["compare", str(a), str(b), "--exit-code"]) == 4
    assert "is not a tensor file" in capsys.readouterr().out.partition("\n")[0]


def with_torch_files(folder, tensors):
    """Replace the files of a dump made by `dump` by those of torch."""
    text = (folder / "dump.json").read_text().replace(".npy", ".pt")
    (folder / "dump.json").write_text(text)
    for index, values in enumerate(tensors):
        torch.save(values, folder / "dump_tensor_data" / f"Functional.gelu.0.forward.output.{index}.pt")
    return folder


def test_a_sparse_tensor_is_compared_with_all_its_elements(tmp_path):
    values = np.array([[0, 1.5], [0, 0], [-2, 0]], np.float32)
    golden = dump(tmp_path / "b", [values, values + 1])
    sparse = torch.from_numpy(values).to_sparse()
    target = with_torch_files(dump(tmp_path / "a", [values, values]), [sparse, sparse])

    (comparison,) = compare(target, golden)

    same, other = comparison.rows()
    assert (same.result, same.difference.relative) == ("pass", 0.0)
    assert other.difference.columns[1] == pytest.approx(math.sqrt(6))


def test_a_conjugate_is_compared_by_its_own_elements(tmp_path):
    values = np.array([1 + 2j, 3 - 1j], np.complex64)
    golden = dump(tmp_path / "b", [values.conj(), values])
    lazy = torch.from_numpy(values).conj()
    target = with_torch_files(dump(tmp_path / "a", [values, values]), [lazy, lazy])

    (comparison,) = compare(target, golden)

    same, other = comparison.rows()
    assert lazy.is_conj()
    assert (same.result, same.difference.relative) == ("pass", 0.0)
    distance = np.linalg.norm(values.conj() - values)
    assert other.difference.columns[1] == pytest.approx(distance)


def test_positions_of_integers_differ_or_do_not(tmp_path):
    row, columns = columns_of(tmp_path, np.array([1, 2, 4]), np.array([1, 2, 3]))

    assert (row.difference.relative, columns[2]) == (math.inf, 1.0)


def test_without_torch_its_files_say_how_to_compare(tmp_path, monkeypatch, capsys):
    values = torch.ones(3)
    sides = [with_torch_files(dump(tmp_path / name, [values.numpy()]), [values]) for name in ("a", "b")]
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["compare", *map(str, sides)]) == 1
    assert "0.pt needs torch: install it, or compare with --mode statistics" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "key"), [(3e-4, "Functional.linear.0.backward"), (3e-8, None)])
def test_an_element_of_a_gradient_that_cancels_is_held_against_the_rounding_of_its_sum(tmp_path, change, key):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "sound"), level="mix", task="tensor")
    debugger.start(model)
    model(torch.randn(6, 8)).square().mean().backward()
    debugger.stop()
    debugger.close()
    PrecisionDebugger.close()
    shutil.copytree(tmp_path / "sound", tmp_path / "changed")
    (path,) = (tmp_path / "changed").rglob("Functional.linear.0.backward.output.2.pt")
    gradient = torch.load(path)
    gradient[3] += change
    torch.save(gradient, path)

    (comparison,) = compare(tmp_path / "changed", tmp_path / "sound")

    assert gradient.norm() < 2 * change + 1e-7  # nothing but rounding, as a normalisation takes out the mean
    assert [call.key for call in comparison.blamed] == ([key] if key else [])
    assert headline(comparison).startswith("The dumps agree") == (key is None)
