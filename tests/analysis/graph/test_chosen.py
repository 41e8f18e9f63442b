"""One node of a graph, told in full."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trainermon import PrecisionDebugger
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"
FAULTY, SOUND = str(RECORDED / "faulty"), str(RECORDED / "sound")
KEY = "Module.layers.1.fc1.Linear.forward.0"


def _node(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["graph", *words, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    node: dict[str, Any] = document["node"]
    return node


def test_its_numbers_are_those_of_both_dumps(capsys: Any) -> None:
    node = _node(capsys, FAULTY, SOUND, "--node", KEY)

    rows = {row["place"]: row for row in node["tensors"]}
    for side, column in ((FAULTY, "ours"), (SOUND, "golden")):
        entry = json.loads(next(Path(side).rglob("dump.json")).read_bytes())["data"][KEY]
        for place, form in (("input.0", entry["input_args"][0]), ("output.0", entry["output"][0])):
            assert rows[place][column] == [form[name] for name in ("Max", "Min", "Mean", "Norm")]
    assert node["path"] == "micro step 0 > forward > layers.1 > fc1"
    assert (node["kind"], node["class"]) == ("module", "Linear")


@pytest.mark.parametrize("name", [KEY, "micro step 0 > forward > layers.1 > fc1"])
def test_it_is_found_by_its_key_and_by_its_path(name: str, capsys: Any) -> None:
    node = _node(capsys, SOUND, "--node", name)

    assert node["key"] == KEY
    # what the recorded model says: fc1 takes what the norm gives, and gives to gelu
    assert [path.split(" > ")[3] for path in node["takes_from"]] == ["norm"]
    assert [path.split(" > ")[3] for path in node["gives_to"]] == ["gelu"]
    assert any("record_with_msprobe.py" in frame for frame in node["stack"])


def test_a_parameter_is_a_node(capsys: Any) -> None:
    node = _node(capsys, SOUND, "--node", f"{KEY}.parameters.weight")

    assert node["kind"] == "parameter"
    assert [row["place"] for row in node["tensors"]] == ["parameters.weight"]


def test_the_screen_has_it_instead_of_the_tree(capsys: Any) -> None:
    assert main(["graph", FAULTY, SOUND, "--node", "Module.layers.1.Block.forward.0"]) == 0

    shown = capsys.readouterr().out
    assert "verdict     blamed, differs by" in shown
    assert "began here  what it gave to" in shown
    assert "called in   File record_with_msprobe.py, line 41" in shown
    assert "emb Embedding" not in shown


def test_names_like_it_are_told_where_there_is_none(capsys: Any) -> None:
    assert main(["graph", SOUND, "--node", "layers.1.fc1"]) == 1
    assert KEY in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Module.layers.1.fc7.Linear.forward.0", "the nearest are Module.layers.1."),
        ("layernrom", "layer_norm"),
        ("§", "none is called alike; --depth 9, without --node, shows them"),
    ],
)
def test_what_is_told_instead_is_like_it_and_of_how_many(name: str, said: str, capsys: Any) -> None:
    assert main(["graph", SOUND]) == 0
    (count,) = re.findall(r": (\d+ nodes)$", capsys.readouterr().out, re.MULTILINE)
    assert main(["graph", SOUND, "--node", name]) == 1

    shown = capsys.readouterr().err
    assert f"no graph has a node {name!r}; of {count} " in shown
    assert said in shown


def test_elements_that_are_not_finite_are_counted(tmp_path: Path, capsys: Any) -> None:
    given = torch.tensor([0.5, -1.0, 0.0, 0.0])
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task="statistics", level="L1")
    debugger.start()
    torch.log(given)  # one NaN, two Infs
    debugger.stop()
    debugger.step()
    debugger.close()

    assert main(["graph", str(tmp_path), "--node", "Torch.log.0.forward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("(1 NaN, 2 Inf)") for line in lines if "put.0" in line] == [False, True]
