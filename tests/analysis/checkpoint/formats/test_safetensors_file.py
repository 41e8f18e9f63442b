"""safetensors files hold what the library loads; an index is checked against its files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.analysis.checkpoint.assembled import assembled, assert_same
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    """A folder as transformers writes it, of two files."""
    torch.manual_seed(3)
    first = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    save_file(first, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.arange(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    return tmp_path


def test_the_tensors_are_those_that_the_library_loads(folder):
    first, second = (load_file(folder / f"model-{number}.safetensors") for number in (1, 2))

    found = open_checkpoint(folder)

    assert found.format == "hf"
    assert_same(found.tensors, {**first, **second})
    assert found.values["config"] == {"hidden_size": 4}
    one = open_checkpoint(folder / "model-1.safetensors")
    assert_same(one.tensors, first)
    assert one.values == {"format": "pt"}


def test_an_older_folder_has_files_of_torch(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')

    assert_same(open_checkpoint(tmp_path).tensors, {"a": torch.ones(2)})


def test_a_missing_shard_is_named(folder):
    (folder / "model-2.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"model-2.safetensors is missing, .*index.json has 'c' there: copy it"):
        open_checkpoint(folder)


def test_a_shard_of_another_checkpoint_is_named(folder):
    save_file({"other": torch.ones(1)}, folder / "model-2.safetensors")

    with pytest.raises(CheckpointError, match=r"model-2.safetensors lacks 'c'"):
        open_checkpoint(folder)


def test_an_index_that_leaves_its_folder_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model-1.safetensors"}}')

    with pytest.raises(CheckpointError, match=r"outside its folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "should take 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "has the shape"),
        ({"a": {"dtype": "F32", "shape": [90], "data_offsets": [0, 360]}}, "is cut off"),
        ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, "type F4"),
        ({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, "'a' and 'b' overlap"),
        ([], "damaged header"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, header, fault):
    text = json.dumps(header).encode().ljust(100)
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))

    with pytest.raises(CheckpointError, match=fault):
        open_checkpoint(tmp_path / "x.safetensors") if isinstance(header, dict) else open_checkpoint(tmp_path)


def test_plain_folders_hold_a_tensor_a_file(tmp_path):
    values = {"a": np.arange(6.0).reshape(2, 3), "b": np.asfortranarray(np.arange(6).reshape(2, 3)), "c": np.float32(2)}
    for name, value in values.items():
        np.save(tmp_path / f"{name}.npy", value)
    torch.save(torch.ones(2), tmp_path / "d.pt")

    found = open_checkpoint(tmp_path).tensors

    assert {name: assembled(found[name]).tolist() for name in values} == {n: v.tolist() for n, v in values.items()}
    assert found["d"].shape == (2,)


def test_arrays_of_objects_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)

    with pytest.raises(CheckpointError, match=r"elements of type '\|O'"):
        open_checkpoint(tmp_path / "a.npy")
