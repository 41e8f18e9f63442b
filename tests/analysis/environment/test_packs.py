"""Packs that are damaged or mean harm are refused in one line that names file, trouble and what to do."""

import json
import zipfile

import pytest

from trainermon.analysis.environment import packs
from trainermon.analysis.environment.packs import read_pack
from trainermon.core.environment.pack import EnvironmentPack, write_pack
from trainermon.core.errors import PackError


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def cut(path):
    zipped(path, {"env": json.dumps({"A": "1" * 1000})})
    path.write_bytes(path.read_bytes()[:-30])
    return path


def wrong_checksum(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("env", '{"A": "letters"}')
    path.write_bytes(path.read_bytes().replace(b"letters", b"LETTERS"))
    return path


BAD = {
    "cut": (cut, "not a whole zip file"),
    "checksum": (wrong_checksum, "not a whole zip file"),
    "no zip": (lambda path: path.write_text("hello") and path, "not a whole zip file"),
    "missing": (lambda path: path.with_name("nowhere.zip"), "no such file"),
    "bomb": (lambda path: zipped(path, {"env": b"\0" * (2 << 20)}), "unfolds to"),
    "upwards": (lambda path: zipped(path, {"../env": "{}"}), "leads out of the pack"),
    "root": (lambda path: zipped(path, {"/etc/env": "{}"}), "leads out of the pack"),
    "drive": (lambda path: zipped(path, {"C:\\env": "{}"}), "leads out of the pack"),
    "not UTF-8": (lambda path: zipped(path, {"env": b'{"A": "\xff"}'}), "not UTF-8"),
    "pip not UTF-8": (lambda path: zipped(path, {"pip": b"a=\xff"}), "not UTF-8"),
    "not JSON": (lambda path: zipped(path, {"env": "{"}), "not JSON"),
    "too deep": (lambda path: zipped(path, {"env": "[" * 100_000}), "not JSON"),
    "a log": (lambda path: path.with_name("run.log").write_text("") or path.with_name("run.log"), "found a text"),
    "a list": (lambda path: zipped(path, {"env": "[]"}), "found list, expected names and values"),
    "another zip": (lambda path: zipped(path, {"readme.txt": "x"}), "neither a pack of trainermon"),
    "another version": (
        lambda path: zipped(path, {"trainermon.json": '{"format": "trainermon environment", "version": 99}'}),
        "version 99",
    ),
    "no sections": (
        lambda path: zipped(
            path, {"trainermon.json": '{"format": "trainermon environment", "version": 1, "sections": 3}'}
        ),
        "no sections",
    ),
    "empty folder": (lambda path: path.parent, "no settings of an environment"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_pack_is_refused_in_one_line(case, tmp_path):
    make, said = BAD[case]
    path = make(tmp_path / "pack.zip")

    with pytest.raises(PackError, match=said) as caught:
        read_pack(path)

    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_pack_that_unfolds_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "MAX_BYTES", 1000)
    path = zipped(tmp_path / "pack.zip", {"env": json.dumps({"A": "1" * 2000})})

    with pytest.raises(PackError, match="expected at most 1,000"):
        read_pack(path)


def test_what_was_written_is_read(tmp_path):
    pack = EnvironmentPack(sections={"system": {"os": "x"}, "layout": {"tp": 1}}, ranks={0: {"layout": {"tp": 2}}})
    write_pack(tmp_path / "pack.zip", pack)

    found = read_pack(tmp_path / "pack.zip")

    assert found.sections["system"] == {"os": "x"}
    assert found.sections["layout"] == {"tp": 2}, "what the job showed comes before what was read"
    assert found.origin == "trainermon"
