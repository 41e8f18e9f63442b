"""Calls of MindSpore in a dump, judged by torch's float64: what MindSpore gave is right, and what is planted is found.

The recorded dump is that of `tests/dump/mindspore/calls_to_check.py`, with MindSpore 2.10 on a CPU.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump
from trainermon.cli import main

RECORDED = Path(__file__).parent / "recorded" / "mindspore.zip"


@pytest.fixture
def dump(tmp_path):
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(tmp_path / "dump")
    return tmp_path / "dump"


def test_what_mindspore_gives_is_right(dump, capsys):
    calls = {call.key: call for call in check_dump(dump).calls}

    assert {call.status for call in calls.values()} == {Status.PASS, Status.SKIP}
    skipped = {key: call.reason for key, call in calls.items() if call.status is Status.SKIP}
    assert set(skipped.values()) == {"the dump does not say what else took the same tensor"}
    judged = {key.rpartition(".")[0] for key in calls if key not in skipped and key.endswith("backward")}
    assert {
        *("Primitive.layer_norm.LayerNorm.0", "Primitive.matmul.MatMul.0", "Functional.gather.0"),
        *("Functional.softmax.0", "Functional.cat.0", "Tensor.__rsub__.0", "Tensor.astype.2", "Tensor.sum.0"),
    } <= judged
    assert len(calls) - len(skipped) >= 50
    assert main(["check", "run", str(dump)]) == 0
    assert "are right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("Functional.softmax.0.forward.output.0", "Functional.softmax.0.forward"),
        ("Primitive.matmul.MatMul.0.forward.output.0", "Primitive.matmul.MatMul.0.forward"),
        ("Primitive.layer_norm.LayerNorm.0.forward.output.1", "Primitive.layer_norm.LayerNorm.0.forward"),
        ("Mint.tanh.0.forward.output.0", "Mint.tanh.0.forward"),
    ],
)
def test_a_planted_error_is_found(dump, file, key):
    [path] = (dump / "dump_tensor_data").glob(f"{file}.npy")
    values = np.load(path)
    values.flat[1] += 1e-3 * np.abs(values).max()
    np.save(path, values)

    wrong = {call.key for call in check_dump(dump).calls if call.status is Status.ERROR}

    assert key in wrong
    assert len(wrong) <= 3  # the planted tensor is an input of others, and a gradient of theirs


def test_a_wrong_gradient_is_no_pass(dump):
    """It is no error either: the rest may come from a call that was not seen, as MindSpore does not say who uses it."""
    path = dump / "dump_tensor_data" / "Primitive.layer_norm.LayerNorm.0.backward.output.0.npy"
    values = np.load(path)
    values.flat[1] += 1e-3 * np.abs(values).max()
    np.save(path, values)

    [call] = [call for call in check_dump(dump).calls if call.key == "Primitive.layer_norm.LayerNorm.0.backward"]

    assert [one.status for one in call.judgements] == [Status.SKIP, Status.PASS, Status.PASS]


def test_a_function_of_which_nothing_is_known_is_not_judged(dump):
    path = dump / "dump.json"
    raw = json.loads(path.read_text())
    data = {key.replace("Functional.softmax", "Functional.rotated_iou"): value for key, value in raw["data"].items()}
    path.write_text(json.dumps(raw | {"data": data}))

    calls = {call.key: call for call in check_dump(dump).calls}

    assert "no function of torch is known" in calls["Functional.rotated_iou.0.forward"].reason
    assert calls["Functional.rotated_iou.0.forward"].status is Status.SKIP


@pytest.mark.parametrize(
    "key", ["Tensor.reshape.0", "Functional.gather.0", "Tensor.__add__.0", "Tensor.mean.0.backward"]
)
def test_a_script_of_one_is_refused_with_what_to_do(dump, tmp_path, capsys, key):
    """A script of torch's function would say nothing of MindSpore's kernel."""
    assert main(["script", str(dump), key, "-o", str(tmp_path / "out")]) == 1

    assert "a call of MindSpore, and scripts are made of torch's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
