"""Files that a checkpoint should have, has twice, or has and does not name: it is not whole."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainermon.cli import main

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def folder(tmp_path):
    """Return a folder as transformers writes it, of two files."""
    save_file({"a": torch.ones(3, 4)}, tmp_path / FIRST)
    save_file({"b": torch.ones(5)}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": SECOND})
    return tmp_path


def write_index(folder, names):
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def verified(path, capsys):
    """Return the status of `trainermon checkpoint verify`, and its first line."""
    status = main(["checkpoint", "verify", str(path)])
    return status, capsys.readouterr().out.partition("\n")[0]


def test_a_shard_that_the_names_of_the_others_ask_for_is_missing(folder, capsys):
    (folder / INDEX).unlink()
    assert verified(folder, capsys) == (0, "whole: 2 tensors; 2 pieces")
    (folder / SECOND).unlink()

    status, said = verified(folder, capsys)

    assert (status, said.startswith(f"not whole: {SECOND} is missing, as the name of {FIRST} says")) == (3, True)


def test_a_tensor_in_two_shards_with_other_values_is_damaged(folder, capsys):
    save_file({"b": torch.ones(5), "a": torch.ones(3, 4)}, folder / SECOND)
    assert verified(folder, capsys) == (0, "whole: 2 tensors; 3 pieces")
    save_file({"b": torch.ones(5), "a": torch.zeros(3, 4)}, folder / SECOND)

    assert verified(folder, capsys) == (3, "1 of 2 tensors are damaged; 3 pieces")


def test_a_tensor_in_two_shards_with_other_shapes_is_named(folder, capsys):
    save_file({"b": torch.ones(5), "a": torch.ones(3, 5)}, folder / SECOND)

    status, said = verified(folder, capsys)

    assert (status, said.partition(",")[0]) == (3, f"not whole: {FIRST} and {SECOND} both have a")


def test_a_tensor_that_the_index_lost_is_named(folder, capsys):
    save_file({"b": torch.ones(5), "c": torch.ones(2)}, folder / SECOND)

    status, said = verified(folder, capsys)

    assert (status, said.partition(":")[2].partition(":")[0]) == (3, f" {SECOND} has c, which {INDEX} does not name")


def test_a_shard_outside_the_index_is_named(folder, capsys):
    write_index(folder, {"a": FIRST})

    status, said = verified(folder, capsys)

    assert (status, said.partition(":")[2].partition(":")[0]) == (
        3,
        f" {SECOND} is there, and {INDEX} does not name it",
    )


def appended(path):
    path.write_bytes(path.read_bytes() + bytes(100))


def with_gap(path):
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))


@pytest.mark.parametrize("damage", [appended, with_gap])
def test_bytes_of_a_safetensors_file_that_belong_to_no_tensor_are_refused(tmp_path, capsys, damage):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path)
    damage(path)
    with pytest.raises(SafetensorError):
        load_file(path)

    for place in (path, tmp_path):
        status, said = verified(place, capsys)
        assert status == 3
        assert said.startswith(f"not whole: {path}: bytes ")
        assert "belong to no tensor" in said
