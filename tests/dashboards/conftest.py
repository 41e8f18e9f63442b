"""One Chromium for the tests of a file; every test gets pages that must stay free of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.dashboards.fake_agent import FakeAgent, serving
from tests.server_programs import find_program

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
READY_MS = 600_000

DRAWN = """Promise.all(document.getAnimations().map((one) => one.finished.catch(() => null))).then(
    () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))))"""
"""A promise, fulfilled when the page shows what it has been told."""

NewPage = Callable[..., Page]
OpenPage = Callable[..., Page]
Serve = Callable[..., FakeAgent]
PAGES = pytest.StashKey[list[Page]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Close what a test has opened before servers of its fixtures stop: a page complains when its server is gone."""
    try:
        yield
    finally:
        for page in item.stash.get(PAGES, []):
            page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer: while Playwright is open its event loop counts as running, and no other test can start one."""
    expect.set_options(timeout=READY_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        yield chromium
        chromium.close()


def is_error(message: ConsoleMessage) -> bool:
    """Whether a page complains; a violation of the content policy is an error, too."""
    return message.type == "error"


@pytest.fixture
def new_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[NewPage]:
    """Open an empty page on which nothing may go wrong while the test runs; it is closed with the end of the test.

    `complains` says which messages of the console are faults.
    """
    complaints: list[str] = []
    pages = request.node.stash.setdefault(PAGES, [])

    def open_(complains: Callable[[ConsoleMessage], bool] = is_error, **context: Any) -> Page:
        page = browser.new_page(**{"viewport": {"width": 1300, "height": 800}, **context})
        pages.append(page)
        page.set_default_timeout(READY_MS)
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.on("console", lambda message: complaints.append(message.text) if complains(message) else None)
        return page

    yield open_
    assert complaints == []


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a run until the test is over."""
    with contextlib.ExitStack() as agents:
        yield lambda run, port=0: agents.enter_context(serving(run, port=port))


@pytest.fixture
def open_page(new_page: NewPage) -> Iterator[OpenPage]:
    """Open an agent's page and wait until it is ready; it may ask nobody but its agent."""
    foreign: list[str] = []

    def open_(agent: FakeAgent, fragment: str = "", *, may_lose: bool = False, **context: Any) -> Page:
        def note_request(request: Request) -> None:
            if not request.url.startswith(agent.url):
                foreign.append(request.url)

        complains = (lambda message: False) if may_lose else is_error
        page = new_page(complains, **{"viewport": {"width": 1320, "height": 1060}, **context})
        page.on("request", note_request)
        page.goto(agent.url + fragment)
        page.locator("html[data-ready]").wait_for()
        return page

    yield open_
    assert foreign == []
