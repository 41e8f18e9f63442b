"""Scripts of collectives: two real ranks recorded them, two others repeat them, and one runs with torch alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.analysis.check import collective_ranks
from tests.analysis.script import script_ranks
from tests.ranks import run_ranks
from trainermon.cli import main

REPEATED = ["all_reduce.0", "all_reduce.1", "all_reduce.2", "all_reduce.3", "broadcast.0", "reduce.0", "gather.0",
            "all_gather.0", "all_gather_into_tensor.0", "reduce_scatter_tensor.0"]  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    run_ranks(Path(collective_ranks.__file__), str(folder))
    return folder / "dump" / "step0"


def script_of(ranks, name, folder, *words):
    status = main(["script", str(ranks / "rank0"), f"Distributed.{name}", "-o", str(folder / name), *words])
    assert status == 0
    [script] = (folder / name).glob("*.py")
    return script


def test_two_ranks_repeat_each_collective(ranks, tmp_path, capsys):
    for name in REPEATED:
        script_of(ranks, name, tmp_path)
    printed = capsys.readouterr().out
    run_ranks(Path(script_ranks.__file__), str(tmp_path))

    said = [(tmp_path / f"rank{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert not [line for lines in said for line in lines if not line.startswith("True ")]
    assert [sum("right" in line for line in lines) for lines in said] == [11, 10]  # all_gather and gather give two
    assert printed.count("recorded, rank 0 of its group: pass") == len(REPEATED) - 1  # of reduce, rank 1 has the result
    assert "error" not in printed


def test_a_wrong_collective_is_found_with_torch_alone(ranks, tmp_path, capsys):
    step = shutil.copytree(ranks, tmp_path / "step")
    path = step / "rank1" / "dump_tensor_data" / "Distributed.all_reduce.0.forward.output.0.pt"
    whole = torch.load(path, weights_only=True)
    path.unlink()
    whole[7] += 1
    torch.save(whole, path)
    script = script_of(step, "all_reduce.0", tmp_path, "--pytest")
    assert "trainermon" not in script.read_text()
    printed = capsys.readouterr().out

    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)

    assert "recorded, rank 0 of its group: pass\nrecorded, rank 1 of its group: error" in printed
    assert "recorded, rank 1, result 0: wrong in 1 of 300 elements; at 7" in done.stdout, done.stderr
    assert done.stdout.count("again, rank") == done.stdout.count("right") - 1 == 2
    assert done.returncode == 0  # gloo here is sound
    assert "def test_the_result_is_right():" in script.read_text()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("all_reduce.77", [], "has no collective Distributed.all_reduce.77; did you mean Distributed.all_reduce."),
        ("send.0", [], "and no send"),
        ("all_reduce.0.backward", [], "has no backward that could be run again"),
        ("all_reduce.0", ["--shrink"], "--shrink: only calls of functions, not Distributed.all_reduce.0"),
        ("all_reduce.0", ["--data", "random"], "--data random: only calls of functions"),
    ],
)
def test_what_cannot_be_repeated_is_refused(ranks, name, words, message, capsys):
    assert main(["script", str(ranks / "rank0"), f"Distributed.{name}", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_dump_of_one_rank_is_refused(ranks, tmp_path, capsys):
    alone = shutil.copytree(ranks / "rank0", tmp_path / "rank0")

    assert main(["script", str(alone), "Distributed.all_reduce.0"]) == 1
    assert "the dump of rank 1 is not beside it" in capsys.readouterr().err
