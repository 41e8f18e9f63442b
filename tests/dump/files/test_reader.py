"""Dumps of msprobe (the texts below are excerpts of what 26.2.0 wrote) and broken ones."""

import json
import math
import subprocess
import sys

import pytest

from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import read_dump, split_key


def tensor(maximum, minimum, mean, norm, **more):
    numbers = {"Max": maximum, "Min": minimum, "Mean": mean, "Norm": norm}
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2, 4],
        **numbers,
        "requires_grad": False,
        **more,
    }


MSPROBE = {
    "Module.f.Linear.forward.0": {
        "input_args": [tensor(1.46, -1.0, 0.1, 3.3), {"type": "int", "value": 3}, None],
        "input_kwargs": {"mask": {"a": tensor(1.0, 0.0, 0.5, 1.0)}},
        "output": [tensor(0.55, -0.2, 0.1, 0.88, data_name="Module.f.Linear.forward.0.output.0.pt")],
        "parameters": {"weight": tensor(0.46, -0.4, 0.0, 1.1)},
    },
    "Module.h.0.n.N.forward.1": {
        "input_args": [],
        "input_kwargs": {},
        "output": {"a": tensor(math.nan, math.nan, math.nan, math.nan)},
        "parameters": {},
    },
    "Functional.linear.0.forward": {
        "input_args": [],
        "input_kwargs": {},
        "output": [tensor(math.inf, 0.0, math.inf, 1.0)],
    },
    "Module.f.Linear.backward.0": {"input": [tensor(1.0, 0.0, 0.5, 1.0), None], "output": []},
    "Module.f.Linear.parameters_grad.0": {"bias": [tensor(1.0, 0.0, 0.5, 1.0)], "weight": [tensor(2.0, 0.0, 0.5, 1.0)]},
}


def write(folder, data=MSPROBE, **files):
    content = {"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (folder / "dump.json").write_text(json.dumps(content))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_a_dump_of_msprobe_is_read(tmp_path):
    write(
        tmp_path,
        construct={"Module.f.Linear.forward.0": "Module.h.0.n.N.forward.1", "Module.h.0.n.N.forward.1": ["x", 0]},
        stack={"0": [["Module.f.Linear.forward.0"], ["File a.py, line 3, in f, \n y"]]},
    )

    dump = read_dump(tmp_path)

    linear, other, functional, backward, gradients = dump.entries
    assert (dump.task, dump.level, dump.info.complete, dump.info.replay) == ("tensor", "L0", True, False)
    assert (linear.module, linear.class_name, linear.direction, linear.call) == ("f", "Linear", "forward", 0)
    assert [record.slot for record in linear.inputs] == ["input.0", "kwargs.mask.a"]
    assert linear.outputs[0].data_path == tmp_path / "dump_tensor_data/Module.f.Linear.forward.0.output.0.pt"
    assert linear.parameters[0].slot == "parameters.weight"
    assert linear.stack == ("File a.py, line 3, in f, \n y",)
    assert (linear.parent, other.parent) == ("Module.h.0.n.N.forward.1", "x")
    assert (other.module, other.call, other.outputs[0].slot) == ("h.0.n", 1, "output.a")
    assert (functional.module, functional.class_name) == ("linear", "Functional")
    assert [record.slot for record in backward.inputs] == ["input.0"]
    assert [record.slot for record in gradients.outputs] == ["bias", "weight"]
    # without counts the numbers themselves tell
    assert [entry.outputs[0].nonfinite for entry in (linear, other, functional)] == [False, True, True]


def test_reading_needs_no_torch(tmp_path):
    write(tmp_path)
    code = "import sys; from trainermon.dump.files.reader import read_dump; read_dump(sys.argv[1]); print(*sys.modules)"

    text = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout

    assert "trainermon.dump.files.reader" in text.split()
    assert "torch" not in text.split()


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("Module.h.0.mlp.fc.Linear.forward.2", ("h.0.mlp.fc", "Linear", "forward", 2)),
        ("Module.head.Linear.parameters_grad.0", ("head", "Linear", "parameters_grad", 0)),
        ("Torch.matmul.3.backward", ("matmul", "Torch", "backward", 3)),
        ("odd", ("odd", "", "forward", 0)),
    ],
)
def test_keys_are_split(key, parts):
    assert split_key(key) == parts


def test_what_is_no_dump_is_told(tmp_path):
    with pytest.raises(DumpError, match=r"holds no dump: expected dump\.json"):
        read_dump(tmp_path)
    (tmp_path / "dump.json").write_text('{"data": {')
    with pytest.raises(DumpError, match="is not JSON"):
        read_dump(tmp_path)
    (tmp_path / "dump.json").write_text('{"data": 3}')
    with pytest.raises(DumpError, match='has no "data" object'):
        read_dump(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"stack": {"0": 5}},
        {"stack": {"0": [["a"], 5]}},
        {"stack": 5},
        {"dump_info": [1]},
        {"dump_info": {"layout": 5}},
        {"dump_info": {"reproducibility": "perhaps"}},
        {"dump_info": {"operations": [{"cause": "q"}]}},
        {"dump_info": {"reproducibility": ""}},
        {"dump_info": {"rank": "3"}},
        {"dump_info": {"pipeline_size": None}},
        {"dump_info": {"reason": 5}},
        {"construct": "x"},
    ],
)
def test_a_file_that_is_laid_out_otherwise_is_named(tmp_path, files):
    write(tmp_path, **files)

    with pytest.raises(DumpError, match="is not laid out as a dump"):
        read_dump(tmp_path)


def test_numbers_of_another_type_are_none(tmp_path):
    write(tmp_path, {"Module.f.F.forward.0": {"output": [tensor("a", [], {}, None, order="x", nans=[], infs={})]}})

    record = read_dump(tmp_path).entries[0].outputs[0]
    assert (record.max, record.min, record.nans, record.infs, record.order) == (None,) * 5


def test_a_nest_too_deep_is_no_dump(tmp_path):
    (tmp_path / "dump.json").write_text('{"data": {"a": [NaN, ' + "[" * 100_000 + "]" * 100_000 + "]}}")

    with pytest.raises(DumpError):
        read_dump(tmp_path)
