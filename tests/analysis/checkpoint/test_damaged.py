"""Whatever a file holds, opening it gives a checkpoint or one line that names the file."""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.analysis.checkpoint.assembled import assembled, save_alone
from trainermon.analysis.checkpoint import sums
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.inspection import check_tensors
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.checkpoint.values import value_differences
from trainermon.cli import main
from trainermon.core.errors import CheckpointError
from trainermon.statistics import pairs

NUM_MUTATIONS = int(os.environ.get("CHECKPOINT_MUTATIONS", "60"))  # of each file; `make fuzz-checkpoints`: 1,000
FILES = ["torch", "safetensors", "numpy", "index", "metadata", "chunks", "ranks", "universal", "mindspore"]
FILES += ["common", "zero model", "zero optimizer"]
FORMATS = ["torch", "safetensors", "folder", "hf", "dcp", "dcp", "megatron", "universal", "mindspore", "megatron_dist"]
FORMATS += ["deepspeed", "deepspeed"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A small checkpoint of each format: its path, and the file in it that is damaged."""
    folder = tmp_path_factory.mktemp("samples")
    torch.manual_seed(5)
    state = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    torch.save({"model": state, "args": argparse.Namespace(lr=1.0)}, folder / "x.pt")
    save_file(state, folder / "x.safetensors")
    np.save(folder / "x.npy", state["a"].numpy())
    hf, dcp, ranks, zero = (folder / name for name in ("hf", "dcp", "ranks", "zero"))
    for place in (hf, ranks / "mp_rank_00", zero / "zero" / "a"):
        place.mkdir(parents=True)
    save_file(state, hf / "model-1.safetensors")
    weight_map = dict.fromkeys(state, "model-1.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_alone({"model": state}, dcp)
    torch.save({"args": argparse.Namespace(), "model": state}, ranks / "mp_rank_00" / "model_optim_rng.pt")
    torch.save({"param": state["a"]}, zero / "zero" / "a" / "fp32.pt")
    (folder / "x.ckpt").write_bytes(mindspore_entry("a", state["a"].numpy()))
    megatron, stages = folder / "megatron", folder / "stages"
    save_alone({"model": state}, megatron)
    (megatron / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": argparse.Namespace(), "iteration": 3}, megatron / "common.pt")
    save_zero(stages, state)
    return {
        "mindspore": (folder / "x.ckpt", folder / "x.ckpt"),
        "common": (megatron, megatron / "common.pt"),
        "zero model": (stages, stages / "mp_rank_00_model_states.pt"),
        "zero optimizer": (stages, stages / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        "torch": (folder / "x.pt", folder / "x.pt"),
        "safetensors": (folder / "x.safetensors", folder / "x.safetensors"),
        "numpy": (folder / "x.npy", folder / "x.npy"),
        "index": (hf, hf / "model.safetensors.index.json"),
        "metadata": (dcp, dcp / ".metadata"),
        "chunks": (dcp, dcp / "__0_0.distcp"),
        "ranks": (ranks, ranks / "mp_rank_00" / "model_optim_rng.pt"),
        "universal": (zero, zero / "zero" / "a" / "fp32.pt"),
    }


def mindspore_entry(name, array):
    """Return an entry of MindSpore's protocol buffer; source: mindspore/ccsrc/utils/checkpoint.proto."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    dims = b"".join(bytes([1 << 3, size]) for size in array.shape)
    tensor = dims + field(2, b"Float32") + field(3, array.tobytes())
    return field(1, field(1, name.encode()) + field(2, tensor))


def save_zero(folder, state):
    """Write what DeepSpeed does at stage 1 on one rank."""
    folder.mkdir()
    model = {"module": state, "param_shapes": [{name: tensor.shape for name, tensor in state.items()}]}
    flat = torch.cat([tensor.float().flatten() for tensor in state.values()])
    optimizer = {"zero_stage": 1, "partition_count": 1, "single_partition_of_fp32_groups": [flat]}
    optimizer["base_optimizer_state"] = {"state": {0: {"exp_avg": flat}}}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer}, folder / name)


def damaged(data, chance):
    """Return bytes with a few of them changed, taken out, put in, doubled or cut off."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        start, size = chance.randrange(len(found)), chance.choice((1, 1, 4, 40))
        part = bytes(chance.choice((0, 255, chance.randrange(256))) for _ in range(size))
        match chance.randrange(5):
            case 0 | 1:
                found[start : start + size] = part
            case 2:
                del found[start : start + size]
            case 3:
                found[start:start] = bytes(found[start : start + size])
            case _:
                del found[max(start, 1) :]
        found = found or bytearray(b"\0")
    return bytes(found)


def refusal(path):
    """Open a checkpoint and map all of it; return what it was refused with, if it was."""
    try:
        found = open_checkpoint(path)
        list(value_differences(found.values, {}))
        for tensor in found.tensors.values():
            for piece in tensor.pieces:
                assert piece.stored.array().shape == piece.stored.shape
        check_tensors(found, jobs=1)
    except CheckpointError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_opened_or_named(samples, name):
    path, file = samples[name]
    data, chance = file.read_bytes(), random.Random(name)
    refusals = []
    for _ in range(NUM_MUTATIONS):
        file.write_bytes(damaged(data, chance))
        refusals += refusal(path)
    file.write_bytes(data)

    assert all(str(path.parent) in text and "\n" not in text for text in refusals)
    assert len(refusals) > NUM_MUTATIONS / 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # KiB, torch and all
    assert all(assembled(tensor).size for tensor in open_checkpoint(path).tensors.values())


def test_opening_any_format_imports_no_torch(samples):
    paths = [str(samples[name][0]) for name in FILES]
    code = (
        "import sys; from trainermon.analysis.checkpoint.opening import open_checkpoint;"
        f"print(*(open_checkpoint(path).format for path in {paths!r}));"
        "assert not {'torch', 'safetensors', 'megatron', 'deepspeed'} & set(sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout.split() == FORMATS


def pipe(path):
    os.mkfifo(path)


def loop(path):
    path.symlink_to(path)


def device(path):
    path.symlink_to("/dev/zero")


def parts_alone(path):
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(bytes(8))
    np.save(path / "other.npy", np.ones(3))


def pointer(path):
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 2336927755\n")


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (pipe, "is not a regular file"),
        (device, "is not a regular file"),
        (loop, "Too many levels of symbolic links"),
        (lambda path: path.touch(), "begins with b''"),
        (lambda path: path.mkdir(), "has none of the files of a checkpoint"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(40)), "is cut off or damaged"),
        (lambda path: path.write_text("hello"), "which no known format does"),
        (parts_alone, r"has parts of a distributed checkpoint \(__0_0\.distcp …\) and no \.metadata"),
        (pointer, "is a pointer of git-lfs, the 2336927755 bytes that it stands for are not here: git lfs pull"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path, make, fault):
    make(tmp_path / "x.pt")

    with pytest.raises(CheckpointError, match=fault) as error:
        open_checkpoint(tmp_path / "x.pt")

    assert "x.pt" in str(error.value)


def test_a_pipe_in_a_folder_is_not_waited_for(samples, tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")

    with pytest.raises(CheckpointError, match=r"x.safetensors is not a regular file"):
        open_checkpoint(tmp_path)


def test_a_tracker_that_names_its_own_folder_is_refused(tmp_path):
    (tmp_path / "latest").write_text("again")
    (tmp_path / "again").symlink_to(tmp_path)

    with pytest.raises(CheckpointError, match=r"latest"):
        open_checkpoint(tmp_path)


def test_a_compressed_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}." * 100)

    with pytest.raises(CheckpointError, match=r"compressed or encrypted archive: save it again with torch.save"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_file_of_before_torch_1_6_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)

    with pytest.raises(CheckpointError, match=r"torch before 1.6: load it with torch.load\(weights_only=True\)"):
        open_checkpoint(tmp_path / "x.pt")


def cut_when_read(monkeypatch, name, path, size):
    """Have a file cut to a size when its elements are about to be read."""
    original = getattr(pairs, name)

    def cut(*arguments):
        os.truncate(path, size)
        return original(*arguments)

    monkeypatch.setattr(pairs, name, cut)


@pytest.mark.skipif(not pairs.is_available(), reason="the compiled library is not there")
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, monkeypatch):
    for side in "ab":
        np.save(tmp_path / f"{side}.npy", np.ones(100_000, np.float32))
    cut_when_read(monkeypatch, "pair_sums", tmp_path / "b.npy", 4096)

    with pytest.raises(CheckpointError, match=r"b\.npy was written while it was read: wait until"):
        compare_checkpoints(
            tmp_path / "a.npy", tmp_path / "b.npy", options=CheckpointOptions(renamed={"b": "a"}, jobs=1)
        )


def test_a_file_that_is_written_while_it_is_read_is_named(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.ones(100, np.float32))
    found = open_checkpoint(tmp_path / "a.npy")
    original = sums.sums_of

    def write(*arguments):
        os.utime(tmp_path / "a.npy", ns=(1, 1))
        return original(*arguments)

    monkeypatch.setattr("trainermon.analysis.checkpoint.inspection.sums_of", write)

    with pytest.raises(CheckpointError, match=r"a\.npy was written while it was read"):
        check_tensors(found)


def test_tensors_that_are_not_read_are_noted(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they will go away: files of them stay
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    state = {"w": torch.ones(3), "layer": {"sparse": torch.eye(3).to_sparse(), "quantized": quantized}}
    torch.save({"model": state}, tmp_path / "x.pt")

    found = open_checkpoint(tmp_path / "x.pt")

    assert list(found.tensors) == ["w"]
    assert found.all_notes() == (
        "2 tensors are not read, being sparse, quantized, of an unknown type or the like:"
        " first layer.sparse (sparse_tensor)",
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "x.ckpt", "x.npy", "model.safetensors.index.json"]
)
def test_a_pointer_of_git_lfs_is_named_in_every_format(tmp_path, name):
    pointer(tmp_path / name)

    for path in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match=r"is a pointer of git-lfs, .*: git lfs pull"):
            open_checkpoint(path)


def odd_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that quantized tensors will go away, that nested ones may change
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        sparse_row = torch.eye(3).to_sparse_csr()
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {"s": torch.eye(3).to_sparse(), "r": sparse_row, "q": quantized, "n": nested, "j": jagged}


def test_what_is_not_read_is_said_wherever_it_stands(tmp_path, capsys):
    torch.save({"w": torch.ones(3), **odd_tensors()}, tmp_path / "x.pt")
    words = [["verify", str(tmp_path / "x.pt")], ["compare", *[str(tmp_path / "x.pt")] * 2]]

    printed = []
    for action in words:
        main(["checkpoint", *action])
        printed.append(capsys.readouterr().out)

    assert printed[0].startswith(
        "whole as far as it is read: 1 tensors; 1 pieces\n  note       5 tensors are not read, being sparse,"
    )
    assert printed[1].startswith("the same model, as far as it is read: 5 tensors are not\n")
    assert main(["checkpoint", *words[1], "--exit-code"]) == 4


def test_a_file_of_tensors_that_are_not_read_says_so(tmp_path):
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "x.pt")

    with pytest.raises(
        CheckpointError, match=r"holds no tensor: .*; 1 tensor is not read, .*: first s \(sparse_tensor\)"
    ):
        open_checkpoint(tmp_path / "x.pt")
