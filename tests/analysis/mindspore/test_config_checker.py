"""`ConfigChecker(model, fmk="mindspore")`: weights and inputs against numpy and torch's hashes; what a change shows."""

import json
import sys
import zipfile

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from trainermon import ConfigChecker
from trainermon.cli import main
from trainermon.core.errors import ConfigError
from trainermon.statistics.mindspore.positions import positional_hash_of, samples_hash_of

pytestmark = pytest.mark.mindspore

# What `trainermon.statistics.positions` gives for the same values as tensors of torch.
OF_TORCH = [
    (np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / np.float32(3), ("c168b549e6dac5e1", "8632e462f693789b")),
    (np.arange(10, dtype=np.int32), ("767771724a999a19", "5a0a9a0ad363f6c2")),
    (np.array([True, False, True]), ("f8166f4625ee1813", "638a3340358c40ab")),
    (np.array([1 + 2j, 3 - 1j], np.complex64), ("00163dd2473b475f", "303a8121194d013f")),
]


def training(change=0.0):
    """Return a model, and its input."""
    rng = np.random.default_rng(2)
    model = nn.SequentialCell(nn.Dense(4, 3), nn.LayerNorm((3,)))
    for parameter in model.get_parameters():
        parameter.set_data(ms.Tensor(rng.normal(size=parameter.shape).astype(np.float32) + np.float32(change)))
        change = 0.0  # of the first one
    return model, ms.Tensor(rng.normal(size=(5, 4)).astype(np.float32))


def packed(path, *changes):
    model, x = training(*changes)
    expected = model(x).asnumpy()
    checker = ConfigChecker(model, [], str(path), fmk="mindspore")
    found = model(x).asnumpy()
    model(x * 2)
    np.testing.assert_array_equal(found, expected)
    assert not any(cell._forward_pre_hook for _, cell in model.cells_and_names())
    return model, x, checker


@pytest.mark.parametrize(("values", "hashes"), OF_TORCH)
def test_hashes_are_torchs(values, hashes):
    assert (f"{positional_hash_of(values):016x}", f"{samples_hash_of(values):016x}") == hashes


def test_weights_and_inputs_are_recorded_once(tmp_path):
    model, x, _ = packed(tmp_path / "a.zip")

    with zipfile.ZipFile(tmp_path / "a.zip") as pack:
        [name] = [name for name in pack.namelist() if name.endswith("rank0.json") and "ranks" in name]
        shown = json.loads(pack.read(name))
        [weights] = [json.loads(pack.read(each)) for each in pack.namelist() if each.endswith("weight.json")]
    values = model[0].weight.asnumpy().astype(np.float64)
    [part] = shown["weights"]["0.weight"]["regions"].values()
    assert (part["sum"], part["sum_sq"]) == pytest.approx((values.sum(), (values**2).sum()), rel=1e-12)
    assert weights["0.weight"]["norm"] == pytest.approx(np.linalg.norm(values))
    assert set(shown["weights"]) == {parameter.name for parameter in model.get_parameters()}
    given = x.asnumpy().astype(np.float64)
    assert shown["data"]["0"]["args.0"]["sum"] == pytest.approx(given.sum(), rel=1e-12)
    assert list(shown["data"]) == ["0"]
    assert "torch" not in sys.modules


def test_one_changed_weight_is_what_a_comparison_finds(tmp_path, capsys):
    for name, change in (("a", 0.0), ("b", 0.0), ("c", 1e-6)):
        packed(tmp_path / f"{name}.zip", change)

    def compared(other):
        main(["env", "compare", str(tmp_path / "a.zip"), str(tmp_path / other)])
        return capsys.readouterr().out

    assert "0.weight" not in compared("b.zip")
    assert "0.weight" in compared("c.zip")


@pytest.mark.parametrize("model", ["model", [], [3]])
def test_what_is_no_cell_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"expected a mindspore\.nn\.Cell"):
        ConfigChecker(model, [], str(tmp_path / "a.zip"), fmk="mindspore")
