"""A gradient that is finite in one run alone: its signs may all agree, so what else is stored has to tell."""

import csv
import json

import numpy as np
import pytest
import torch

from tests.analysis.gradients.test_compare import part_of, write_whole
from trainermon import GradientMonitor
from trainermon.cli import main
from trainermon.core.gradient_signs import SignsHeader, signs_path, write_signs

SOUND = np.array([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])


def probed(folder, values, *, kind):
    """Write signs of `w`, which has the values, and of a sound `v`; what else there is depends on the kind.

    `probe`: as ours writes them. `old`: as ours did, without the names of what is infinite. `msprobe`: with its
    summary, whose extremes are those of torch. `npy`: without it.
    """
    both = {"v": SOUND, "w": values}
    parts = [part_of(name, each.shape, (0, 0), each.shape, each) for name, each in both.items()]
    infinite = tuple(name for name, each in both.items() if np.isinf(each).any())
    if kind in ("probe", "old"):
        header = SignsHeader(step=0, rank=0, infinite=infinite if kind == "probe" else None)
        write_signs(signs_path(folder, 0, 0), header, parts)
        return str(folder)
    (folder / "rank0" / "step0").mkdir(parents=True)
    for name, each in both.items():
        np.save(folder / "rank0" / "step0" / f"{name}.npy", each > 0)
    if kind == "msprobe":
        rows = "".join(f"{name},{each.max()},{each.min()},1.0,[]\n" for name, each in both.items())
        (folder / "rank0" / "grad_summary_0.csv").write_text(f"param_name,max,min,norm,shape\n{rows}")
    return str(folder)


def compared(tmp_path, ours, theirs, kind, capsys):
    sides = [probed(tmp_path / side, values, kind=kind) for side, values in (("a", ours), ("b", theirs))]
    status = main(["gradients", "compare", *sides, "-o", str(tmp_path / "out"), "--exit-code"])
    return status, capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize("kind", ["probe", "msprobe"])
@pytest.mark.parametrize("side", ["first", "second"])
def test_infinities_of_one_run_alone_are_a_fault_though_all_signs_agree(side, kind, tmp_path, capsys):
    ours, theirs = SOUND * np.inf, SOUND
    if side == "second":
        ours, theirs = theirs, ours

    found = compared(tmp_path, ours, theirs, kind, capsys)

    assert found == (3, f"gradients part at step 0: w: Inf in the {side} run alone")
    (fault,) = json.loads((tmp_path / "out/gradients.json").read_text())["faults"]
    assert (fault["parameter"], fault["similarity"]) == ("w", 1.0)
    with (tmp_path / "out/gradients.csv").open(newline="") as text:
        marked = {row["parameter"]: row["nonfinite"] for row in csv.DictReader(text) if row["fault"]}
    assert marked == {"w": f"Inf in the {side} run alone"}
    assert f"Inf in the {side} run alone" in (tmp_path / "out/gradients.html").read_text()


@pytest.mark.parametrize("kind", ["probe", "old", "msprobe"])
def test_nan_in_place_of_zero_is_a_fault(kind, tmp_path, capsys):
    zeros, nans = SOUND.copy(), SOUND.copy()
    zeros[0, 0], nans[0, 0] = 0.0, np.nan

    status, line = compared(tmp_path, zeros, nans, kind, capsys)

    assert (status, line) == (3, "gradients part at step 0: w: NaN in the second run alone")


@pytest.mark.parametrize("kind", ["old", "npy"])
def test_where_nothing_tells_of_infinities_the_line_says_so(kind, tmp_path, capsys):
    status, line = compared(tmp_path, SOUND * np.inf, SOUND, kind, capsys)

    assert (status, line.partition("; signs ")[2]) == (0, "alone do not tell whether gradients are infinite")


def test_what_both_runs_have_is_no_fault(tmp_path, capsys):
    both = SOUND.copy()
    both[0, 0], both[1, 1] = np.nan, np.inf

    status, line = compared(tmp_path, both, both, "probe", capsys)

    assert status == 0
    assert line == "signs do not part in step 0; the least similar is v, 100.00% at step 0"


def test_parts_of_other_splits_are_put_together(tmp_path, capsys):
    write_whole(tmp_path / "b", 0, {"w": SOUND})
    broken = SOUND.copy()
    broken[1, 2] = np.nan
    for rank in range(2):
        part = part_of("w", SOUND.shape, (rank, 0), (1, 3), broken[rank : rank + 1])
        write_signs(signs_path(tmp_path / "a", 0, rank), SignsHeader(step=0, rank=rank), [part])

    assert main(["gradients", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 3
    assert "w: NaN in the first run alone" in capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize("values", [[np.inf, -np.inf, np.inf], [1.0, -2.0, np.inf]])
def test_the_probe_writes_what_is_infinite(values, tmp_path, capsys):
    for side, gradient in (("a", values), ("b", [1.0, -2.0, 3.0])):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        probe = {"task": "grad_probe", "dump_path": str(tmp_path / side), "grad_probe": {"grad_level": "L1"}}
        monitor = GradientMonitor(probe)
        monitor.monitor(torch.nn.ParameterDict({"w": weight}), optimizer)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        monitor.stop()

    status = main(["gradients", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"])

    assert status == 3
    assert "gradients part at step 0: w: Inf in the first run alone" in capsys.readouterr().out
