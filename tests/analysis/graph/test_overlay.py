"""Numbers of one's own over the nodes of a graph."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainermon.analysis.graph.page.overlay import lay_over, read_overlay
from trainermon.analysis.graph.tree import GraphTree, read_tree
from trainermon.cli import main
from trainermon.core.errors import ConfigError

SOUND = Path(__file__).parents[1] / "compare" / "recorded" / "sound"


@pytest.fixture(scope="module")
def tree() -> GraphTree:
    return read_tree(next(SOUND.rglob("dump.json")).parent)


def _overlay(path: Path, values: dict[str, float]) -> Any:
    if path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("name", "value"), *values.items()])
    return read_overlay(f"mine={path}")


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_each_node_has_the_number_of_its_name(ending: str, tmp_path: Path, tree: GraphTree) -> None:
    entries = json.loads(next(SOUND.rglob("dump.json")).read_bytes())["data"]
    keys = {key: float(number) for number, key in enumerate(entries)}

    found = lay_over(tree, _overlay(tmp_path / f"numbers.{ending}", keys))

    for node, value in zip(tree.nodes, found.tolist(), strict=True):
        if node.call is None or node.slot:
            assert np.isnan(value)
        else:
            assert value == keys[node.call.key]


def test_a_module_and_a_parameter_are_named_as_the_model_names_them(tmp_path: Path, tree: GraphTree) -> None:
    values = {"layers.0.fc1": 1.0, "layers.0.fc1.weight": 2.0, "Module.layers.0.fc2.Linear.forward.0": 3.0, "x": 4.0}

    found = lay_over(tree, _overlay(tmp_path / "numbers.json", values))

    known = [(node.kind.name, node.name, value) for node, value in zip(tree.nodes, found, strict=True) if value > 0]
    assert known == [("MODULE", "fc1", 1.0), ("PARAMETER", "weight", 2.0), ("MODULE", "fc2", 3.0)]


def test_the_command_says_where_the_largest_is(tmp_path: Path, capsys: Any) -> None:
    _overlay(tmp_path / "numbers.json", {"layers.0.fc1": 1.0, "layers.1.fc1": 7.5, "x": 9.0})
    words = ["graph", str(SOUND), "--overlay", f"gain={tmp_path / 'numbers.json'}"]

    assert main(words) == 0
    assert "gain: 2 nodes, the largest 7.5 at micro step 0 > forward > layers.1 > fc1" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    largest = {"path": "micro step 0 > forward > layers.1 > fc1", "value": 7.5}
    assert document["overlays"] == {"gain": {"nodes": 2, "unknown": 1, "largest": largest}}


@pytest.mark.parametrize(("ending", "content"), [("json", '{"layers.0.fc1": 1}'), ("csv", "layers.0.fc1,1")])
def test_a_mark_of_the_byte_order_is_no_part_of_a_name(ending: str, content: str, tmp_path: Path) -> None:
    (tmp_path / f"numbers.{ending}").write_text(content, encoding="utf-8-sig")

    assert read_overlay(f"mine={tmp_path / 'numbers'}.{ending}").values == {"layers.0.fc1": 1.0}


def test_a_row_ends_where_csv_says(tmp_path: Path) -> None:
    with (tmp_path / "numbers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("one\nname", 1.0), ("other\u2028name", 2.0)])

    assert read_overlay(f"mine={tmp_path / 'numbers.csv'}").values == {"one\nname": 1.0, "other\u2028name": 2.0}


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_float32_is_infinite(tmp_path: Path, tree: GraphTree) -> None:
    found = lay_over(tree, _overlay(tmp_path / "numbers.json", {"layers.0.fc1": 1e300, "layers.1.fc1": -1e300}))

    assert [value for value in found if not np.isnan(value)] == [np.inf, -np.inf]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[1]", "holds a list"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"a": "high"}', "a is 'high', expected a number"),
        ("a.csv", "a,1\nb,2,3", "line 2: found 3 columns"),
        ("a.csv", f"a,1\n{'b' * 200_000},2", "line 2: field larger than"),
        ("a.csv", "a,1\nb,much", "b is 'much', expected a number"),
        ("a.txt", "a,1", "ends in .json or .csv"),
    ],
)
def test_what_is_no_overlay_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=said):
        read_overlay(f"mine={tmp_path / name}")
