"""One model saved every way, by the packages themselves, is the same in every pair, and a flipped bit is found."""

from __future__ import annotations

import itertools
import warnings
from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.cli import main

FORMATS = ("torch", "torch with arguments", "safetensors", "hf sharded", "dcp")
CHANGED = "layers.1.fc.weight"


def model():
    generator = torch.Generator().manual_seed(5)
    tensors = {f"layers.{layer}.fc.weight": torch.randn(12, 7, generator=generator) for layer in range(3)}
    return {"embed.weight": torch.randn(9, 7, generator=generator, dtype=torch.float32).bfloat16(), **tensors}


def save(tensors, name, folder):
    """Save a model as `name` says, and return its path."""
    folder.mkdir(parents=True)
    if name == "torch":
        torch.save(tensors, folder / "model.pt")
    elif name == "torch with arguments":
        torch.save({"model": tensors, "args": Namespace(lr=0.1)}, folder / "model.pt")
    elif name == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif name == "hf sharded":
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(tensors, folder, max_shard_size=600)
        return folder
    elif name == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is one process
            save_distributed({"model": tensors}, checkpoint_id=folder, no_dist=True)
        return folder
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    return {name: save(model(), name, folder / str(number)) for number, name in enumerate(FORMATS)}


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped")
    changed = model()
    changed[CHANGED].view(torch.int32)[7, 3] ^= 1
    return {name: save(changed, name, folder / str(number)) for number, name in enumerate(FORMATS)}


@pytest.mark.parametrize("pair", list(itertools.combinations(FORMATS, 2)), ids=" and ".join)
def test_a_model_is_the_same_in_every_two_formats(saved, pair):
    found = compare_checkpoints(*(saved[name] for name in pair), options=CheckpointOptions(jobs=1))

    assert found.headline == "the same model"
    assert {tensor.name: tensor.count for tensor in found.tensors} == {n: t.numel() for n, t in model().items()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_is_found_in_every_format(saved, flipped, name):
    (found,) = [
        tensor
        for tensor in compare_checkpoints(saved["torch"], flipped[name], options=CheckpointOptions(jobs=1)).tensors
        if tensor.unequal
    ]

    assert (found.name, found.unequal, found.first_at, found.ulps) == (CHANGED, 1, (7, 3), 1)


@pytest.mark.parametrize("name", ["dcp", "torch with arguments"])
def test_tensor_show_reads_checkpoints_too(saved, name, capsys):
    assert main(["tensor", "show", f"{saved[name]}::layers.1"]) == 0

    assert "[12, 7]" in capsys.readouterr().out
