"""Modules of the page, run by themselves in a real browser on the data of real dumps."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

import trainermon
from trainermon.analysis.graph.page.packing import PackedRank, pack

WEB = Path(trainermon.__file__).parent / "dashboards" / "web"
LOAD = """
    const { GraphStore } = await import('/graph/data/store.js');
    const pieceOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
    const store = new GraphStore(header, async (number) => pieceOf(pieces[number]));
"""
LOAD_FIRST = f"{LOAD}const graph = await store.load(store.members[0]);"


@pytest.fixture(scope="module")
def module_page(browser: Browser) -> Iterator[Page]:
    """Return a page that loads modules from their folder."""
    page = browser.new_page()
    page.route("http://page.test/**", _from_folder)
    page.goto("http://page.test/")
    yield page
    page.close()


def header_and_pieces(*ranks: PackedRank) -> list[Any]:
    """Return the header of a page with these ranks, and its pieces in base64."""
    head, pieces, _ = pack(ranks)
    return [json.loads(gzip.decompress(head)), [base64.b64encode(gzip.decompress(one)).decode() for one in pieces]]


def _from_folder(route: Route) -> None:
    name = route.request.url.removeprefix("http://page.test/")
    if name:
        route.fulfill(body=(WEB / name).read_text(encoding="utf-8"), content_type="text/javascript")
    else:
        route.fulfill(body="<!doctype html>", content_type="text/html")
