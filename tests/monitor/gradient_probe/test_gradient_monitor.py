"""Task grad_probe against what msprobe 8.3.3 wrote of the same training, and where it must do better."""

import csv
import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainermon import GradientMonitor, PrecisionDebugger
from trainermon.analysis.gradients.runs import open_gradients
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.gradient_signs import read_signs

RECORDED = Path(__file__).with_name("recorded")


@pytest.fixture(autouse=True)
def no_debugger():
    yield
    PrecisionDebugger.close()


def config(tmp_path, level, **more):
    return {"task": "grad_probe", "dump_path": str(tmp_path), "grad_probe": {"grad_level": level, **more}}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def train(model, optimizer, *, seed=1, steps=3):
    """The training that msprobe's files were recorded of."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 7, generator=generator) * 3
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()


def rows(path):
    with path.open(encoding="utf-8-sig", newline="") as text:
        return list(csv.reader(text))


def assert_same_csv(found, expected):
    """Numbers to 1e-6 (msprobe sums squares in float32), everything else to the letter."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for one, two in zip(ours, theirs, strict=True):
            assert one == two or math.isclose(float(one), float(two), rel_tol=1e-6), (ours, theirs)


def test_the_files_are_those_that_msprobe_writes(tmp_path):
    model = make_model()
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config(tmp_path / "out", "L2", bounds=[-1, 0, 1], sign_format="npy")))
    PrecisionDebugger(str(config_path)).monitor(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for step in range(3):
        found = tmp_path / "out/rank0" / f"grad_summary_{step}.csv"
        assert_same_csv(rows(found), rows(RECORDED / f"L2_step{step}.csv"))
        assert found.read_bytes()[:3] == b"\xef\xbb\xbf"
    for file in (RECORDED / "step1").glob("*.npy"):
        assert (tmp_path / "out/rank0/step1" / file.name).read_bytes() == file.read_bytes()


def test_level_0_has_the_checksums_that_msprobe_writes(tmp_path):
    """Its column MD5 is the CRC-32 of the elements; the bits themselves are those of this machine's kernels."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientMonitor(config(tmp_path, "L0")).monitor(model, optimizer)
    train(model, optimizer, steps=1)

    found, recorded = rows(tmp_path / "rank0/grad_summary_0.csv"), rows(RECORDED / "L0_step0.csv")
    assert found.pop(0) == recorded.pop(0)
    for row, expected, parameter in zip(found, recorded, model.parameters(), strict=True):
        assert row.pop(1) == f"{zlib.crc32(parameter.grad.numpy().tobytes()):08x}"
        del expected[1]
    assert_same_csv(found, recorded)
    assert not (tmp_path / "signs").exists()


def test_training_is_not_changed_by_a_bit(tmp_path):
    plain, watched = make_model(), make_model()
    train(plain, torch.optim.AdamW(plain.parameters()))
    GradientMonitor(config(tmp_path, "L2")).monitor(watched)
    train(watched, torch.optim.AdamW(watched.parameters()))

    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_a_nan_hides_no_number_and_is_in_no_interval(tmp_path):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    GradientMonitor(config(tmp_path, "L2", bounds=[0.0])).monitor(model, optimizer)
    model.weight.grad = torch.tensor([[math.nan, 2.0, -3.0, 0.0]])
    optimizer.step()

    head, row = rows(tmp_path / "rank0/grad_summary_0.csv")
    assert dict(zip(head, row, strict=True)) == {
        "param_name": "weight",
        "(-inf, 0]": "0.5",
        "(0, inf)": "0.25",
        "=0": "0.25",
        "max": "2.0",
        "min": "-3.0",
        "norm": str(math.sqrt(13.0)),
        "shape": "[1, 4]",
    }
    assert read_signs(tmp_path / "signs/step0.rank0.bits").counts.tolist() == [[1, 1, 2]]


def test_two_optimizers_make_one_step(tmp_path):
    model = make_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rest = torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1)
    GradientMonitor(config(tmp_path, "L1")).monitor(model)
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward()
        first.step()
        rest.step()

    assert sorted(file.name for file in (tmp_path / "rank0").iterdir()) == ["grad_summary_0.csv", "grad_summary_1.csv"]
    assert len(rows(tmp_path / "rank0/grad_summary_1.csv")) == 1 + len(list(model.parameters()))


def test_steps_and_parameters_are_chosen_and_a_frozen_one_drops_out(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = config(tmp_path, "L1", param_list=["0.weight", "2"]) | {"step": [1, 2]}
    GradientMonitor(chosen).monitor(model, optimizer)
    train(model, optimizer, steps=2)
    model[0].weight.requires_grad_(requires_grad=False)
    train(model, optimizer, steps=1)

    found = open_gradients(tmp_path).steps
    assert sorted(found) == [1, 2]
    assert list(found[1][0]().parts) == ["0.weight", "2.weight", "2.bias"]
    assert list(found[2][0]().parts) == ["2.weight", "2.bias"]


def test_booleans_read_as_the_bitmaps(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientMonitor(config(tmp_path, "L1", sign_format="npy")).monitor(model, optimizer)
    train(model, optimizer, steps=1)

    ours = open_gradients(tmp_path).steps[0][0]()
    for name, pair in ours.bitmaps.items():
        theirs = np.load(tmp_path / f"rank0/step0/{name}.npy").ravel()
        assert (np.unpackbits(pair.positive.view(np.uint8), bitorder="little")[: theirs.size] == theirs).all()


def test_a_fault_ends_the_probe_and_not_the_training(tmp_path, caplog):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "rank0").write_text("a file where a folder is to be")
    GradientMonitor(config(tmp_path, "L1")).monitor(model, optimizer)
    train(model, optimizer)

    assert "rank0" in caplog.text
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grad_level": "L3"}, "grad_probe.level: found 'L3', expected 'L0' or 'L1' or 'L2'"),
        ({"bounds": [1, 0]}, "grad_probe.bounds: found .*, expected numbers that rise"),
        ({"sign_format": "pt"}, "grad_probe.sign_format: found 'pt', expected bits or npy"),
    ],
)
def test_wrong_options_are_refused(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        GradientMonitor({"dump_path": str(tmp_path), "grad_probe": wrong})


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(AttachError, match="found str, expected a module"):
        GradientMonitor(config(tmp_path, "L1")).monitor("model")  # type: ignore[arg-type]


def test_what_the_given_optimizer_does_not_step_is_left_out(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    GradientMonitor(config(tmp_path, "L1")).monitor(model, optimizer)
    train(model, optimizer, steps=1)

    assert [row[0] for row in rows(tmp_path / "rank0/grad_summary_0.csv")[1:]] == ["2.weight", "2.bias"]
