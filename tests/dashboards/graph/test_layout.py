"""Laws of the page's layout and folding, on graphs of real dumps and on made-up ones, run where they live."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

import trainermon
from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.graph.findings import judge_alone
from trainermon.analysis.graph.flow import find_flow
from trainermon.analysis.graph.folding import fold_children
from trainermon.analysis.graph.page.code import PageCode
from trainermon.analysis.graph.page.packing import PackedRank, pack
from trainermon.analysis.graph.tree import GraphTree, read_tree
from trainermon.dump.files.reader import read_stacks

pytestmark = pytest.mark.server

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"
WEB = Path(trainermon.__file__).parent / "dashboards" / "web"
SCRIPT = """async ([packed, open]) => {
    const { unpack } = await import('/graph/skeleton.js');
    const { foldChildren } = await import('/graph/folding.js');
    const { layOut } = await import('/graph/layout.js');
    const { allBoxes, closedBoxes, shownIn, wiresBetween } = await import('/graph/wires.js');
    const [graph] = unpack(Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0)).buffer);
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
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """Return a page that loads its modules from their folder."""
    page = browser.new_page()
    page.route("http://page.test/**", _from_folder)
    page.goto("http://page.test/")
    yield page
    page.close()


def _from_folder(route: Route) -> None:
    name = route.request.url.removeprefix("http://page.test/")
    if name:
        route.fulfill(body=(WEB / name).read_text(encoding="utf-8"), content_type="text/javascript")
    else:
        route.fulfill(body="<!doctype html>", content_type="text/html")


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
    code = PageCode()
    lines = code.add(tree, read_stacks(directory), (), None)
    rank = PackedRank("rank0", str(directory), tree, judge_alone(tree, directory), find_flow(tree), {}, lines)
    packed = pack([rank], code)
    return tree, page.evaluate(SCRIPT, [base64.b64encode(packed).decode(), opened])


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

    expected = [[fold.members for fold in fold_children(tree, node)] for node in range(len(tree.nodes))]
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
