"""Pages of recorded dumps in a real browser, opened from their files or served."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import NewPage
from trainermon.analysis.graph.meetings import NO_MEETINGS
from trainermon.analysis.graph.page.output import BESIDE, DrawnGraphs, details_of, draw_rank, open_server
from trainermon.analysis.graph.page.serving import GraphServer
from trainermon.analysis.graph.reading import read_graphs
from trainermon.cli import main

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"
OpenGraph = Callable[..., Page]
ServeGraph = Callable[..., GraphServer]


def expect_shown(page: Page, label: str) -> None:
    """Wait until the graph of the step and rank is shown, not only being read."""
    expect(page.locator("#facts")).to_contain_text(re.compile(f"^(?!Reading ).*{re.escape(label)}"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a faulty dump against a sound one, of one that is not finite, of a sound one, and of three ranks."""
    folder = tmp_path_factory.mktemp("pages")
    faulty, sound, bad = (str(RECORDED / name) for name in ("faulty", "sound", "nan"))
    found = {}
    for name, words in (("faulty", [faulty, sound]), ("nan", [bad]), ("sound", [sound])):
        found[name] = folder / f"{name}.html"
        main(["graph", *words, "-o", str(found[name])])
    for side, sources in (("target", [sound, faulty, sound]), ("golden", [sound] * 3)):
        for rank, source in enumerate(sources):
            dump = folder / side / "step0" / f"rank{rank}"
            shutil.copytree(next(Path(source).rglob("rank0")), dump)
            (dump / "dump_info.json").write_text(json.dumps({"layout": {"axes": {"dp": [rank, 3], "tp": [0, 1]}}}))
    found["ranks"] = folder / "ranks.html"
    main(["graph", str(folder / "target"), str(folder / "golden"), "-o", str(found["ranks"])])
    return found


@pytest.fixture
def open_graph(new_page: NewPage, files: dict[str, Path]) -> Iterator[OpenGraph]:
    """Open a page by its name or path; at the end nothing may have been fetched."""
    fetched: list[str] = []

    def open_(name: str | Path, fragment: str = "", **context: Any) -> Page:
        page = new_page(**context)
        page.on("request", lambda request: fetched.append(request.url) if request.url.startswith("http") else None)
        page.goto(f"file://{files.get(str(name), name)}{fragment}")
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_
    assert fetched == []


@pytest.fixture
def serve_graph() -> Iterator[ServeGraph]:
    """Serve the page of a dump until the test is over; `notes` says where what is written on it is kept."""
    with contextlib.ExitStack() as servers:
        yield lambda path, golden, notes=None: servers.enter_context(_serving(path, golden, notes))


@contextlib.contextmanager
def _serving(path: Path, golden: Path | None, notes: Path | None) -> Iterator[GraphServer]:
    graphs = list(read_graphs(path, golden))
    ranks = [draw_rank(graph, BESIDE, len(graphs), served=True) for graph in graphs]
    details = [details_of(graph) for graph in graphs]
    drawn = DrawnGraphs("", ranks, [NO_MEETINGS] * len(ranks), golden=str(golden or ""), path=notes)
    with open_server(drawn, details.__getitem__, "", in_browser=False) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
