"""Files with tensors of every dtype and layout: a change is found, or the tensor is named as not read."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.tensor_kinds import DAMAGES, numbers, saved_kinds, unchanged_by
from trainermon.analysis.tensor.selection import parse_target
from trainermon.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change

UNREAD = {"masked"}  # torch loads it only with all that may run code


def written(folder, values):
    """Write each kind into a file of its own, as a dump does."""
    folder.mkdir()
    for name, tensor in saved_kinds(values).items():
        torch.save(tensor, folder / f"{name}.pt")
    return folder


def diff(capsys, *words):
    assert main(["tensor", "diff", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def place(path):
    return path.rpartition("/")[2].partition(".pt")[0]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return written(tmp_path_factory.mktemp("kinds") / "sound", numbers())


def test_every_kind_is_read_or_named(sound, capsys):
    assert main(["tensor", "show", str(sound), "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)
    assert {place(row["label"]) for row in rows} == set(saved_kinds(numbers()))
    assert {place(row["label"]) for row in rows if "unread" in row} == UNREAD


@pytest.mark.parametrize("name", saved_kinds(numbers()))
def test_the_numbers_are_those_of_torch(sound, name):
    """Where torch itself makes numbers of a kind; nested tensors are two."""
    tensor = saved_kinds(numbers())[name]
    if name in {*UNREAD, "nested", "jagged"} or "bits" in name or "float4" in name:
        return
    expected = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()

    found = parse_target(str(sound / f"{name}.pt")).one()

    wide = expected.to(torch.complex128 if expected.is_complex() else torch.float64).numpy()
    read = np.concatenate([chunk.astype(wide.dtype) for chunk in found.chunks()]).reshape(found.shape)
    np.testing.assert_array_equal(read, wide)
    assert found.kind == str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_is_equal(sound, tmp_path, capsys, damage):
    other = written(tmp_path / "other", DAMAGES[damage](numbers()))

    found = diff(capsys, other, sound)

    equal = {place(pair["ours"]) for pair in found["pairs"] if not pair["differing"]}
    changed = {place(pair["ours"]) for pair in found["pairs"] if pair["differing"]}
    assert equal - changed == unchanged_by(damage)
    assert {place(text.partition(":")[0]) for text in found["unread"]} == UNREAD
    assert changed | equal | UNREAD == set(saved_kinds(numbers()))


@pytest.mark.parametrize("damage", ["zeroed", "negated"])
def test_no_tolerance_passes_zeros_or_the_other_sign(tmp_path, capsys, damage):
    for name, values in (("a", DAMAGES[damage](numbers())), ("b", numbers())):
        torch.save({"w": values, "v": values * 1e-3}, tmp_path / f"{name}.pt")
    sides = [str(tmp_path / f"{name}.pt") for name in ("a", "b")]

    assert main(["tensor", "diff", *sides, "--rtol", "9", "--atol", "9"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 tensors differ")
    assert main(["tensor", "diff", *(f"{side}::w" for side in sides), "--atol", "9"]) == 0
    assert "the tensors; each element is within the tolerance, which is too large" in capsys.readouterr().out


def test_one_tensor_that_is_not_read_leaves_the_others_judged(tmp_path, capsys):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((3,), value), "x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"x":{"dtype":"F32"', b'"x":{"dtype":"F4" '))

    assert main(["tensor", "diff", *(str(tmp_path / f"{name}.safetensors") for name in ("a", "b"))]) == 0

    out = capsys.readouterr().out
    assert out.startswith("1 of 1 compared tensors differ; 1 not read\n")
    assert "not compared  x: elements of type F4 cannot be read" in out


def test_integers_that_are_the_same_as_float64_are_told_apart_in_every_layout(tmp_path, capsys):
    for name, value in (("a", 2**60), ("b", 2**60 + 1)):
        torch.save({"dense": torch.tensor([value]), "coo": torch.tensor([value]).to_sparse()}, tmp_path / f"{name}.pt")

    found = diff(capsys, tmp_path / "a.pt", tmp_path / "b.pt")

    assert [pair["differing"] for pair in found["pairs"]] == [1, 1]


@pytest.mark.parametrize("action", ["show", "top", "hist"])
def test_a_tensor_without_elements_in_memory_is_refused_by_name(action, tmp_path, capsys):
    torch.save(torch.ones(3, device="meta"), tmp_path / "a.pt")

    assert main(["tensor", action, str(tmp_path / "a.pt")]) == 1

    assert "a.pt is not read: it is a meta tensor" in capsys.readouterr().err


def test_folders_without_a_common_name_are_not_said_to_agree(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({f"{name}1": torch.ones(1), f"{name}2": torch.ones(1)}, tmp_path / name / f"{name}.pt")

    assert main(["tensor", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0

    assert capsys.readouterr().out.startswith("nothing is compared: no tensor is in both; 4 on one side only\n")
