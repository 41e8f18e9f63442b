"""Ranks that both sides share the model out to, put together or each alone."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.graph.shared_dumps import write_shared
from trainermon.analysis.compare.comparison import CompareOptions
from trainermon.analysis.graph.levels import axes_of, find_levels, further_levels, read_at_level
from trainermon.analysis.graph.page.output import details_of
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"


def test_put_together_they_name_the_origin_that_one_rank_cannot_know(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_shared(tmp_path)

    sentences = {}
    for level in ("each", "model"):
        main(["graph", str(target), str(golden), "--level", level, "--json"])
        sentences[level] = [one["sentence"] for one in json.loads(capsys.readouterr().out)]

    assert "norm" in sentences["each"][0]  # of rank 1, where it began
    assert "fc2" in sentences["each"][1]  # rank 0 sees it where both ranks have added up
    assert len(sentences["model"]) == 1
    assert "Module.norm.LayerNorm.forward.0" in sentences["model"][0]


def test_the_rank_where_it_began_is_shown_first(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_shared(tmp_path)

    main(["graph", str(target), str(golden)])

    assert "model, step0 rank1: 6 nodes" in capsys.readouterr().out


def test_a_page_has_each_level_that_puts_other_ranks_together(tmp_path: Path) -> None:
    target, golden = write_shared(tmp_path)
    options = CompareOptions()

    places = [*find_levels(target, golden, options=options), *further_levels(target, golden, options=options)]
    graphs = [read_at_level(place, options=options) for place in places]

    labels = [(one.level, one.label) for one in graphs]
    assert labels == [("each", "step0 rank0"), ("each", "step0 rank1"), ("model", "step0 whole model")]
    assert [axes_of(one) for one in graphs] == [{"tp": (0, 2)}, {"tp": (1, 2)}, {}]
    rows = {call.key: call.rows for call in graphs[-1].comparison.calls} if graphs[-1].comparison else {}
    kinds = [row.target.merged for row in rows["Module.fc1.Linear.forward.0"] if row.target]
    assert kinds == ["tp 1 of 2 that differ", "2 parts, tp"]


@pytest.mark.parametrize("level", ["tp", "model"])
def test_ranks_of_one_dump_are_put_together_without_another(level: str, tmp_path: Path, capsys: Any) -> None:
    _, sound = write_shared(tmp_path)

    (place,) = find_levels(sound, None, level, options=CompareOptions())
    graph = read_at_level(place, options=CompareOptions())

    details = details_of(graph)
    kinds = {
        node.call.key: row["kind"]
        for at, node in enumerate(graph.tree.nodes)
        if node.call is not None and (found := details.of(at)) is not None
        for row in found["rows"]
        if row["place"] == "output.0"
    }
    # the linear layer has half of the features on each rank, the norm and the sum have the same on both
    assert {key.split(".")[1]: kind for key, kind in kinds.items()} == {
        "norm": "float32[2, 3]",
        "fc1": "float32[2, 6]",
        "fc2": "float32[2, 3]",
    }
    assert any("is merged from 2 ranks (tp 2)" in note for note in graph.notes)
    assert main(["graph", str(sound), "--level", level, "-o", str(tmp_path / "page.html")]) == 0
    assert "note: " in capsys.readouterr().out


def test_what_is_not_finite_on_one_rank_is_named_in_the_whole(tmp_path: Path, capsys: Any) -> None:
    for rank, name in enumerate(("faulty", "nan")):  # one multiplies by 0.5, one by NaN
        place = tmp_path / "step0" / f"rank{rank}"
        shutil.copytree(RECORDED / name / "step0" / "rank0", place)
        (place / "dump_info.json").write_text(json.dumps({"rank": rank, "layout": {"axes": {"tp": [rank, 2]}}}))

    main(["graph", str(tmp_path), "--level", "model", "--json"])

    (document,) = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in document["findings"]] == ["Tensor.mul_.0.forward"]
    assert document["findings"][0]["path"] == "micro step 0 > forward > layers.1 > mul_"


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_axes_that_stay_apart_are_told(axis: str, tmp_path: Path) -> None:
    target, golden = write_shared(tmp_path)
    for path in tmp_path.rglob("dump_info.json"):
        info = json.loads(path.read_text())
        info["layout"]["axes"][axis] = [0, 2]
        path.write_text(json.dumps(info))

    (place,) = find_levels(target, golden, "model", options=CompareOptions())
    graph = read_at_level(place, options=CompareOptions())

    assert f"({axis} 0)" in graph.notes[-1]


def test_a_database_has_the_whole_model_and_says_from_what(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_shared(tmp_path)
    path = tmp_path / "whole.vis.db"

    assert main(["graph", str(target), str(golden), "--level", "model", "-o", str(path)]) == 0

    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT node_name, parallel_merge_info, precision_index, data_source FROM tb_nodes")
        rows = {(name, source): (info, precision) for name, info, precision, source in found}
    info, _ = rows["Module.fc1.Linear.forward.0", "NPU"]
    assert json.loads(info)[1] == "output.0 was put together from 2 parts, tp"
    assert rows["Module.norm.LayerNorm.forward.0", "NPU"][1] == 1.0
    assert {name for name, source in rows if source == "NPU"} == {name for name, source in rows if source == "Bench"}
    capsys.readouterr()
    main(["graph", str(path)])
    assert "Module.norm.LayerNorm.forward.0" in capsys.readouterr().out
