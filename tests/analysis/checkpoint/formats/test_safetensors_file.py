"""safetensors files hold what the library loads; an index is checked against its files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.analysis.checkpoint.assembled import assembled, assert_same
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.tensor.files import SAFETENSORS
from trainermon.cli import main
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
        ({"a": {"dtype": 4, "shape": [1], "data_offsets": [0, 4]}}, "has the type 4"),
        ({"a": {"dtype": "F4", "shape": [90], "data_offsets": [0, 360]}}, "is cut off"),
        ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [4, 0]}}, "has the shape"),
        ({name: {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, "'a' and 'b' overlap"),
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


@given(dtype=st.text(min_size=1, max_size=300).filter(lambda text: text not in SAFETENSORS))
def test_a_tensor_of_a_type_that_is_not_known_is_named_and_the_others_are_read(tmp_path_factory, dtype):
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    header = {
        "a (b)": {"dtype": dtype, "shape": [3], "data_offsets": [0, 2]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]},
    }
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(2) + np.array([1.5, -2.0], "<f4").tobytes())

    found = open_checkpoint(path)

    assert_same(found.tensors, {"w": torch.tensor([1.5, -2.0])})
    assert found.unread == (f"a (b) ({dtype[:40]})",)


def test_four_bit_floats_as_torch_saves_them_do_not_hide_the_others(folder, capsys):
    narrow = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"c": torch.arange(3), "narrow": narrow}, folder / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] | {"narrow": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))

    status = main(["checkpoint", "verify", str(folder)])

    printed = capsys.readouterr().out
    assert status == 4
    assert printed.startswith("whole as far as it is read: 3 tensors")
    assert "1 tensor is not read" in printed
    assert "narrow (F4)" in printed
    main(["checkpoint", "compare", str(folder), str(folder)])
    assert capsys.readouterr().out.startswith("the same model, as far as it is read: 1 tensor is not")
