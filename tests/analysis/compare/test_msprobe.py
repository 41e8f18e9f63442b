"""Round trips with mindstudio-probe: dumps that it has just written, and its own compare beside ours.

It runs in a process of the environment that `make bench` makes; without it these tests are skipped.
"""

import json
import re

import pytest
import torch
from torch import nn

from tests.analysis.compare.record import OTHER_PYTHON, compare_with_msprobe, dump_with_msprobe
from trainermon import PrecisionDebugger
from trainermon.analysis.compare import Mode, compare
from trainermon.analysis.compare.output.tables import header, table
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OTHER_PYTHON.exists(), reason="needs mindstudio-probe: `make bench` installs it"),
]


def our_rows(target, golden):
    (comparison,) = compare(target, golden)
    return comparison, [dict(zip(header(comparison.mode), cells, strict=True)) for cells in table(comparison)]


def names(rows):
    return [(row["NPU Name"], row["Bench Name"]) for row in rows]


@pytest.mark.parametrize("mode", ["statistics", "md5", "tensor"])
def test_its_dumps_are_paired_as_it_pairs_them(mode, tmp_path):
    faulty, sound = (dump_with_msprobe(tmp_path / name, mode, factor) for name, factor in (("a", 1.5), ("b", 1)))

    comparison, ours = our_rows(faulty, sound)
    theirs = compare_with_msprobe(faulty, sound, tmp_path / "out")

    assert comparison.mode is {"statistics": Mode.STATISTICS, "md5": Mode.CHECKSUM, "tensor": Mode.TENSOR}[mode]
    assert names(ours) == names(theirs)
    assert set(theirs[0]) <= set(ours[0]), "columns of msprobe's that are missing"
    if mode == "tensor":
        hold_metrics(ours, theirs)
    if mode == "md5":
        equal = [
            [row["NPU MD5"] == row["BENCH MD5"] for row in rows if row["Bench Dtype"] != "N/A"]
            for rows in (ours, theirs)
        ]
        assert equal[0] == equal[1]


def hold_metrics(ours, theirs, least=500):
    compared = 0
    for mine, its in zip(ours, theirs, strict=True):
        for column in ("Cosine", "EucDist", "MaxAbsErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio"):
            try:
                expected = float(its[column])
            except ValueError:
                continue  # it gives no number for scalars
            assert mine[column] == pytest.approx(expected, rel=1e-4, abs=1e-6), (mine["NPU Name"], column)
            compared += 1
    assert compared > least


def test_missing_backward_calls_are_bridged_as_it_bridges_them(tmp_path):
    """Where no forward tells which backward is which."""
    sound = dump_with_msprobe(tmp_path / "b", "statistics", 1)
    gap = tmp_path / "gap"
    gap.mkdir()
    dump = json.loads((sound / "dump.json").read_text())
    for number in range(3):
        del dump["data"][f"Tensor.__rmul__.{number}.forward"]
    (sound / "dump.json").write_text(json.dumps(dump))
    del dump["data"]["Tensor.__rmul__.1.backward"]
    (gap / "dump.json").write_text(json.dumps(dump))

    _, ours = our_rows(sound, gap)
    assert names(ours) == names(compare_with_msprobe(sound, gap, tmp_path / "out"))


def test_it_pairs_the_dumps_of_ours_as_we_do(tmp_path):
    faulty, sound = (dump_of_ours(tmp_path / name, factor) for name, factor in (("a", 1.5), ("b", 1.0)))

    comparison, ours = our_rows(faulty, sound)
    theirs = compare_with_msprobe(faulty, sound, tmp_path / "out")

    assert names(ours) == names(theirs)
    assert [call.key for call in comparison.blamed] == ["Module.1.Scale.forward.0"]


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_it_pairs_functions_and_modules_of_our_debugger_as_we_do(task, tmp_path):
    faulty, sound = (debugged(tmp_path / name, factor, task) for name, factor in (("a", 1.5), ("b", 1.0)))

    comparison, ours = our_rows(faulty, sound)
    theirs = compare_with_msprobe(faulty, sound, tmp_path / "out")

    # it does not know gradients of keyword arguments, and calls these themselves otherwise where there are tensors
    known = [row for row in ours if not re.search(r"\.backward\.output\.\D", row["NPU Name"])]
    assert comparison.mode is Mode(task)
    assert names(known) == [tuple(name.replace(".kwargs.", ".input.") for name in pair) for pair in names(theirs)]
    assert [call.key for call in comparison.blamed] == ["Module.1.Scale.forward.0"]  # the factor is no input of it
    if task == "tensor":
        hold_metrics(known, theirs, least=60)


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def dump_of_ours(folder, factor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scale(factor), nn.Linear(8, 4))
    writer = DumpWriter(folder, DumpInfo())
    capture = ModuleCapture(model, writer)
    capture.attach()
    model(torch.randn(5, 8)).square().sum().backward()
    capture.detach()
    writer.close()
    return folder


def debugged(folder, factor, task):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scale(torch.tensor(factor)), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    debugger = PrecisionDebugger(dump_path=str(folder), level="mix", task=task)
    debugger.start(model)
    model(torch.randn(5, 8)).square().sum().backward()
    debugger.stop()
    debugger.close()
    (found,) = folder.glob("step0/*/dump.json")
    return found.parent
