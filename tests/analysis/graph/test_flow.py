"""Edges and folds against what the model is known to do, and against a slow search."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.recorded_dump import record_dump
from trainermon.analysis.graph.findings import NodeVerdict, worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.folding import children_of, fold_children
from trainermon.analysis.graph.tree import GraphKind, read_tree
from trainermon.analysis.graph.values import ValueUse

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, hidden):
        return hidden + self.mlp(self.norm(hidden))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    torch.manual_seed(0)
    model = _Model()

    def run():
        for _ in range(2):
            model(torch.randn(5, 4)).square().mean().backward()

    return record_dump(folder, run, model=model, level="mix", task="statistics")


def _named(tree, place):
    path = []
    while place > 0:
        path.append(tree.nodes[place].name)
        place = tree.parents[place]
    return "/".join(reversed(path[:-2]))


def test_values_flow_as_the_model_is_written(dump):
    tree = read_tree(dump)

    edges = Counter((_named(tree, edge.producer), _named(tree, edge.consumer)) for edge in find_flow(tree).edges)

    forward = {pair: count for pair, count in edges.items() if pair[1].startswith("layers.1") and count}
    assert forward[("layers.0/__add__", "layers.1/norm/layer_norm")] == 2
    assert forward[("layers.0/__add__", "layers.1/__add__")] == 2
    assert forward[("layers.1/norm/layer_norm", "layers.1/mlp/linear")] == 2
    assert forward[("layers.1/mlp/weight", "layers.1/mlp/linear")] == 2
    assert forward[("layers.1/mlp/linear", "layers.1/__add__")] == 2
    assert edges[("layers.2/__add__", "head/linear")] == 2


@pytest.mark.parametrize("name", ["ours", "sound", "faulty"])
def test_edges_are_those_that_a_slow_search_finds(name, dump):
    tree = read_tree(dump if name == "ours" else RECORDED / name / "step0" / "rank0")

    flow = find_flow(tree)

    found = {(edge.producer, edge.consumer) for edge in flow.edges}
    assert found == set(_slow_edges(tree))
    assert flow.num_taken - flow.num_entering == len(flow.edges)
    assert all(edge.is_exact is (name == "ours") for edge in flow.edges)
    assert len(flow.edges) > 20


def _slow_edges(tree):
    made = [_identities(tree, place, (ValueUse.GIVEN, ValueUse.HELD)) for place in range(len(tree.nodes))]
    taken = [_identities(tree, place, (ValueUse.TAKEN,)) for place in range(len(tree.nodes))]
    for consumer, values in enumerate(taken):
        for value in values:
            if any(value in taken[inner] for inner in _range(tree, consumer)):
                continue
            for producer in range(consumer - 1, -1, -1):
                has_ended = producer + tree.sizes[producer] <= consumer
                if (
                    has_ended
                    and value in made[producer]
                    and not any(value in made[inner] for inner in _range(tree, producer))
                ):
                    yield producer, consumer
                    break


def _range(tree, place):
    return range(place + 1, place + tree.sizes[place])


def _identities(tree, place, uses):
    node = tree.nodes[place]
    if node.call is None:
        return set()
    if node.kind is GraphKind.PARAMETER:
        wanted = {value.identity for value in node.call.values if value.slot == node.slot and ValueUse.HELD in uses}
    else:
        wanted = {value.identity for value in node.call.values if value.use in uses and value.use is not ValueUse.HELD}
    return wanted - {None}


def test_equal_neighbours_are_folded_and_none_is_lost(dump):
    tree = read_tree(dump)
    counts = []
    for place in range(len(tree.nodes)):
        folds = list(fold_children(tree, place))
        flat = [node for fold in folds for member in fold.members for node in member]
        assert flat == children_of(tree, place)
        for fold in folds:
            shapes = {tuple(int(tree.structures[node]) for node in member) for member in fold.members}
            assert len(shapes) == 1
            counts.append((tree.nodes[fold.first[0]].name, len(fold.members)))

    assert ("micro step 0", 2) in counts
    assert ("layers.0", 3) in counts


def test_what_is_to_stand_apart_is_not_folded(dump):
    tree = read_tree(dump)
    forward = next(place for place, node in enumerate(tree.nodes) if node.kind is GraphKind.SECTION)
    layers = [place for place in children_of(tree, forward) if tree.nodes[place].name.startswith("layers")]

    folds = [fold.members for fold in fold_children(tree, forward, {layers[1]})]

    assert ((layers[1],),) in folds
    assert all(len(fold) == 1 for fold in folds)


def test_neighbours_with_other_verdicts_are_not_folded(dump):
    tree = read_tree(dump)
    forward = next(place for place, node in enumerate(tree.nodes) if node.kind is GraphKind.SECTION)
    layers = [place for place in children_of(tree, forward) if tree.nodes[place].name.startswith("layers")]
    verdicts = np.zeros(len(tree.nodes), np.uint8)
    verdicts[layers[2] + 1] = NodeVerdict.ERROR

    folds = [fold.members for fold in fold_children(tree, forward, (), worst_within(tree, verdicts))]

    assert ((layers[0],), (layers[1],)) in folds
    assert ((layers[2],),) in folds
