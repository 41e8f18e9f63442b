"""Graphs of dumps with tensors of every dtype and layout: a change is found, or the node is not judged."""

import math

import pytest
import torch

from tests.dumped_kinds import TASKS, all_dumps, dumped, kind_of
from tests.tensor_kinds import DAMAGES, cast, every_kind, numbers, unchanged_by
from trainermon import PrecisionDebugger
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.graph.reading import read_graphs
from trainermon.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: quantized, sparse and masked tensors may change


@pytest.fixture(scope="module", params=TASKS)
def dumps(request, tmp_path_factory):
    return request.param, all_dumps(tmp_path_factory.mktemp(request.param), request.param)


def kinds_with(graph, told):
    """Return the kinds at whose nodes `told`, given a node's place, holds."""
    calls = [(place, node.call.key) for place, node in enumerate(graph.tree.nodes) if node.call is not None]
    return {kind_of(key) for place, key in calls if ".kinds." in key and told(place)}


def passed(graph):
    return kinds_with(graph, lambda place: graph.found.verdicts[place] == NodeVerdict.PASS)


def test_the_same_tensors_pass(dumps):
    _, folders = dumps

    [graph] = read_graphs(folders["again"], folders["sound"])

    assert passed(graph) == set(every_kind(numbers()))
    assert graph.found.sentence.startswith("The dumps agree")


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_passes(dumps, damage):
    task, folders = dumps

    [graph] = read_graphs(folders[damage], folders["sound"])

    within_rounding = {"float4_e2m1fn_x2"} if damage == "one element" and task == "tensor" else set()
    assert passed(graph) == unchanged_by(damage) | within_rounding
    assert not graph.found.sentence.startswith("The dumps agree")
    assert len(kinds_with(graph, lambda place: True)) == len(every_kind(numbers()))


@pytest.mark.parametrize("ending", ["html", "md", "vis.db"])
def test_every_kind_is_on_the_page(dumps, ending, tmp_path, capsys):
    _, folders = dumps

    assert main(["graph", str(folders["zeroed"]), str(folders["sound"]), "-o", str(tmp_path / f"a.{ending}")]) == 0
    assert main(["graph", str(folders["sound"]), "-o", str(tmp_path / f"b.{ending}")]) == 0

    assert "beta" not in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_in_every_kind_that_holds_it(tmp_path, value):
    values = numbers()
    values[0, 0] = value
    holding = {
        name
        for name, tensor in every_kind(values).items()
        if tensor.is_floating_point()
        and not tensor.is_quantized
        and "float4" not in name
        and not cast(torch.tensor([value]), tensor.dtype).float().isfinite()
    }

    [graph] = read_graphs(dumped(tmp_path / "dump", values, "statistics"))
    PrecisionDebugger.close()

    assert kinds_with(graph, lambda place: graph.found.nonfinite[place]) >= holding
    assert len(holding) > 10
    assert "inite" in graph.found.sentence


def test_tensors_without_statistics_are_not_said_to_be_finite(tmp_path, capsys):
    debugger = PrecisionDebugger(dump_path=tmp_path / "dump", level="L0", task="statistics")
    model = torch.nn.Sequential(torch.nn.Identity())
    debugger.start(model)
    model((torch.ones(3), torch.ones(3, device="meta"), torch.ones(0), torch.tensor([True])))
    debugger.stop()
    debugger.close()
    PrecisionDebugger.close()

    for command in ("graph", "source"):
        assert main([command, str(tmp_path / "dump")]) == 0
        assert capsys.readouterr().out.startswith("Everything that was read is finite; one tensor has no statistics.")
