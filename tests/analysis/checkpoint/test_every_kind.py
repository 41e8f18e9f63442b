"""Checkpoints with tensors of every dtype and layout: a change is found, or the tensor is said not to be read."""

import pytest
import torch

from tests.tensor_kinds import DAMAGES, numbers, saved_kinds, unchanged_by
from trainermon.analysis.checkpoint.comparison import CheckpointOptions, compare_checkpoints
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.checkpoint.verdicts import SAME, WeightVerdict

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change


def written(folder, name, values):
    torch.save(saved_kinds(values), folder / f"{name}.pt")
    return folder / f"{name}.pt"


def test_every_kind_is_read_or_named(tmp_path):
    found = open_checkpoint(written(tmp_path, "sound", numbers()))

    named = {name.partition(" (")[0] for name in found.unread}
    assert set(found.tensors) | named == set(saved_kinds(numbers()))
    assert not set(found.tensors) & named
    assert f"{len(named)} tensors are not read" in " ".join(found.all_notes())


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_is_equal(tmp_path, damage):
    sound = open_checkpoint(written(tmp_path, "sound", numbers()))
    other = open_checkpoint(written(tmp_path, "other", DAMAGES[damage](numbers())))

    found = compare_checkpoints(other, sound)

    equal = {weight.name for weight in found.tensors if weight.verdict in SAME}
    assert equal == unchanged_by(damage) & set(sound.tensors)


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage != "one element"])
def test_no_tolerance_calls_a_damaged_tensor_close(tmp_path, damage):
    sides = (DAMAGES[damage](numbers()), numbers())
    for name, values in zip(("other", "sound"), sides, strict=True):
        torch.save({"w": values}, tmp_path / f"{name}.pt")
    other, sound = (open_checkpoint(tmp_path / f"{name}.pt") for name in ("other", "sound"))

    (weight,) = compare_checkpoints(other, sound, options=CheckpointOptions(rtol=9.0)).tensors

    assert weight.verdict is WeightVerdict.DIFFERENT
