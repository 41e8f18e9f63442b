"""A dump whose only call is that of the outermost module, under any of the names that dumps have for it."""

import json

import pytest

from trainermon.cli import main

TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "requires_grad": False}
KEYS = ("Module.module.Net.forward.0", "Module.Net.forward.0", "Module.root.Net.forward.0")


def dump(folder, key, size=1.0):
    folder.mkdir()
    row = {**TENSOR, "Max": size, "Min": size, "Mean": size, "Norm": size * 6**0.5}
    call = {"input_args": [{**TENSOR, "Max": 1.0, "Min": 1.0, "Mean": 1.0, "Norm": 6**0.5}], "output": [row]}
    head = {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**head, "data": {key: {**call, "input_kwargs": {}}}}))
    (folder / "construct.json").write_text(json.dumps({key: None}))
    (folder / "stack.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("their_key", KEYS)
def test_two_of_them_are_compared(tmp_path, capsys, key, their_key):
    sides = [dump(tmp_path / "a", key, 2.0), dump(tmp_path / "b", their_key)]

    for command in ("graph", "compare"):
        assert main([command, *sides]) == 0
        assert "agree" not in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("key", KEYS)
def test_one_of_them_has_a_page(tmp_path, capsys, key):
    assert main(["graph", dump(tmp_path / "a", key), "-o", str(tmp_path / "graph.html")]) == 0
    assert capsys.readouterr().out.startswith("Everything is finite.")
    assert (tmp_path / "graph.html").stat().st_size
