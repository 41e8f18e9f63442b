"""Where one rank's dump or one file of several is damaged, the others are judged, and the first line names it."""

import argparse
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.analysis.checkpoint.assembled import save_alone
from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.damaged_dumps import CALL, half_written, run_of, without_file
from tests.recorded_dumps import recorded
from trainermon.analysis.compare import distributed
from trainermon.cli import main


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch):
    monkeypatch.setattr(distributed, "num_cores", lambda: 1)


def of_bytes(dump):
    (dump / "dump.json").write_bytes(bytes(range(256)))


def a_folder(dump):
    without_file(dump)
    (dump / "dump.json").mkdir()


def without_data(dump):
    (dump / "dump.json").write_text('{"data": 3}')


def of_no_entries(dump):
    (dump / "dump.json").write_text('{"task": "statistics", "level": "mix", "data": {"Functional.gelu.0.forward": 3}}')


def empty(dump):
    (dump / "dump.json").write_text("")


def cut_construct(dump):
    (dump / "construct.json").write_text('{"a": ')


def cut_info(dump):
    (dump / "dump_info.json").write_text('{"layout": ')


LOSSES = (without_file, half_written, of_bytes, a_folder, without_data, of_no_entries, empty, cut_construct, cut_info)
COMMANDS = {
    "diagnose": ("run",),
    "diagnose --against": ("run", "reference"),
    "compare": ("run", "reference"),
    "graph": ("run",),
    "graph against": ("run", "reference"),
    "source": ("run", "reference"),
    "check run": ("run",),
}


def words(command, folder):
    run, *reference = (str(folder / side) for side in COMMANDS[command])
    if command == "diagnose --against":
        return ["diagnose", run, "--against", *reference]
    return [*command.removesuffix(" against").split(), run, *reference]


def run_with_tensors(folder):
    for rank in range(3):
        dump = recorded(folder / f"of {rank}", lambda: torch.relu(torch.tanh(torch.arange(3.0))))
        shutil.copytree(dump, folder / "run" / "step0" / f"rank{rank}")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("lose", LOSSES)
def test_one_damaged_rank_is_named_in_the_first_line_and_the_status_is_unknown(lose, command, tmp_path, capsys):
    if command == "check run":
        run_with_tensors(tmp_path)
    for side in () if command == "check run" else COMMANDS[command]:
        run_of(tmp_path / side, ranks=3)
    lose(tmp_path / "run" / "step0" / "rank1")
    capsys.readouterr()

    assert main([*words(command, tmp_path), "--exit-code"]) == 4

    shown = capsys.readouterr().out
    first = shown.partition("\n")[0]
    assert "rank1" in first.replace("rank 1", "rank1")
    assert any(word in first for word in ("not", "no call", "no dump")), first
    assert main(words(command, tmp_path)) == 0


@pytest.mark.parametrize("command", ["diagnose --against", "compare", "graph against"])
def test_a_difference_on_another_rank_is_found_all_the_same(command, tmp_path, capsys):
    for side, value in (("run", 1.5), ("reference", 1.0)):
        run_of(tmp_path / side, ranks=2)
        call = {CALL: forward(tensor(), output=tensor(value=value))}
        write_dump(tmp_path / side / "step0" / "rank2", call)
    half_written(tmp_path / "run" / "step0" / "rank1")

    assert main([*words(command, tmp_path), "--exit-code"]) == 3

    first = capsys.readouterr().out.partition("\n")[0]
    assert CALL in first
    assert "rank 2" in first


@pytest.mark.parametrize("command", COMMANDS)
def test_where_no_dump_can_be_read_nothing_is_said_to_be_right(command, tmp_path, capsys):
    for side in COMMANDS[command]:
        run_of(tmp_path / side)
    for rank in range(2):
        half_written(tmp_path / "run" / "step0" / f"rank{rank}")

    status = main([*words(command, tmp_path), "--exit-code"])

    shown = capsys.readouterr()
    assert status == (4 if command in ("diagnose", "compare") else 1)
    assert any(word in shown.out + shown.err for word in ("not JSON", "JSONDecodeError", "Nothing is known of step 0"))


def test_one_damaged_rank_is_in_the_json_of_a_check(tmp_path, capsys):
    run_with_tensors(tmp_path)
    half_written(tmp_path / "run" / "step0" / "rank1")
    capsys.readouterr()

    main(["check", "run", str(tmp_path / "run"), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert [bool(one.get("failure")) for one in found] == [False, False, True]


HERE, THERE = {"a": torch.ones(8, 4), "c": torch.ones(5)}, {"b": torch.ones(5, 6)}


def indexed(folder):
    save_file(HERE, folder / "model-1.safetensors")
    save_file(THERE, folder / "model-2.safetensors")
    files = {"model-1.safetensors": HERE, "model-2.safetensors": THERE}
    weight_map = {name: file for file, state in files.items() for name in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "model-2.safetensors"


def plain(folder):
    torch.save(HERE, folder / "x.pt")
    torch.save(THERE, folder / "y.pt")
    return folder / "y.pt"


def arrays(folder):
    torch.save(HERE, folder / "x.pt")
    np.save(folder / "z.npy", np.ones(400))
    return folder / "z.npy"


def distributed_parts(folder):
    save_alone({"model": HERE}, folder)
    return next(folder.glob("*.distcp"))


def tensor_parallel(folder):
    for rank in range(2):
        at = folder / f"mp_rank_0{rank}"
        at.mkdir()
        state = {"args": argparse.Namespace(tensor_model_parallel_size=2), "model": {"w": torch.ones(4, 4)}}
        torch.save(state, at / "model_optim_rng.pt")
    return at / "model_optim_rng.pt"


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file):
    file.write_bytes(b"")


def rubbish(file):
    file.write_bytes(b"hello" * 40)


@pytest.mark.parametrize("lose", [cut, emptied, rubbish])
@pytest.mark.parametrize(
    ("make", "left"), [(indexed, 2), (plain, 2), (arrays, 2), (distributed_parts, 0), (tensor_parallel, 0)]
)
def test_one_damaged_file_of_a_checkpoint_is_what_verify_finds(make, left, lose, tmp_path, capsys):
    file = make(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    lose(file)
    capsys.readouterr()

    assert main(["checkpoint", "verify", str(tmp_path)]) == 3

    first = capsys.readouterr().out.partition("\n")[0]
    assert first.startswith(f"not whole: {file}")
    assert f"; {left} tensors are there" in first if left else first.endswith("; no tensor was verified")
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["whole"] is False
