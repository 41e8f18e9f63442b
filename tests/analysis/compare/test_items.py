"""Rows of a dump that is laid out otherwise."""

import json

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.compare.items import read_rows
from trainermon.core.errors import DumpError


@pytest.mark.parametrize("wrong", [{"shape": 5}, {"shape": "abc"}, {"shape": [None]}, {"data_name": 5}])
def test_a_dump_with_other_types_is_named(tmp_path, wrong):
    form = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, **wrong}
    data = {"Module.f.F.forward.0": {"input_args": [form], "output": [form]}}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))

    with pytest.raises(DumpError, match="is not laid out as a dump"):
        read_rows(tmp_path)


def places(folder):
    return {call.key: [(item.place, item.dtype) for item in call.items] for call in read_rows(folder).calls}


def test_a_row_is_named_by_the_way_to_its_value(tmp_path):
    result = {"logits": tensor(), "cache": [tensor(), None]}
    call = forward({"type": "int", "value": 3}, output=result, mask=tensor())

    assert places(write_dump(tmp_path / "a", {"Module.f.F.forward.0": call})) == {
        "Module.f.F.forward.0": [
            ("input.0", "<class 'int'>"),
            ("input.mask", "torch.float32"),
            ("output.0.logits", "torch.float32"),
            ("output.0.cache.0", "torch.float32"),
            ("output.0.cache.1", None),
        ]
    }


def test_what_is_no_call_or_no_gradient_costs_no_other(tmp_path):
    data = {
        "note": "written by hand",
        "Module.f.F.parameters_grad.0": {"weight": [tensor()], "bias": None, "scale": []},
        "Module.f.F.forward.0": forward(output=tensor()),
    }

    assert places(write_dump(tmp_path / "a", data)) == {
        "Module.f.F.parameters_grad.0": [("weight", "torch.float32")],
        "Module.f.F.forward.0": [("output.0", "torch.float32")],
    }
