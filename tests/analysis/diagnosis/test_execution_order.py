"""The order in which modules are called, found by what flows between them."""

import pytest

from tests.analysis.stored_run import actv, store
from trainermon.analysis.diagnosis.execution_order import in_execution_order, read_flows
from trainermon.exporters.store.store import open_run

LAYER = [
    "model",
    "model.layers.0",
    "model.layers.0.mlp",
    "model.layers.0.mlp.gate",
    "model.layers.0.norm",
    "model.rotary",
]


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([], LAYER),
        ([("model.layers.0.norm", "model.layers.0.mlp.gate")], [*LAYER[:2], LAYER[4], *LAYER[2:4], LAYER[5]]),
        ([("model.rotary", "model.layers.0")], [LAYER[0], LAYER[5], *LAYER[1:5]]),
        ([("model.layers.0.mlp", "model")], LAYER),  # one holds the other
        ([("model.layers.0", "model.rotary"), ("model.rotary", "model.layers.0")], LAYER),  # a contradiction
        ([("elsewhere", "model.rotary")], LAYER),
    ],
)
def test_modules_stand_behind_what_they_are_given(flows, expected):
    assert list(in_execution_order(LAYER, flows)) == expected


def test_a_module_without_a_name_is_the_whole():
    assert in_execution_order(["", "a", "a.b"], []) == ("", "a", "a.b")
    assert in_execution_order(["a", ""], []) == ("", "a")


def test_flows_are_the_tensors_that_one_module_returned_and_another_was_given(tmp_path):
    x, y, mask = (4, -1.0, 2.0, 1.0, 5.0, 0, 0, 0), (4, -1.0, 3.0, 2.0, 9.0, 0, 0, 0), (4, 0.0, 0.0, 0.0, 0.0, 4, 0, 0)
    rows = {
        actv("norm", "output.0"): x,
        actv("mlp", "input.0"): x,
        actv("mlp", "output.0"): y,
        actv("mlp", "output.1"): mask,
        actv("head", "input.0"): y,
        actv("head", "input.mask"): mask,
    }
    store(tmp_path, {3: {0: rows}})

    with open_run(tmp_path) as connection:
        assert sorted(read_flows(connection, 3)) == [("mlp", "head"), ("norm", "mlp")]
        assert read_flows(connection, 4) == []
