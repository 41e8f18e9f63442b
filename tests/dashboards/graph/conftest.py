"""Pages of recorded dumps, opened from their files in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from trainermon.cli import main

RECORDED = Path(__file__).parents[2] / "analysis" / "compare" / "recorded"
OpenGraph = Callable[..., Page]


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
def open_graph(browser: Browser, files: dict[str, Path]) -> Iterator[OpenGraph]:
    """Open a page by its name or path; at the end nothing may have gone wrong, and nothing been fetched."""
    complaints: list[str] = []
    pages: list[Page] = []

    def open_(name: str | Path, fragment: str = "") -> Page:
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
        page.goto(f"file://{files.get(str(name), name)}{fragment}")
        page.wait_for_selector("body[data-ready]")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert complaints == []
