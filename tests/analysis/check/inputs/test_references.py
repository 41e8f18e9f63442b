"""What calls are judged against: a user's functions, compositions of fused operators, a device, without padding."""

import json

import pytest
import torch
from torch.nn import functional

from tests.recorded_dumps import recorded
from trainermon.accuracy import fused
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import DumpChecker
from trainermon.analysis.check.inputs.references import ReferenceChoice
from trainermon.cli import main

X, GAMMA = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).split([5, 1])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the folder of a dump; its RMS norm is written as that of an NPU."""
    folder = recorded(
        tmp_path_factory.mktemp("dump"),
        lambda: (functional.rms_norm(X, [16], weight=GAMMA[0], eps=1e-6), functional.silu(X)),
    )
    text = (folder / "dump.json").read_text()
    dump = json.loads(text)
    call = dump["data"].pop("Functional.rms_norm.0.forward")
    given = call["input_kwargs"]
    call["input_args"], call["input_kwargs"] = [call["input_args"][0], given["weight"], given["eps"]], {}
    dump["data"]["NPU.npu_rms_norm.0.forward"] = call
    (folder / "dump.json").write_text(json.dumps(dump))
    return folder


def checked(directory, name, **choice):
    checker = DumpChecker(directory, wanted=lambda key: name in key, reference=ReferenceChoice(**choice))
    return checker.check(0)


def test_an_operator_that_torch_lacks_has_a_composition(directory, monkeypatch):
    monkeypatch.setitem(fused.COMPOSITIONS, "npu_rms_norm", lambda *args: fused.root_mean_square_norm(*args)[0])
    assert checked(directory, "npu_rms_norm").status is Status.PASS

    monkeypatch.setitem(fused.COMPOSITIONS, "npu_rms_norm", lambda *args: 1.01 * fused.root_mean_square_norm(*args)[0])
    assert checked(directory, "npu_rms_norm").status is Status.ERROR


def test_functions_of_a_file_take_the_place_of_torchs_and_are_named(directory, tmp_path, capsys):
    file = tmp_path / "refs.py"
    file.write_text("def silu(x, inplace=False):\n    return 2 * x * x.sigmoid()\n")

    assert main(["check", "run", str(directory), "--reference", str(file), "--exit-code", "--only", "*silu*"]) == 3
    assert str(file) in capsys.readouterr().out
    assert main(["check", "run", str(directory), "--exit-code", "--only", "*silu*"]) == 0


def test_an_error_of_a_function_of_a_file_is_a_row(directory, tmp_path):
    (tmp_path / "refs.py").write_text("def silu(x, inplace=False):\n    raise KeyError('mine')\n")

    call = checked(directory, "silu", source=str(tmp_path / "refs.py"))

    assert (call.status, call.reason) == (Status.SKIP, "cannot be run in float64: 'mine'")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected cpu, device or a Python file"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "expected functions named like operations, found none"),
    ],
)
def test_a_file_that_has_no_functions_is_refused(directory, tmp_path, capsys, content, said):
    if content is not None:
        (tmp_path / "refs.py").write_text(content)

    assert main(["check", "run", str(directory), "--reference", str(tmp_path / "refs.py")]) == 1
    assert said in capsys.readouterr().err


def test_the_device_may_be_the_reference(directory, capsys):
    assert main(["check", "run", str(directory), "--reference", "device"]) == 1
    assert "--reference device: expected --device as well" in capsys.readouterr().err
    assert (
        main(
            [
                "check",
                "run",
                str(directory),
                "--reference",
                "device",
                "--device",
                "cpu",
                "--exit-code",
                "--only",
                "*silu*",
            ]
        )
        == 0
    )


def test_rows_behind_the_length_are_padding(tmp_path):
    rows = torch.tensor([4, 2, 0, 1, 3])
    folder = recorded(tmp_path, lambda: functional.embedding(rows, X))
    path = next((folder / "dump_tensor_data").glob("*output*"))
    result = torch.load(path)
    result[3:] = float("nan")
    torch.save(result, path)

    assert checked(folder, "embedding").status is Status.ERROR
    assert checked(folder, "embedding", lengths=("embedding=0",)).status is Status.PASS
    assert checked(folder, "embedding", lengths=("embedding=sum(0)",)).status is Status.ERROR
    refused = checked(folder, "embedding", lengths=("embedding=group_list",))
    assert refused.reason == "embedding has no argument group_list, which --valid-length names"


def test_functions_of_a_file_are_differentiated_too(tmp_path):
    def step():
        functional.silu(X.clone().requires_grad_()).sum().backward()

    folder = recorded(tmp_path / "dump", step)
    verdicts = {}
    for name, factor in (("same", 1), ("twice", 2)):
        file = tmp_path / f"{name}.py"
        file.write_text(f"def silu(x, inplace=False):\n    return {factor} * x * x.sigmoid()\n")
        verdicts[name] = checked(folder, "silu.0.backward", source=str(file)).status

    assert verdicts == {"same": Status.PASS, "twice": Status.ERROR}
