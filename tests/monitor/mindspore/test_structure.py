"""The structure of a model of MindSpore and the callers of its cells, written once in msprobe's form."""

import csv
import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.journal_rows import RankJournal, only_spool
from trainermon import TrainerMon
from trainermon.core.errors import AttachError

pytestmark = pytest.mark.mindspore


class Pair(nn.Cell):
    def construct(self, x, scale, flag=True):
        return x * scale, {"note": "text"}


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc1, self.pair, self.unused = nn.Dense(3, 4), Pair(), nn.Dense(4, 4)

    def construct(self, x):
        hidden, _ = self.pair(self.fc1(x), scale=ms.Tensor(np.ones(1, np.float32)))
        return (hidden * self.fc1(x)).sum()


def watched(**config):
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    monitor = TrainerMon({"agent": {"start": False}, **config})
    monitor.set_monitor(net, optimizer=optimizer)
    return net, optimizer, monitor


def train(**config):
    """Train two steps, after a forward that trains nothing with another shape; return the model and its files."""
    net, optimizer, monitor = watched(**config)
    net(ms.Tensor(np.ones((5, 3), np.float32)))
    compute = ms.value_and_grad(net, None, optimizer.parameters)
    for rows in (2, 7):
        optimizer(compute(ms.Tensor(np.ones((rows, 3), np.float32)))[1])
        assert not net.fc1._forward_hook  # from the first step on
    directory = monitor.run_directory / "module_struct/rank0"
    monitor.close()
    return net, directory


def test_the_structure_of_every_cell_is_written_once(spool):
    net, directory = train(print_struct=True)

    found = json.loads((directory / "module_struct.json").read_text())
    size = "size=(2, 3), dtype=Float32"
    assert found["fc1"] == {
        "input": {"config": "tuple[1]", "0": size},
        "output": {"config": "tensor", "tensor": "size=(2, 4), dtype=Float32"},
    }
    assert found["pair"]["input"] == {
        "config": "tuple[2]",
        "0": "size=(2, 4), dtype=Float32",
        "1": "size=(1,), dtype=Float32",
    }
    assert found["pair"]["output"]["config"] == "tuple[2]"
    assert found["pair"]["output"]["1"] == "<class 'dict'>"
    assert set(found) == {"fc1", "pair"}
    assert not (directory / "stack_info.csv").exists()
    assert not any(cell._forward_hook or cell._forward_pre_hook for _, cell in net.cells_and_names())


def test_the_lines_that_call_a_cell_are_written_once(spool):
    _, directory = train(stack_info=True, targets=["fc1"])

    with (directory / "stack_info.csv").open() as file:
        [row] = csv.DictReader(file)
    assert row["module_name"] == "fc1"
    innermost = row["stack_info"].splitlines()[0]
    assert "test_structure.py" in innermost
    assert "self.pair(self.fc1(x)" in row["stack_info"]
    assert not (directory / "module_struct.json").exists()


def test_what_is_compiled_has_none(spool, caplog):
    net, optimizer, monitor = watched(print_struct=True)
    with pytest.raises(AttachError, match="watch: print_struct is true, but MindSpore calls no hook"):
        monitor.watch(optimizer)
    net.construct = ms.jit(net.construct)
    optimizer(ms.value_and_grad(net, None, optimizer.parameters)(ms.Tensor(np.ones((2, 3), np.float32)))[1])
    monitor.close()

    assert "MindSpore calls none in what it compiles" in caplog.text
    assert sorted(RankJournal(only_spool(spool)).rows) == [0]
