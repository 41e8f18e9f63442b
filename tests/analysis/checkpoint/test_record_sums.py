"""A bit that changed in a file of torch is found by the sum that torch wrote with it."""

import json
import math
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

from trainermon.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of saving without a process group

TENSORS = {"a": torch.arange(600.0).reshape(20, 30), "b": torch.full((7,), 3.5), "empty": torch.zeros(0)}


def saved(folder, form):
    """Save the tensors and return the path of the checkpoint and of the file of its elements."""
    if form == "pt":
        torch.save(TENSORS, folder / "model.pt")
        return folder / "model.pt", folder / "model.pt"
    save(dict(TENSORS), checkpoint_id=folder / "dcp", no_dist=True)
    (file,) = (folder / "dcp").glob("*.distcp")
    return folder / "dcp", file


def verdict(path, capsys):
    capsys.readouterr()
    status = main(["checkpoint", "verify", str(path), "--json"])
    return status, json.loads(capsys.readouterr().out) if status != 1 else None


@pytest.mark.parametrize("form", ["pt", "dcp"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_changed_within_elements_is_found(form, at, bit, tmp_path_factory, capsys):
    path, file = saved(tmp_path_factory.mktemp("checkpoint"), form)
    content = bytearray(file.read_bytes())
    elements = TENSORS["a"].numpy().tobytes()
    place = content.index(elements) + math.floor(at * len(elements))
    content[place] ^= 1 << bit
    file.write_bytes(content)

    status, said = verdict(path, capsys)

    assert (status, said["whole"], [tensor["name"] for tensor in said["wrong"]]) == (3, False, ["a"])
    assert "its CRC-32 is another" in said["wrong"][0]["faults"][-1]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_what_zipfile_finds_wrong_is_not_whole(at, bit, tmp_path_factory, capsys):
    path, file = saved(tmp_path_factory.mktemp("checkpoint"), "pt")
    content = bytearray(file.read_bytes())
    content[math.floor(at * len(content))] ^= 1 << bit
    file.write_bytes(content)
    try:
        with zipfile.ZipFile(file) as archive:
            is_wrong = archive.testzip() is not None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, UnicodeDecodeError, OverflowError):
        return  # no archive any more; what torch itself would say of it

    status, _ = verdict(path, capsys)

    assert status != 0 or not is_wrong


@pytest.mark.parametrize("form", ["pt", "dcp"])
def test_a_record_that_is_no_tensor_is_named(form, tmp_path, capsys):
    path, file = saved(tmp_path, form)
    content = bytearray(file.read_bytes())
    content[content.index(b"serialization_id") + 80] ^= 1  # the content stands behind the name and its padding
    file.write_bytes(content)
    with zipfile.ZipFile(file) as archive:
        name = archive.testzip() if form == "pt" else "serialization_id"
    assert name

    assert main(["checkpoint", "verify", str(path)]) == 3

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not whole: ")
    assert "serialization_id is not what was written" in first


def test_files_without_sums_are_whole(tmp_path, capsys):
    torch.serialization.set_crc32_options(False)
    try:
        path, _ = saved(tmp_path, "pt")
    finally:
        torch.serialization.set_crc32_options(True)

    assert verdict(path, capsys)[0] == 0


ODD = {
    "float4_e2m1fn_x2": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "quint8": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.quint8),
}


@pytest.mark.parametrize("kind", ODD)
def test_of_a_distributed_checkpoint_the_rest_is_read(kind, tmp_path, capsys):
    odd = ODD[kind]()
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save({"w": torch.full((3,), value), "odd": odd}, checkpoint_id=tmp_path / name, no_dist=True)

    assert main(["checkpoint", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4
    assert capsys.readouterr().out.startswith("the same model, as far as it is read: 1 tensor is not\n")
    assert main(["checkpoint", "compare", str(tmp_path / "a"), str(tmp_path / "c"), "--exit-code"]) == 3
    assert f"first odd ({kind})" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 4
    assert capsys.readouterr().out.startswith("whole as far as it is read: 1 tensors")
