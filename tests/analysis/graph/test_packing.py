"""What the page is given: shared trees, columns at their places, and modules joined into one script."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainermon.analysis.graph.findings import judge_alone
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.joining import join_modules
from trainermon.analysis.graph.page.packing import DrawnRank, pack, pack_rank
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


def _column(packed, begin, place):
    if place["type"] == "json":
        return json.loads(packed[begin : begin + place["count"]], parse_constant=pytest.fail)
    return np.frombuffer(packed, _TYPES[place["type"]], place["count"], begin)


def test_columns_are_where_the_header_says_and_equal_trees_are_there_once():
    ranks = [_rank(name) for name in ("sound", "faulty", "sound", "nan")]

    packed = zlib.decompress(pack([pack_rank(rank) for rank in ranks]), wbits=-zlib.MAX_WBITS)

    (length,) = struct.unpack_from("<I", packed)
    head = json.loads(packed[4 : 4 + length], parse_constant=pytest.fail)
    begin = 4 + length + -(4 + length) % 8
    # A NaN looks like no other value where a dump tells no order: the last has other edges.
    assert [member["skeleton"] for member in head["members"]] == [0, 1, 0, 2]
    for rank, member in zip(ranks, head["members"], strict=True):
        shared = head["skeletons"][member["skeleton"]]
        columns = {
            name: _column(packed, begin + place["offset"], place)
            for name, place in {**shared["columns"], **member["columns"]}.items()
        }
        assert columns["sizes"].tolist() == rank.tree.sizes.tolist()
        assert columns["verdicts"].tolist() == rank.found.verdicts.tolist()
        assert columns["consumers"].tolist() == [edge.consumer for edge in rank.flow.edges]
        names = [columns["texts"][number] for number in columns["names"]]
        assert names == [node.name for node in rank.tree.nodes]


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
