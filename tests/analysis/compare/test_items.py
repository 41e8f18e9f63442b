"""Rows of a dump that is laid out otherwise."""

import json

import pytest

from trainermon.analysis.compare.items import read_rows
from trainermon.core.errors import DumpError


@pytest.mark.parametrize("wrong", [{"shape": 5}, {"shape": "abc"}, {"shape": [None]}, {"data_name": 5}])
def test_a_dump_with_other_types_is_named(tmp_path, wrong):
    form = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, **wrong}
    data = {"Module.f.F.forward.0": {"input_args": [form], "output": [form]}}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))

    with pytest.raises(DumpError, match="is not laid out as a dump"):
        read_rows(tmp_path)
