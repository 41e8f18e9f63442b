"""Ranks that share a model on the page: the first screen, and all of them put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.compare.dumps import forward, tensor, write_dump
from tests.analysis.graph.shared_dumps import write_shared
from tests.analysis.graph.test_meetings import write_collectives
from tests.dashboards.graph.conftest import OpenGraph, expect_shown
from trainermon.cli import main

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of two ranks, of which the second has a fault."""
    folder = tmp_path_factory.mktemp("shared")
    main(["graph", *map(str, write_shared(folder)), "-o", str(folder / "page.html")])
    return folder / "page.html"


def test_the_first_screen_shows_the_rank_where_it_began(open_graph: OpenGraph, shared: Path) -> None:
    page = open_graph(shared)

    expect_shown(page, "step0 rank1")
    assert str(page.text_content("#panel h2")).startswith("norm LayerNorm")


def test_a_dial_puts_the_ranks_together_at_the_same_node(open_graph: OpenGraph, shared: Path) -> None:
    page = open_graph(shared)
    dial = page.get_by_label("ranks put together")
    assert dial.locator("option").all_text_contents() == ["each rank", "whole model"]
    dial.select_option("model")

    expect_shown(page, "step0 whole model")
    assert str(page.text_content("#panel h2")).startswith("norm LayerNorm")
    assert "tp 1 of 2 that differ" in str(page.text_content("#panel table"))
    page = open_graph(shared, page.evaluate("location.hash"))
    expect_shown(page, "step0 whole model")
    page.locator("#levels .crumb").first.click()
    assert "is merged from 2 ranks (tp 2)" in str(page.text_content("#panel"))
    page.get_by_label("ranks put together").select_option("each")
    expect_shown(page, "step0 rank1")


def test_a_collective_leads_to_the_ranks_that_it_met(open_graph: OpenGraph, tmp_path: Path) -> None:
    write_collectives(tmp_path / "dumps")
    main(["graph", str(tmp_path / "dumps"), "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html")
    plain = page.locator("#map").screenshot()
    page.fill("#search", "all_gather")
    page.press("#search", "Enter")

    peers = page.locator("#panel .jumps button")
    assert peers.all_text_contents() == ["step0 rank1"]
    assert page.locator("#map").screenshot() != plain
    peers.first.click()
    expect_shown(page, "step0 rank1")
    assert str(page.text_content("#panel h2")).startswith("all_gather")


def test_steps_are_bars_as_high_as_they_differ(open_graph: OpenGraph, tmp_path: Path) -> None:
    for side in ("target", "golden"):
        for step, value in enumerate((1.0, 1.001, 2.0)):
            output = tensor(value=value if side == "target" else 1.0)
            write_dump(
                tmp_path / side / f"step{step}" / "rank0", {"Torch.relu.0.forward": forward(tensor(), output=output)}
            )
    main(["graph", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "page.html")])
    page = open_graph(tmp_path / "page.html")

    bars = page.locator(".spark button")
    heights = bars.locator("i").evaluate_all("bars => bars.map((bar) => bar.offsetHeight)")
    assert sorted(heights) == heights
    assert len(set(heights)) == 3
    assert "step 2: differs by" in str(bars.last.get_attribute("aria-label"))
    bars.first.click()
    expect_shown(page, "step0")
    page.keyboard.press("}")
    expect_shown(page, "step1")
    page.keyboard.press("{")
    assert bars.first.get_attribute("aria-current") == "step"
