"""What was appended is read back, however the file was torn or written by others."""

import json
import os
import stat

import pytest

from trainermon.core.ledger import Ledger


def test_entries_come_back_in_their_order_and_belong_to_the_owner(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path).append({"a": "Größe"}, [1, None])
    Ledger(path).append("half \ud800")

    assert path.read_bytes().decode() == '{"a": "Größe"}\n[1, null]\n"half ?"\n'
    assert Ledger(path).read() == [{"a": "Größe"}, [1, None], "half ?"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n": 1}\n\xff\n' + b"[" * 500_000 + b'\n\n{"m": 2}\n3\n{"n": 4')

    assert Ledger(path).read(lambda entry: entry["n"]) == [1]

    assert f"5 lines of {path} cannot be read and are left out" in caplog.text


def test_there_is_nothing_in_a_file_that_is_not_there(tmp_path):
    assert Ledger(tmp_path / "ledger.jsonl").read() == []


def test_a_link_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic link"):
        Ledger(path).append({})

    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("sync", "expected"), [(False, []), (True, ["file", "file", "folder"])])
def test_what_must_last_is_brought_to_the_disk(tmp_path, monkeypatch, sync, expected):
    synced = []

    def fsync(descriptor):
        synced.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(tmp_path / "ledger.jsonl", sync=sync)

    ledger.append(1, 2)
    ledger.replace([3])

    assert [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [3]
    assert synced == expected


def test_what_the_disk_takes_only_in_part_is_an_error_and_costs_no_later_entry(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, lines: write(descriptor, lines[:4]))
        with pytest.raises(OSError, match="only 4 of 9 bytes were taken"):
            Ledger(path).append({"n": 1})

    Ledger(path).append({"n": 2})

    assert Ledger(path).read() == [{"n": 2}]
