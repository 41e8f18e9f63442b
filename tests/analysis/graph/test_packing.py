"""What the page is given: shared trees, columns at their places, and modules joined into one script."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainermon.analysis.graph.findings import judge_alone
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.joining import join_modules
from trainermon.analysis.graph.page.packing import DrawnRank, pack, pack_rank, strip_of
from trainermon.analysis.graph.tree import read_tree
from trainermon.dump.files.reader import read_stacks

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"
_TYPES: dict[str, Any] = {"u8": np.uint8, "i32": np.dtype("<i4"), "f32": np.dtype("<f4")}


def _rank(name):
    directory = RECORDED / name / "step0" / "rank0"
    tree = read_tree(directory)
    code = PageCode()
    lines = code.add(tree, read_stacks(directory), (), None)
    return DrawnRank(name, str(directory), tree, judge_alone(tree, directory), find_flow(tree), {}, lines, code)


def _all_columns(head):
    yield from (shared["columns"] for shared in head["skeletons"])
    yield from (member[part] for member in head["members"] for part in ("verdicts", "columns"))


def _column(packed, place):
    content = gzip.decompress(packed.pieces[place["piece"]])
    if place["type"] == "json":
        return json.loads(content, parse_constant=pytest.fail)
    column = np.frombuffer(content, _TYPES[place["type"]])
    assert len(column) == place["count"]
    return column


def test_columns_are_the_pieces_that_the_header_says_and_equal_ones_are_there_once():
    ranks = [_rank(name) for name in ("sound", "faulty", "sound", "nan")]

    packed = pack([pack_rank(rank) for rank in ranks])

    head = json.loads(gzip.decompress(packed.head), parse_constant=pytest.fail)
    # A NaN looks like no other value where a dump tells no order: the last has other edges.
    assert [member["skeleton"] for member in head["members"]] == [0, 1, 0, 2]
    places = [head["code"], *(one for columns in _all_columns(head) for one in columns.values())]
    kinds = {place["piece"]: place["type"] for place in places}
    assert len({(kinds[number], piece) for number, piece in enumerate(packed.pieces)}) == len(packed.pieces)
    for rank, member in zip(ranks, head["members"], strict=True):
        shared = head["skeletons"][member["skeleton"]]
        columns = {
            name: _column(packed, place)
            for name, place in {**shared["columns"], **member["verdicts"], **member["columns"]}.items()
        }
        assert columns["sizes"].tolist() == rank.tree.sizes.tolist()
        assert columns["verdicts"].tolist() == rank.found.verdicts.tolist()
        consumers = np.cumsum(columns["edge_gaps"])
        assert consumers.tolist() == [edge.consumer for edge in rank.flow.edges]
        assert (consumers - columns["edge_lengths"]).tolist() == [edge.producer for edge in rank.flow.edges]
        ends = np.cumsum(columns["key_lengths"])
        keys = [
            columns["keys"][end - size : end].tobytes().decode()
            for end, size in zip(ends, columns["key_lengths"], strict=True)
        ]
        assert keys == ["" if node.call is None else node.call.key for node in rank.tree.nodes]
        assert member["worst_verdict"] == max(map(int, member["strip"])) == max(rank.found.verdicts)
        names = [columns["texts"][number] for number in columns["names"]]
        assert names == [node.name for node in rank.tree.nodes]


@pytest.mark.parametrize("count", [1, 2047, 2049, 5000, 100_003])
def test_each_cell_of_a_strip_has_the_worst_of_its_stretch(count):
    verdicts = np.random.default_rng(count).integers(0, 6, count).astype(np.uint8)

    strip = strip_of(verdicts)

    cells = len(strip)
    assert cells == min(count, 2048)
    ends = [at * count // cells for at in range(cells + 1)]
    assert strip == "".join(str(max(verdicts[begin:end])) for begin, end in itertools.pairwise(ends))


def test_the_rank_that_is_shown_first_comes_first():
    ranks = [pack_rank(_rank(name)) for name in ("sound", "faulty", "nan")]

    packed = pack(ranks, first=1)

    head = json.loads(gzip.decompress(packed.head))
    member = head["members"][1]
    skeleton = head["skeletons"][member["skeleton"]]["columns"]
    needed = {column["piece"] for one in (skeleton, member["verdicts"], member["columns"]) for column in one.values()}
    assert needed | {head["code"]["piece"]} == set(range(packed.num_first))
    assert packed.num_first < len(packed.pieces)
    assert [member["first_detail"] for member in head["members"]] == [
        0,
        ranks[0].num_nodes,
        ranks[0].num_nodes + ranks[1].num_nodes,
    ]


def test_modules_are_joined_in_the_order_in_which_they_need_each_other(tmp_path):
    (tmp_path / "one.js").write_text("export const ONE = 1;\nexport function two() {\n  return ONE + 1;\n}\n")
    (tmp_path / "main.js").write_text(
        'import { ONE, two as second } from "./one.js";\n\nglobalThis.sum = ONE + second();\n'
    )

    script = join_modules(tmp_path / "main.js")

    assert "export" not in script
    assert script.index("return { ONE, two };") < script.index("const { ONE, two: second } = module0;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('import one from "./one.js";\n', "named imports"),
        ("export default 3;\n", "named imports"),
        ("", "imports itself"),
    ],
)
def test_what_cannot_be_joined_is_refused(text, message, tmp_path):
    (tmp_path / "one.js").write_text('import { main } from "./main.js";\nexport const one = 1;\n')
    (tmp_path / "main.js").write_text(text or 'import { one } from "./one.js";\nexport const main = 1;\n')

    with pytest.raises(ValueError, match=message):
        join_modules(tmp_path / "main.js")
