"""Laws of the page's layout and folding, on graphs of real dumps and on made-up ones, run where they live."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.dashboards.graph.modules import LOAD_FIRST, header_and_pieces, module_page
from trainermon.analysis.graph.findings import NodeVerdict, judge_alone, worst_within
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.folding import fold_children
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.packing import DrawnRank, pack_rank
from trainermon.analysis.graph.tree import GraphTree, read_tree
from trainermon.dump.files.reader import read_stacks

pytestmark = pytest.mark.server
page = module_page

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"
SCRIPT = """async ([[header, pieces], open]) => {
    const { foldChildren } = await import('/graph/data/folding.js');
    const { layOut } = await import('/graph/layout.js');
    const { allBoxes, closedBoxes, shownIn, wiresBetween } = await import('/graph/wires.js');
    LOAD
    const opened = { isOpen: (node) => open === 'all' || open.includes(node), isApart: () => false };
    const root = layOut(graph, opened, (text) => 7 * text.length);
    const boxes = allBoxes(root);
    const closed = closedBoxes(root);
    const wires = wiresBetween(graph, closed, shownIn(graph, closed));
    const foldsOf = (node) => foldChildren(graph, node, () => false).map((fold) => fold.members);
    const place = (box) => [box.x, box.y, box.width, box.height];
    return {
        folds: Array.from({ length: graph.count }, (_, node) => foldsOf(node)),
        wires: wires.map(({ from, to }) => [from.node, to.node]),
        boxes: boxes.map((box) => (
            { node: box.node, place: place(box), children: box.children.map(place), isOpen: box.isOpen })),
    };
}""".replace("LOAD", LOAD_FIRST)


MARKED = """async ([header, pieces]) => {
    const { layOut } = await import('/graph/layout.js');
    const { closedBoxes } = await import('/graph/wires.js');
    LOAD
    graph.nonfinite.fill(1);
    const measure = (text) => 7 * text.length;
    const root = layOut(graph, { isOpen: () => true, isApart: () => false }, measure);
    const titleOf = ({ label, nodes }) => `!◆ ${label}${nodes.length > 1 ? `  x${nodes.length}` : ''}`;
    return closedBoxes(root).map((box) => [box.width, measure(titleOf(box))]);
}""".replace("LOAD", LOAD_FIRST)


IN_VIEW = """async ([[header, pieces], most]) => {
    const { layOut } = await import('/graph/layout.js');
    const { boxesInView } = await import('/graph/scene.js');
    const { allBoxes, bundled, closedBoxes, nearTo, shownIn, wiresBetween } = await import('/graph/wires.js');
    LOAD
    const root = layOut(graph, { isOpen: () => true, isApart: () => true }, (text) => 7 * text.length);
    const all = { left: -1e9, top: -1e9, right: 1e9, bottom: 1e9 };
    const closed = closedBoxes(root);
    const wires = wiresBetween(graph, closed, shownIn(graph, closed));
    return {
        all: allBoxes(root).length, drawn: boxesInView(graph, root, all, most).map((box) => box.node),
        wires: bundled(wires, new Map()).map(({ from, bundled }) => [from.node - 3, bundled]),
        near: bundled(wires, nearTo(graph, wires, graph.count - 1)).map(({ bundled }) => bundled ?? 1),
    };
}""".replace("LOAD", LOAD_FIRST)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    wide = {f"Torch.relu.{number}.forward": forward(output=tensor()) for number in range(3000)}
    keys = [f"Module.{'m.' * depth}m.Box.forward.0" for depth in range(60)]
    deep = dict(zip(keys, [None, *keys], strict=False))
    return {
        "faulty": RECORDED / "faulty" / "step0" / "rank0",
        "wide": write_dump(folder / "wide", wide),
        "deep": write_dump(folder / "deep", {key: forward(output=tensor()) for key in keys}, construct=deep),
        "empty": write_dump(folder / "empty", {}),
    }


def _laid_out(page: Page, directory: Path, opened: Any = "all") -> tuple[GraphTree, Any]:
    tree = read_tree(directory)
    return tree, page.evaluate(SCRIPT, [_packed(tree, directory), opened])


def _packed(tree: GraphTree, directory: Path) -> Any:
    code = PageCode()
    lines = code.add(tree, read_stacks(directory), (), None)
    rank = DrawnRank("rank0", str(directory), tree, judge_alone(tree, directory), find_flow(tree), {}, lines, code)
    return header_and_pieces(pack_rank(rank))


def test_a_title_with_both_marks_stays_in_its_box(page: Page, dumps: dict[str, Path]) -> None:
    found = page.evaluate(MARKED, _packed(read_tree(dumps["faulty"]), dumps["faulty"]))

    assert len(found) > 20
    assert all(10 + title <= width - 4 for width, title in found)


@pytest.mark.parametrize("name", ["faulty", "wide", "deep", "empty"])
def test_boxes_contain_their_children_and_siblings_do_not_overlap(
    name: str, page: Page, dumps: dict[str, Path]
) -> None:
    _, found = _laid_out(page, dumps[name])

    for box in found["boxes"]:
        x, y, width, height = box["place"]
        rows = sorted(box["children"], key=lambda child: (child[1], child[0]))
        for cx, cy, cwidth, cheight in rows:
            assert x < cx
            assert y < cy
            assert cx + cwidth < x + width
            assert cy + cheight < y + height
        for one, other in itertools.pairwise(rows):
            assert one[1] + one[3] <= other[1] or one[0] + one[2] <= other[0]


@pytest.mark.parametrize("name", ["faulty", "wide", "deep", "empty"])
def test_neighbours_are_folded_as_on_a_terminal(name: str, page: Page, dumps: dict[str, Path]) -> None:
    tree, found = _laid_out(page, dumps[name])

    worst = worst_within(tree, judge_alone(tree, dumps[name]).verdicts)
    expected = [[fold.members for fold in fold_children(tree, node, (), worst)] for node in range(len(tree.nodes))]
    assert found["folds"] == [[[list(member) for member in fold] for fold in folds] for folds in expected]


def test_wires_join_closed_boxes_and_lead_downwards_in_a_forward(page: Page, dumps: dict[str, Path]) -> None:
    tree, found = _laid_out(page, dumps["faulty"])

    places = {box["node"]: box["place"] for box in found["boxes"] if not box["isOpen"]}
    assert len(found["wires"]) > 20
    for producer, consumer in found["wires"]:
        is_forward = tree.nodes[consumer].direction == "forward"
        above, below = (producer, consumer) if is_forward else (consumer, producer)
        assert places[above][1] + places[above][3] <= places[below][1]


def test_unfolding_moves_nothing_above_it(page: Page, dumps: dict[str, Path]) -> None:
    groups = [0, 1, 2]
    tree, before = _laid_out(page, dumps["faulty"], groups)
    layer = next(place for place, node in enumerate(tree.nodes) if node.name == "layers.1")
    _, after = _laid_out(page, dumps["faulty"], [*groups, layer])

    heights = [{box["node"]: box["place"][1] for box in found["boxes"]} for found in (before, after)]
    assert all(heights[1][node] == y for node, y in heights[0].items() if node <= layer)
    assert len(heights[1]) > len(heights[0])


def _in_view(page: Page, directory: Path, most: int) -> Any:
    """Return the boxes that are drawn of all, at most so many, and the wires."""
    tree = read_tree(directory)
    code = PageCode()
    lines = code.add(tree, read_stacks(directory), (), None)
    found = judge_alone(tree, directory)
    found.verdicts[-1] = NodeVerdict.BLAMED
    rank = DrawnRank("rank0", str(directory), tree, found, find_flow(tree), {}, lines, code)
    return page.evaluate(IN_VIEW, [header_and_pieces(pack_rank(rank)), most])


def test_of_too_many_boxes_the_largest_are_drawn_and_each_with_a_finding(page: Page, tmp_path: Path) -> None:
    data = {f"Torch.f{number}x.0.forward": forward(output=tensor()) for number in range(300)}
    found = _in_view(page, write_dump(tmp_path / "dump", data), 100)

    assert found["all"] == 303
    assert len(found["drawn"]) == 100
    assert {0, 302} <= set(found["drawn"])  # the model, and where it began
    assert _in_view(page, tmp_path / "dump", 400)["drawn"] == list(range(303))


def test_many_lines_into_a_box_are_one_with_a_count(page: Page, tmp_path: Path) -> None:
    orders = {number: tensor(order=number) for number in range(20)}
    data = {f"Torch.f{number}x.0.forward": forward(output=one) for number, one in orders.items()}
    data["Torch.cat.0.forward"] = forward(*orders.values(), output=tensor(order=99))
    found = _in_view(page, write_dump(tmp_path / "dump", data), 1500)

    assert found["wires"] == [[19, 20]]  # from the last, for all
    assert found["near"] == [1] * 20  # next to the selection each is drawn


TITLES_DRAWN = """async (camera) => {
    const { draw } = await import('/graph/canvas.js');
    const context = document.createElement('canvas').getContext('2d');
    const drawn = [];
    context.fillText = (text, x, y) => drawn.push([text, x, y]);
    const look = { kind: 'text', fill: '#000', halo: '#fff', isBold: true };
    const frame = (x, y, width, height, text) => (
        { ...look, text, x: x + 10, y: y + 20, frame: { x, y, width, height } });
    const shapes = [
        frame(0, 0, 400, 1000, 'outer'), frame(20, 40, 300, 300, 'above'), frame(20, 400, 300, 500, 'inner')];
    draw(context, shapes, camera, { width: 400, height: 200, font: 'sans-serif' });
    return drawn;
}"""


@pytest.mark.parametrize(
    ("top", "titles"),
    [
        (0, ["outer", "above"]),
        (100, ["outer", "above"]),
        (350, ["inner", "outer"]),  # those at their own place first
        (600, ["outer", "inner"]),
        (940, ["outer"]),
        (1001, []),
    ],
)
def test_the_title_of_a_frame_stays_in_view_as_long_as_the_frame_does(top: int, titles: list[str], page: Page) -> None:
    drawn = page.evaluate(TITLES_DRAWN, {"x": 200, "y": top + 100, "zoom": 1})

    assert [text.removeprefix("\u203a ") for text, _, _ in drawn] == titles
    assert all(top < y < top + 200 for _, _, y in drawn)
    assert len({(x, y) for _, x, y in drawn}) == len(drawn)
