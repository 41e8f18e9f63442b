"""Dumps that are built alike: their trees are made once, and are what they would be if each were made by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.graph.alike import AlikeTrees
from trainermon.analysis.graph.calls import read_calls
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.page.measures import measure
from trainermon.analysis.graph.tree import GraphTree, build_tree, number_nodes

PARENTS = {"Functional.linear.0.forward": "Module.fc.Linear.forward.0", "Torch.relu.0.forward": None}


def _write(folder: Path, scale: float, **changes: Any) -> Path:
    """Write a dump of a linear layer and a relu behind it."""
    given, weight, made = (tensor(value=scale * at, order=at) for at in (1, 2, 3))
    taken = changes.get("taken", made)
    data = {
        "Functional.linear.0.forward": forward(given, weight, output=made),
        "Module.fc.Linear.forward.0": forward(given, output=made, parameters={"weight": weight}),
        changes.get("name", "Torch.relu.0.forward"): forward(taken, output=tensor(value=scale * 7, order=4)),
    }
    for order, entry in enumerate(data.values(), start=changes.get("first", 5)):
        entry["trainermon"] = {"order": order, "micro_step": 0}
    return write_dump(folder, data, construct=changes.get("construct", PARENTS))


def _alone(folder: Path) -> GraphTree:
    return number_nodes(build_tree(*read_calls(folder)))


def _assert_equal(tree: GraphTree, other: GraphTree) -> None:
    assert [(one.kind, one.name, one.class_name, one.direction, one.slot, one.call) for one in tree.nodes] == [
        (one.kind, one.name, one.class_name, one.direction, one.slot, one.call) for one in other.nodes
    ]
    for name in ("sizes", "parents", "structures"):
        assert np.array_equal(getattr(tree, name), getattr(other, name))
    assert find_flow(tree) == find_flow(other)
    for ours, theirs in zip(measure(tree), measure(other), strict=True):
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs


def test_the_next_rank_has_its_own_numbers_on_the_same_tree(tmp_path: Path) -> None:
    trees = AlikeTrees()
    folders = [_write(tmp_path / str(at), float(at + 1)) for at in range(3)]

    made = [trees.tree_of(*read_calls(folder)) for folder in folders]

    assert made[1].sizes is made[0].sizes
    for tree, folder in zip(made, folders, strict=True):
        _assert_equal(tree, _alone(folder))
    norms = [tree.nodes[-1].call.values[0].norm for tree in made if tree.nodes[-1].call is not None]
    assert norms == [3.0, 6.0, 9.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Torch.gelu.0.forward"},
        {"taken": tensor(value=3.0, order=1)},  # it takes another value
        {"taken": tensor(value=3.0, order=3, dtype="torch.float64")},
        {"taken": tensor(value=3.0, order=3, shape=(2, 4))},
        {"first": 6},
        {"construct": {**PARENTS, "Torch.relu.0.forward": "Module.fc.Linear.forward.0"}},
    ],
)
def test_what_is_built_otherwise_is_made_anew(changes: dict[str, Any], tmp_path: Path) -> None:
    trees = AlikeTrees()
    first = trees.tree_of(*read_calls(_write(tmp_path / "first", 1.0)))
    find_flow(first)
    other = _write(tmp_path / "other", 1.0, **changes)

    tree = trees.tree_of(*read_calls(other))

    assert tree.sizes is not first.sizes
    _assert_equal(tree, _alone(other))
