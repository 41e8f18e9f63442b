"""`.vis.db` files: msprobe's become the graph of their dumps, and ours have its tables and our verdicts."""

import contextlib
import gzip
import json
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from trainermon.analysis.graph.database.details import details_of_database
from trainermon.analysis.graph.findings import NodeVerdict
from trainermon.analysis.graph.page.output import DrawnGraphs, draw_rank, write_page
from trainermon.analysis.graph.reading import read_graphs
from trainermon.analysis.graph.tree import read_tree
from trainermon.cli import main
from trainermon.core.errors import DumpError

RECORDED = Path(__file__).parent / "recorded"
DUMPS = Path(__file__).parents[1] / "compare" / "recorded"
FAULTY, SOUND, BAD = (DUMPS / name for name in ("faulty", "sound", "nan"))


@pytest.fixture
def theirs(tmp_path):
    """Return a function that returns the path of a recorded file of msprobe's."""

    def unpacked(name):
        path = tmp_path / f"theirs_{name}.vis.db"
        path.write_bytes(gzip.decompress((RECORDED / f"{name}.vis.db.gz").read_bytes()))
        return path

    return unpacked


def _query(path, query, *values):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, values).fetchall()


def _written(tmp_path, *words):
    path = tmp_path / "ours.vis.db"
    main(["graph", *map(str, words), "-o", str(path)])
    return path


def _places(tree, keys):
    """Return of each of the calls `keys` and its parameters what it is, and the call that it is in."""
    found = []
    for place, node in enumerate(tree.nodes):
        if node.call is None or node.call.key not in keys:
            continue
        parent = tree.nodes[tree.parents[place]]
        found.append((node.kind, node.name, node.class_name, node.direction, node.slot, parent.name))
    return found


def test_a_build_of_msprobes_is_the_tree_of_its_dump(theirs):
    path = theirs("build")
    (graph,) = read_graphs(path)
    dumped = read_tree(BAD / "step0" / "rank0")

    keys = {node.call.key for node in dumped.nodes if node.call is not None}
    assert _places(graph.tree, keys) == _places(dumped, keys)
    # msprobe also has calls of which the dump holds nothing; rows of functions between modules are no nodes here
    known = {
        name for (name,) in _query(path, "SELECT node_name FROM tb_nodes WHERE node_type != '9' AND up_node != ''")
    }
    assert {node.call.key for node in graph.tree.nodes if node.call is not None} == known
    assert keys <= known


def test_what_is_not_finite_is_found_in_a_build(theirs, capsys):
    main(["graph", str(theirs("build")), "--json", "--overflow"])

    (document,) = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in document["findings"]] == ["Tensor.mul_.0.forward"]
    query = "SELECT overflow_level FROM tb_nodes WHERE node_type != '9' AND overflow_level IS NOT NULL"
    assert document["overflow"] == Counter(level for (level,) in _query(theirs("build"), query))


def test_a_comparison_of_msprobes_has_its_verdicts_which_a_box_takes_from_within(theirs, capsys):
    path = theirs("compare")
    (graph,) = read_graphs(path)

    marked = dict(_query(path, "SELECT node_name, precision_index FROM tb_nodes WHERE data_source = 'NPU'"))
    meaning = {None: NodeVerdict.NONE, 0: NodeVerdict.PASS, 0.5: NodeVerdict.WARNING, 1: NodeVerdict.ERROR}
    for node, verdict in zip(graph.tree.nodes, graph.found.verdicts.tolist(), strict=True):
        if node.call is not None and not node.slot and node.side == 0:
            assert verdict == meaning[marked[node.call.key]]
    wrong = [name for name, index in marked.items() if index == 1]
    assert [graph.tree.nodes[one.node].call.key for one in graph.found.findings] == wrong[:1]

    main(["graph", str(path)])
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("x micro step 0") for line in shown)
    assert any(line.strip().startswith("x layers.1 Block") for line in shown)


def test_details_of_a_comparison_are_the_numbers_of_both_sides(theirs):
    path = theirs("compare")
    (graph,) = read_graphs(path)
    key = "Module.layers.1.fc2.Linear.forward.0"
    (place,) = [at for at, node in enumerate(graph.tree.nodes) if node.call and node.call.key == key and not node.slot]

    details = details_of_database(graph.tree, path, 0, 0).of(place)

    assert details is not None
    (output,) = [row for row in details["rows"] if row["place"] == "output.0"]
    dumped = json.loads((SOUND / "step0" / "rank0" / "dump.json").read_bytes())["data"][key]["output"][0]
    assert output["golden"] == [dumped[name] for name in ("Max", "Min", "Mean", "Norm")]
    assert output["ours"] == pytest.approx([3 * number for number in output["golden"]])
    assert output["result"] == "error"
    assert output["error"] == pytest.approx(2)
    assert details["stack"]


def test_of_merged_ranks_it_is_said_how(theirs):
    path = theirs("merged")
    (graph,) = read_graphs(path)
    ((key, text),) = _query(
        path, "SELECT node_name, parallel_merge_info FROM tb_nodes WHERE parallel_merge_info != '' LIMIT 1"
    )
    (place,) = [at for at, node in enumerate(graph.tree.nodes) if node.call and node.call.key == key and not node.slot]

    details = details_of_database(graph.tree, path, 0, 0).of(place)

    assert details is not None
    assert details["stack"][: len(json.loads(text))] == json.loads(text)


@pytest.mark.parametrize("name", ["build", "compare", "merged"])
def test_a_page_is_written_of_each(name, theirs, tmp_path):
    page = tmp_path / "graph.html"

    assert main(["graph", str(theirs(name)), "-o", str(page)]) == 0

    assert page.read_text().startswith("<!doctype html>")


def test_a_file_in_a_folder_that_cannot_be_written_to_is_read_and_nothing_left_beside_it(theirs, tmp_path):
    path = theirs("build")
    tmp_path.chmod(0o500)
    try:
        assert len(list(read_graphs(path))) == 1
    finally:
        tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"no database at all", gzip.compress(b"SQLite", mtime=0)])
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "other.vis.db"
    path.write_bytes(content)

    with pytest.raises(DumpError, match="is no graph of msprobe's"):
        list(read_graphs(path))


@pytest.mark.parametrize(
    "column", ["input_data", "matched_node_link", "parallel_merge_info", "up_node", "micro_step_id"]
)
@pytest.mark.parametrize("value", ["{", "null", "[1]", -1, "x", ""])
def test_rows_that_are_damaged_are_refused_or_left_out(column, value, theirs, tmp_path):
    path = theirs("compare")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE tb_nodes SET {column} = ? WHERE node_order % 3 = 0", (value,))

    with contextlib.suppress(DumpError):
        for graph in read_graphs(path):
            rank = draw_rank(graph, "all", 1, served=False)
            write_page(DrawnGraphs("", [rank], ()), tmp_path / "graph.html")


def test_a_rank_cannot_drive_a_terminal_or_a_document(theirs, tmp_path, capsys):
    path = theirs("build")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE tb_nodes SET rank = ?", ("\x1b[2J<b>",))

    main(["graph", str(path), "-o", str(tmp_path / "graph.md")])

    assert "\x1b" not in capsys.readouterr().out
    assert "<b>" not in (tmp_path / "graph.md").read_text()


def test_a_step_that_is_not_there_is_refused(theirs):
    with pytest.raises(DumpError, match="expected one of step0 rank0"):
        list(read_graphs(theirs("build"), step=3))


@pytest.mark.parametrize(("name", "words"), [("build", [BAD]), ("compare", [FAULTY, SOUND])])
def test_tables_and_indexes_are_those_of_msprobe(name, words, theirs, tmp_path):
    ours = _written(tmp_path, *words)

    for table in ("tb_nodes", "tb_config", "tb_stack"):
        assert _query(ours, f"PRAGMA table_info({table})") == _query(theirs(name), f"PRAGMA table_info({table})")
    indexes = [
        [row[2] for row in _query(path, f"PRAGMA index_info(index{number})")]
        for path in (ours, theirs(name))
        for number in range(1, 8)
    ]
    assert indexes[:7] == indexes[7:]
    assert stat.S_IMODE(ours.stat().st_mode) == 0o640


_SAME = "node_name, node_type, micro_step_id, matched_distributed, modified, data_source, step, rank, is_distributed"


def test_rows_of_a_build_are_those_of_msprobe(theirs, tmp_path):
    ours, recorded = _written(tmp_path, BAD, "--overflow"), theirs("build")

    rows = {row[0]: row for row in _query(ours, f"SELECT {_SAME} FROM tb_nodes")}
    expected = {row[0]: row for row in _query(recorded, f"SELECT {_SAME} FROM tb_nodes") if row[0] in rows}
    assert rows == expected

    # msprobe puts functions between modules into rows of their own
    parents = "SELECT node_name, up_node FROM tb_nodes"
    above = {name: "DefaultModel" if "Between" in parent else parent for name, parent in _query(recorded, parents)}
    assert all(above[name] == parent for name, parent in _query(ours, parents))
    for path in (ours, recorded):
        for name, below in _query(path, "SELECT node_name, sub_nodes FROM tb_nodes WHERE sub_nodes != ''"):
            kept = dict(_query(path, parents))
            assert all(kept[one] == name for one in json.loads(below))

    levels = "SELECT node_name, overflow_level FROM tb_nodes WHERE node_type != '9' ORDER BY node_name"
    known = dict(_query(ours, levels))
    assert known == {name: level for name, level in _query(recorded, levels) if name in known}


def test_tensors_of_a_build_are_those_of_msprobe(theirs, tmp_path):
    ours = _written(tmp_path, BAD)
    texts = "SELECT node_name, input_data, output_data FROM tb_nodes"
    expected = {
        name: (json.loads(inputs), json.loads(outputs)) for name, inputs, outputs in _query(theirs("build"), texts)
    }

    for name, *found in _query(ours, texts):
        for data, known in zip(map(json.loads, found), expected[name], strict=True):
            tensors = {place: form for place, form in known.items() if str(form.get("type")).endswith("Tensor")}
            assert {place: form for place, form in data.items() if "Tensor" in str(form.get("type"))} == tensors
            assert data.keys() == known.keys()


def test_a_backward_has_the_stack_of_its_forward(tmp_path):
    ours = _written(tmp_path, BAD)
    query = "SELECT stack_info FROM tb_nodes JOIN tb_stack ON stack_id = tb_stack.id WHERE node_name = ?"

    ((forward,),), ((backward,),) = (
        _query(ours, query, f"Functional.linear.3.{way}") for way in ("forward", "backward")
    )

    assert forward == backward
    assert json.loads(forward)


def test_a_comparison_has_our_verdicts_and_the_ways_to_counterparts(tmp_path, capsys):
    main(["graph", str(FAULTY), str(SOUND), "--json"])
    (document,) = json.loads(capsys.readouterr().out)
    ours = _written(tmp_path, FAULTY, SOUND)

    marked = dict(_query(ours, "SELECT node_name, precision_index FROM tb_nodes WHERE data_source = 'NPU'"))
    assert all(marked[finding["key"]] == 1 for finding in document["findings"])
    above = dict(_query(ours, "SELECT node_name, up_node FROM tb_nodes WHERE data_source = 'Bench'"))
    links = _query(
        ours, "SELECT node_name, matched_node_link FROM tb_nodes WHERE data_source = 'NPU' AND up_node != ''"
    )
    for name, text in links:
        link = json.loads(text)
        assert (marked[name] is None) == (not link)
        assert all(above[below] == one for one, below in pairwise(link))
    assert [name for name, text in links if text == "[]"] == ["Tensor.mul_.0.forward", "Tensor.mul_.0.backward"]


def test_what_is_written_is_read_again(tmp_path):
    ours = _written(tmp_path, FAULTY, SOUND)
    (compared,) = read_graphs(FAULTY, SOUND)

    (again,) = read_graphs(ours)

    assert again.tree.sizes.tolist() == compared.tree.sizes.tolist()
    assert again.tree.structures.tolist() == compared.tree.structures.tolist()
    calls = [place for place, node in enumerate(compared.tree.nodes) if node.call is not None and not node.slot]
    blamed = int(NodeVerdict.ERROR)
    assert [min(int(compared.found.verdicts[at]), blamed) for at in calls] == [
        int(again.found.verdicts[at]) for at in calls
    ]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, capsys):
    (tmp_path / "taken.vis.db").mkdir()

    assert main(["graph", str(BAD), "-o", str(tmp_path / "taken.vis.db")]) == 1

    assert "cannot write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.vis.db"]
