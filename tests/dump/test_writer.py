"""The files of a dump: contract, permissions, quota, and what is left of a killed process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from tests.full_disk import room_for
from trainermon.core.errors import DumpError
from trainermon.dump.encode import encode
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.writer import DumpWriter

KEY = "Module.fc.Linear.forward.0"


def add(writer, tensor, key=KEY, **options):
    leaves = []
    form = encode(tensor, "input.0", leaves)
    writer.record(key, leaves)
    writer.add(key, {"input_args": [form], "input_kwargs": {}, "output": []}, **options)


def test_files_are_msprobes_and_private(tmp_path):
    writer = DumpWriter(tmp_path / "dumps/a/rank0", DumpInfo(id="a", step=3), task="tensor")
    add(writer, torch.tensor([3.0, -4.0]), stack=["File a.py, line 1, in f, \n x"])
    add(writer, torch.ones(1), key="Module.fc.Linear.forward.1", parent=KEY, stack=["File a.py, line 1, in f, \n x"])
    writer.add_root("Module.root.Net.forward.0", {"output": []})

    info = writer.close(micro_steps=2)

    folder = tmp_path / "dumps/a/rank0"
    assert info.complete
    assert info.micro_steps == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "construct.json", "dump.json", "dump_info.json", "dump_tensor_data", "sources.json", "stack.json",
    ]  # fmt: skip
    dumped = json.loads((folder / "dump.json").read_text())
    assert {name: dumped[name] for name in ("task", "level", "framework")} == {
        "task": "tensor", "level": "L0", "framework": "pytorch",
    }  # fmt: skip
    assert dumped["dump_data_dir"] == str(folder / "dump_tensor_data")
    form = dumped["data"][KEY]["input_args"][0]
    assert form.items() >= {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 3.0, "Min": -4.0, "Mean": -0.5,
        "Norm": 5.0, "requires_grad": False, "data_name": f"{KEY}.input.0.pt",
    }.items()  # fmt: skip
    assert json.loads((folder / "construct.json").read_text()) == {KEY: None, "Module.fc.Linear.forward.1": KEY}
    assert json.loads((folder / "stack.json").read_text()) == {
        "0": [[KEY, "Module.fc.Linear.forward.1"], ["File a.py, line 1, in f, \n x"]]
    }
    assert list(json.loads((folder / "dump_info.json").read_text())["root"]) == ["Module.root.Net.forward.0"]
    for path in (tmp_path / "dumps").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_saved_tensors_are_dense_small_and_safe_to_load(tmp_path):
    whole = torch.arange(10000.0, requires_grad=True).reshape(100, 100)
    view = whole.t()[2:4, ::2]
    writer = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    add(writer, view)
    writer.close()

    (path,) = (tmp_path / "dump_tensor_data").iterdir()
    saved = torch.load(path, weights_only=True)

    assert torch.equal(saved, view.detach())
    assert saved.is_contiguous()
    assert not saved.requires_grad
    assert path.stat().st_size < 4096


def test_one_tensor_in_two_places_is_stored_once(tmp_path):
    tensor = torch.ones(1000)
    writer = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    add(writer, tensor)
    add(writer, tensor, key="Module.next.Linear.forward.0")
    writer.close()

    first, second = sorted((tmp_path / "dump_tensor_data").iterdir())
    assert first.samefile(second)
    assert torch.equal(torch.load(second, weights_only=True), tensor)
    records = [entry.inputs[0] for entry in read_dump(tmp_path).entries]
    assert records[0].order == records[1].order
    assert records[1].norm == pytest.approx(1000**0.5)


def test_beyond_the_quota_statistics_go_on(tmp_path):
    writer = DumpWriter(tmp_path, DumpInfo(), task="tensor", max_bytes=12_000)
    for call in range(5):
        add(writer, torch.full((1000,), float(call)), key=f"Module.fc.Linear.forward.{call}")

    info = writer.close()

    dump = read_dump(tmp_path)
    assert info.over_quota == dump.info.over_quota == 3
    assert len(dump.entries) == 5
    assert [entry.inputs[0].data_path is not None for entry in dump.entries] == [True, True, False, False, False]
    assert dump.entries[4].inputs[0].max == 4


@pytest.mark.parametrize("name", ["a/../b", "x" * 400, "ключ", "sp ace"])
def test_odd_names_stay_in_the_folder(tmp_path, name):
    writer = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    add(writer, torch.ones(2), key=f"Module.{name}.L.forward.0")
    writer.close()

    (entry,) = read_dump(tmp_path).entries
    assert entry.inputs[0].data_path.parent == tmp_path / "dump_tensor_data"
    assert torch.equal(torch.load(entry.inputs[0].data_path, weights_only=True), torch.ones(2))


def test_a_killed_process_leaves_all_that_was_flushed(tmp_path):
    script = """
        import os, signal, sys, torch
        from pathlib import Path
        from tests.dump.test_writer import add
        from trainermon.dump.files.records import DumpInfo
        from trainermon.dump.writer import DumpWriter
        writer = DumpWriter(Path(sys.argv[1]), DumpInfo(id="a", step=4), task="tensor")
        for call in range(7):
            add(writer, torch.full((3,), float(call)), key=f"Module.fc.Linear.forward.{call}", stack=["here"])
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL

    with (tmp_path / "dump.partial.jsonl").open("ab") as file:
        file.write(b'{"key": "Module.fc.Linear.forward.7", "val')
    dump = read_dump(tmp_path)

    assert not dump.info.complete
    assert (dump.info.id, dump.info.step) == ("a", 4)
    assert [entry.inputs[0].max for entry in dump.entries] == list(range(7))
    assert dump.entries[6].stack == ("here",)
    assert torch.equal(torch.load(dump.entries[6].inputs[0].data_path, weights_only=True), torch.full((3,), 6.0))


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_lines_wait_for_512_of_them_or_for_the_end_of_the_script(tmp_path, end):
    script = f"""
        import os, signal, sys, torch
        from pathlib import Path
        from tests.dump.test_writer import add
        from trainermon.dump.files import lines
        from trainermon.dump.files.records import DumpInfo
        from trainermon.dump.writer import DumpWriter
        lines.MAX_WAIT_S = 1e9
        writer = DumpWriter(Path(sys.argv[1]), DumpInfo())
        for call in range(600):
            add(writer, torch.ones(1), key=f"Module.fc.Linear.forward.{{call}}")
        {end}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False)

    assert len(read_dump(tmp_path).entries) == (600 if "raise" in end else 512)


def test_lines_wait_a_quarter_of_a_second(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path, DumpInfo())
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    writer.flush()
    add(writer, torch.ones(1))
    assert read_dump(tmp_path).entries == ()

    monkeypatch.setattr(time, "monotonic", lambda: clock + 0.3)
    add(writer, torch.ones(1), key="Module.fc.Linear.forward.1")

    assert len(read_dump(tmp_path).entries) == 2
    writer.close()


def test_an_entry_without_json_costs_itself_only(tmp_path):
    writer = DumpWriter(tmp_path, DumpInfo())
    writer.add("Module.lost.Linear.forward.0", {"output": [{(1, 2): 0}]})
    add(writer, torch.ones(2))

    info = writer.close()

    assert info.errors == 1
    assert info.first_error == "TypeError: first argument must be a string, not tuple"
    assert [entry.key for entry in read_dump(tmp_path).entries] == [KEY]


def test_a_second_dump_in_the_same_place_replaces_the_first(tmp_path):
    for value in (1.0, 2.0):
        writer = DumpWriter(tmp_path, DumpInfo(), task="statistics")
        add(writer, torch.tensor([value]))
        writer.close()

    (entry,) = read_dump(tmp_path).entries
    assert entry.inputs[0].max == 2


def test_a_full_disk_costs_one_entry(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path, DumpInfo())
    add(writer, torch.ones(2))
    writer.flush()
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, text: real(file, text[:20]))
    add(writer, torch.ones(2), key="Module.lost.Linear.forward.0")
    with pytest.raises(DumpError, match="no space left for 1 entries"):
        writer.flush()
    monkeypatch.undo()
    add(writer, torch.ones(2), key="Module.next.Linear.forward.0")
    writer.count_error(OSError("full"))

    info = writer.close()

    assert (info.errors, info.first_error) == (1, "OSError: full")
    assert [entry.key for entry in read_dump(tmp_path).entries] == [KEY, "Module.next.Linear.forward.0"]


def test_a_disk_that_takes_nothing_is_named(tmp_path):
    with room_for(0), pytest.raises(DumpError, match=rf"entries in {tmp_path} are lost: .*File too large"):
        DumpWriter(tmp_path, DumpInfo())


def test_a_full_disk_leaves_no_half_of_the_sources(tmp_path):
    code = tmp_path / "long.py"
    code.write_text("def f():\n" + f"    x = {'y' * 40} + {'z' * 40}\n" * 190)
    writer = DumpWriter(tmp_path / "dump", DumpInfo())
    add(writer, torch.ones(2), stack=[f"File {code}, line 3, in f, \n x"])
    with room_for(9000):
        info = writer.close()

    assert "File too large" in info.first_error
    assert not (tmp_path / "dump/sources.json").exists()
    assert [entry.key for entry in read_dump(tmp_path / "dump").entries] == [KEY]


def test_a_tensor_that_cannot_be_saved_keeps_its_statistics(tmp_path):
    writer = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    with room_for(100):
        add(writer, torch.tensor([1.0, 3.0]))

    info = writer.close()

    record = read_dump(tmp_path).entries[0].inputs[0]
    assert (record.max, record.data_path) == (3.0, None)
    assert info.errors > 0
    assert "no space left" in info.first_error
    assert not list((tmp_path / "dump_tensor_data").iterdir())


class Hollow(torch.Tensor):
    """A tensor whose elements cannot be reached."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise RuntimeError("there is nothing in it")


def test_a_tensor_without_statistics_costs_only_its_own(tmp_path):
    writer = DumpWriter(tmp_path, DumpInfo())
    leaves = []
    forms = [encode(Hollow(), "input.0", leaves), encode(torch.full((2,), 5.0), "input.1", leaves)]
    writer.record(KEY, leaves)
    writer.add(KEY, {"input_args": forms, "input_kwargs": {}, "output": []})

    info = writer.close()

    (entry,) = read_dump(tmp_path).entries
    assert [(record.shape, record.max) for record in entry.inputs] == [((2,), None), ((2,), 5.0)]
    assert (info.errors, info.first_error != "", info.complete) == (1, True, False)


def test_a_dump_in_the_place_of_another_one_has_its_own_tensors(tmp_path):
    first = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    shared = torch.ones(2)
    add(first, shared, key="Module.a.A.forward.0")
    add(first, shared, key="Module.b.B.forward.0")  # another name of the same file
    first.close()
    second = DumpWriter(tmp_path, DumpInfo(), task="tensor")
    add(second, torch.full((2,), 5.0), key="Module.a.A.forward.0")
    add(second, torch.full((2,), 7.0), key="Module.b.B.forward.0")
    second.close()

    entries = read_dump(tmp_path).entries
    paths = [entry.inputs[0].data_path for entry in entries]
    assert [torch.load(path, weights_only=True)[0].item() for path in paths] == [5.0, 7.0]


def test_wrong_task_and_unwritable_place_are_refused(tmp_path):
    with pytest.raises(DumpError, match="task of a dump is 'md5', expected one of statistics, tensor"):
        DumpWriter(tmp_path, DumpInfo(), task="md5")
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="cannot write a dump"):
        DumpWriter(tmp_path / "file/below", DumpInfo())


def test_info_survives_the_round_trip(tmp_path):
    info = DumpInfo(id="a", step=1, attempt=2, rank=3, reason="r", notes=("n",))
    written = DumpWriter(tmp_path, info).close(replay=True, uncovered="u")

    assert read_dump(tmp_path).info == written
    assert dataclasses.replace(written, complete=False, bytes_written=0, replay=False, uncovered="") == (
        dataclasses.replace(info, complete=False)
    )
