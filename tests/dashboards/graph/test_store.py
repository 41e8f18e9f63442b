"""What the page reads, when, and what follows from it: trees, verdicts within, and where another rank has a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.conftest import NewPage
from tests.dashboards.graph.conftest import OpenGraph, ServeGraph, expect_shown
from tests.dashboards.graph.modules import LOAD, LOAD_FIRST, header_and_pieces, module_page
from trainermon.analysis.graph.findings import judge_alone, worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.overflow import overflow_levels
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.packing import DrawnRank, PackedRank, pack_rank
from trainermon.analysis.graph.tree import GraphKind, GraphTree, read_tree
from trainermon.cli import main
from trainermon.dump.files.reader import read_stacks

pytestmark = pytest.mark.server
page = module_page

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"
READ = """async ([header, pieces]) => {
    LOAD
    const { keyOf } = await import('/graph/data/skeleton.js');
    const numbers = (name) => Array.from(graph[name]);
    return {
        parents: numbers('parents'), worst: numbers('worst'), producers: numbers('producers'),
        consumers: numbers('consumers'), overflow: numbers('overflow'),
        keys: numbers('sizes').map((_, node) => keyOf(graph, node)),
    };
}""".replace("LOAD", LOAD_FIRST)
COUNTERPARTS = """async ([header, pieces]) => {
    LOAD
    const { nodeIn } = await import('/graph/data/ranks.js');
    const [one, other] = [await store.judge(store.members[0]), await store.judge(store.members[1])];
    return Array.from(one.sizes, (_, node) => nodeIn(other, one, node));
}""".replace("LOAD", LOAD)


def _packed(directory: Path) -> tuple[DrawnRank, PackedRank]:
    tree = read_tree(directory)
    code = PageCode()
    lines = code.add(tree, read_stacks(directory), (), None)
    rank = DrawnRank("r", str(directory), tree, judge_alone(tree, directory), find_flow(tree), {}, lines, code)
    return rank, pack_rank(rank)


@pytest.mark.parametrize("name", ["faulty", "nan"])
def test_what_is_left_out_of_the_data_follows_from_it(name: str, page: Page) -> None:
    rank, packed = _packed(RECORDED / name / "step0" / "rank0")
    found = page.evaluate(READ, header_and_pieces(packed))

    assert found["parents"] == rank.tree.parents.tolist()
    assert found["worst"] == worst_within(rank.tree, rank.found.verdicts).tolist()
    assert list(zip(found["producers"], found["consumers"], strict=True)) == [edge[:2] for edge in rank.flow.edges]
    assert found["overflow"] == overflow_levels(rank.tree).tolist()
    assert found["keys"] == ["" if node.call is None else node.call.key for node in rank.tree.nodes]


def test_a_node_of_another_rank_is_found_by_its_key_else_by_its_way(page: Page, tmp_path: Path) -> None:
    data = {
        f"Module.{name}.Linear.{direction}.0": forward(tensor(), output=tensor(), parameters={"weight": tensor()})
        for direction in ("forward", "backward")
        for name in ("früh", "a", "b")
    }
    others = {key: entry for key, entry in data.items() if ".a." not in key} | {
        "Torch.relu.0.forward": forward(tensor(), output=tensor())
    }
    (one, packed), (other, packed_other) = (
        _packed(write_dump(tmp_path / str(at), some)) for at, some in enumerate((data, others))
    )

    found = page.evaluate(COUNTERPARTS, header_and_pieces(packed, packed_other))

    places = {name: place for place, name in enumerate(_names(other.tree))}
    assert found == [places.get(name, -1) for name in _names(one.tree)]
    assert 0 < found.count(-1) < len(found) / 2


def _names(tree: GraphTree) -> list[Any]:
    """Return what each node is called in every rank: key and name, else the names of all that it is in."""
    names: list[Any] = []
    for place, node in enumerate(tree.nodes):
        parent = () if place == 0 else names[tree.parents[place]]
        key = node.call and node.call.key
        is_own = key and node.kind is not GraphKind.PARAMETER
        names.append(key if is_own else (parent, node.name))
    return names


def test_other_ranks_are_read_when_they_are_looked_at_and_once(
    new_page: NewPage, serve_graph: ServeGraph, tmp_path: Path
) -> None:
    for rank, value in enumerate((1.0, 2.0, 3.0)):
        data = {f"Torch.relu.{call}.forward": forward(tensor(), output=tensor(value=value)) for call in range(3)}
        write_dump(tmp_path / "step0" / f"rank{rank}", data)
    server, page = serve_graph(tmp_path, None), new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server.url)))
    page.goto(server.url)
    page.wait_for_selector("body[data-complete]")
    at_first = {url for url in asked if url.startswith("pieces/")}
    assert 0 < len(at_first) == len([url for url in asked if url.startswith("pieces/")]) < len(server.pieces)
    page.keyboard.press(".")
    expect_shown(page, "step0 rank1")
    later = [url for url in asked if url.startswith("pieces/") and url not in at_first]
    assert later  # its norms are its own
    page.keyboard.press(",")
    page.keyboard.press(".")
    expect_shown(page, "step0 rank1")
    pieces = [url for url in asked if url.startswith("pieces/")]
    assert len(pieces) == len(set(pieces)) == len(at_first) + len(later)


def test_a_file_that_is_cut_off_shows_what_is_there_and_says_what_is_not(open_graph: OpenGraph, tmp_path: Path) -> None:
    for rank in range(2):
        write_dump(tmp_path / "step0" / f"rank{rank}", {"Torch.relu.0.forward": forward(output=tensor(value=rank))})
    file = tmp_path / "page.html"
    main(["graph", str(tmp_path), "-o", str(file)])
    content = file.read_text()
    file.write_text(content[: content.rindex('<script type="application')])
    page = open_graph(file)

    expect(page.locator("#sentence")).to_have_text("Everything is finite.")
    page.keyboard.press(".")
    expect(page.locator("#facts")).to_contain_text("step0 rank1 cannot be shown: the file is cut off")
    page.get_by_label("step and rank").select_option("0")
    expect(page.locator("#facts")).to_contain_text("step0 rank0 · 4 nodes")
