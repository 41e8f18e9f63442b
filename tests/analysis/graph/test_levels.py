"""Ranks that both sides share the model out to, put together or each alone."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.graph.shared_dumps import write_shared
from trainermon.analysis.compare.comparison import CompareOptions
from trainermon.analysis.graph.levels import axes_of, find_levels, further_levels, read_at_level
from trainermon.cli import main


def test_put_together_they_name_the_origin_that_one_rank_cannot_know(tmp_path: Path, capsys: Any) -> None:
    target, golden = write_shared(tmp_path)

    sentences = {}
    for level in ("each", "model"):
        main(["graph", str(target), str(golden), "--level", level, "--json"])
        sentences[level] = [one["sentence"] for one in json.loads(capsys.readouterr().out)]

    assert "fc2" in sentences["each"][0]  # rank 0 sees it where both ranks have added up
    assert "norm" in sentences["each"][1]
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


def test_alone_nothing_is_put_together(tmp_path: Path, capsys: Any) -> None:
    target, _ = write_shared(tmp_path)

    assert main(["graph", str(target), "--level", "model"]) == 1
    assert "name the golden dump" in capsys.readouterr().err


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_axes_that_stay_apart_are_told(axis: str, tmp_path: Path) -> None:
    target, golden = write_shared(tmp_path)
    for path in tmp_path.rglob("dump_info.json"):
        info = json.loads(path.read_text())
        info["layout"]["axes"][axis] = [0, 2]
        path.write_text(json.dumps(info))

    (place,) = find_levels(target, golden, "model", options=CompareOptions())
    graph = read_at_level(place, options=CompareOptions())

    assert graph.comparison
    assert f"({axis} 0)" in graph.comparison.notes[-1]


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
