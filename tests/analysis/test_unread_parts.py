"""Where a part of the input cannot be read, no command says that all is well, in its status or its headline."""

import json
import zipfile

import numpy as np
import pytest
import torch

from tests.analysis.compare.dumps import write_dump
from tests.analysis.damaged_dumps import cut_off, half_written, run_of
from tests.recorded_dumps import recorded
from trainermon import cli, rl
from trainermon.cli import main


def two_dumps(folder, lose):
    target, golden = run_of(folder / "target"), run_of(folder / "golden")
    lose(target / "step0" / "rank1")
    return [str(target), str(golden)]


def one_of_two_tensors(folder):
    """A dump with tensors of which one file is cut."""
    dump = recorded(folder, lambda: torch.relu(torch.tanh(torch.arange(3.0))))
    file = next(path for path in (dump / "dump_tensor_data").iterdir() if "tanh" in path.name)
    file.write_bytes(file.read_bytes()[:50])
    return [str(dump)]


def details(folder):
    """What `check run` wrote of two devices; of one a call is gone."""
    dump = recorded(folder / "dump", lambda: torch.relu(torch.tanh(torch.arange(3.0))))
    for side in "ab":
        assert main(["check", "run", str(dump), "-o", str(folder / side), "-f", "csv"]) == 0
    a, b = (next((folder / side).rglob("accuracy_checking_details_*.csv")) for side in "ab")
    b.write_text("".join(line for line in b.read_text().splitlines(keepends=True) if "relu" not in line))
    return [str(a), str(b)]


def cut_dump(folder):
    dump = write_dump(folder / "dump", {})
    cut_off(dump)
    return [str(dump)]


def followed(folder):
    recorded(folder / "dumps", lambda: torch.tanh(torch.arange(3.0)))
    half_written(next((folder / "dumps").rglob("dump.json")).parent)
    return [str(folder / "dumps" / "dump"), "--once", "--settle", "0"]


def packs(folder):
    for side in "ab":
        assert main(["env", "collect", "-o", str(folder / f"{side}.zip")]) == 0
    with zipfile.ZipFile(folder / "b.zip") as pack, zipfile.ZipFile(folder / "cut.zip", "w") as cut:
        for item in pack.infolist():
            content = pack.read(item)
            cut.writestr(item, content[: len(content) // 2])
    return [str(folder / "a.zip"), str(folder / "cut.zip")]


def signs(folder):
    for side, steps in (("a", (0, 1)), ("b", (0,))):
        for step in steps:
            at = folder / side / "rank0" / f"step{step}"
            at.mkdir(parents=True)
            np.save(at / "weight.npy", np.arange(8) > 3)
    return [str(folder / side) for side in "ab"]


def tensors(folder):
    for side in "ab":
        (folder / side).mkdir()
        for name in "xy":
            np.save(folder / side / f"{name}.npy", np.ones(3))
    (folder / "b" / "x.npy").write_bytes(b"junk")
    return [str(folder / side) for side in "ab"]


def checkpoints(folder):
    odd = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for side in "ab":
        torch.save({"w": torch.ones(4), "odd": odd}, folder / f"{side}.pt")
    return [str(folder / f"{side}.pt") for side in "ab"]


def reports(folder):
    for rank in range(2):
        watch = rl.Watch(folder, rank=rank)
        for step in range(2):
            logprobs, ids = np.full((4, 16), -1.0), np.arange(64).reshape(4, 16)
            with watch.step(step):
                watch.rollout(logprobs=logprobs, ids=ids, mask=ids >= 0)
                watch.train(logprobs=logprobs, ids=ids, mask=ids >= 0)
            watch.report(step)
        watch.close()
    path = folder / "rank1" / "reports.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return [str(folder)]


def stages(folder):
    for side in "ab":
        rl.StageRecorder(folder / side).save({"reward": np.ones(3), "response": np.ones(3)})
    next((folder / "b").rglob("reward.npy")).write_bytes(b"junk")
    return [str(folder / side) for side in "ab"]


def logged(folder):
    text = json.dumps({"rollout": {"temperature": 1.0}})
    for side, length in (("a", len(text)), ("b", len(text) // 2)):
        (folder / f"{side}.json").write_text(text[:length])
    return [str(folder / f"{side}.json") for side in "ab"]


READS_NO_FILE = {"check ops"}
ELSEWHERE = {"rl align"}
"""`tests/analysis/rl/test_align.py`: it needs two models."""
INPUTS = {
    "diagnose": lambda folder: two_dumps(folder, half_written)[:1],
    "compare": lambda folder: two_dumps(folder, half_written),
    "graph": lambda folder: two_dumps(folder, cut_off),
    "source": lambda folder: two_dumps(folder, cut_off),
    "check run": one_of_two_tensors,
    "check against": details,
    "check overflow": cut_dump,
    "check follow": followed,
    "env compare": packs,
    "gradients compare": signs,
    "tensor diff": tensors,
    "checkpoint compare": checkpoints,
    "rl show": reports,
    "rl compare": stages,
    "rl config": logged,
}
SAID = (
    "not read", "not compared", "not whole", "not judged", "not JSON", "cannot be read", "could not be read",
    "as far as", "1 unmatched", "has no report of 1 of the steps", "expected json",
)  # fmt: skip


def commands_with_a_status():
    parser = cli.build_parser(tuple(cli.COMMANDS))
    found = (leaf for leaf in cli.leaves(parser) if "--exit-code" in leaf.format_help())
    return {leaf.prog.removeprefix("trainermon ") for leaf in found}


def test_every_command_that_has_a_status_is_tried():
    assert commands_with_a_status() == set(INPUTS) | READS_NO_FILE | ELSEWHERE


@pytest.mark.parametrize("command", INPUTS)
def test_a_part_that_cannot_be_read_is_in_the_status_and_the_headline(command, tmp_path, capsys):
    given = INPUTS[command](tmp_path)
    capsys.readouterr()

    status = main([*command.split(), *given, "--exit-code"])

    shown = capsys.readouterr()
    headline = " ".join(shown.out.splitlines()[:2]) if status != 1 else shown.err
    assert status in (1, 3, 4)
    assert any(word in headline for word in SAID), headline
