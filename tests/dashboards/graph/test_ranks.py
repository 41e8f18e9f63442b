"""Ranks that share a model on the page: the first screen, and all of them put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.analysis.graph.shared_dumps import write_shared
from tests.dashboards.graph.conftest import OpenGraph
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

    assert "step0 rank1" in str(page.text_content("#facts"))
    assert str(page.text_content("#panel h2")).startswith("norm LayerNorm")


def test_a_dial_puts_the_ranks_together_at_the_same_node(open_graph: OpenGraph, shared: Path) -> None:
    page = open_graph(shared)
    dial = page.get_by_label("ranks put together")
    assert dial.locator("option").all_text_contents() == ["each rank", "whole model"]
    dial.select_option("model")

    expect(page.locator("#facts")).to_contain_text("step0 whole model")
    assert str(page.text_content("#panel h2")).startswith("norm LayerNorm")
    assert "tp 1 of 2 that differ" in str(page.text_content("#panel table"))
    page.reload()
    expect(page.locator("#facts")).to_contain_text("step0 whole model")
    page.locator("#levels .crumb").first.click()
    assert "is merged from 2 ranks (tp 2)" in str(page.text_content("#panel"))
    page.get_by_label("ranks put together").select_option("each")
    expect(page.locator("#facts")).to_contain_text("step0 rank1")
