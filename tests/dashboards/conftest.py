"""One Chromium for the tests of a file; every test gets a page that must stay free of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

OpenPage = Callable[..., Page]
Serve = Callable[..., FakeAgent]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer: while Playwright is open its event loop counts as running, and no other test can start one."""
    expect.set_options(timeout=READY_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a run until the test is over; the pages are closed before."""
    with contextlib.ExitStack() as agents:
        yield lambda run, port=0: agents.enter_context(serving(run, port=port))


@pytest.fixture
def open_page(browser: Browser, serve: Serve) -> Iterator[OpenPage]:
    """Open an agent's page and wait until it is ready; afterwards nothing may have gone wrong on any of them.

    A violation of the content policy is an error in the console, so it is seen here too.
    """
    complaints: list[str] = []
    pages: list[Page] = []

    def open_(agent: FakeAgent, fragment: str = "", *, may_lose: bool = False, **context: Any) -> Page:
        def note_message(message: ConsoleMessage) -> None:
            if message.type == "error" and not may_lose:
                complaints.append(message.text)

        def note_request(request: Request) -> None:
            if not request.url.startswith(agent.url):
                complaints.append(request.url)

        context.setdefault("viewport", {"width": 1320, "height": 1060})
        page = browser.new_page(**context)
        pages.append(page)
        page.set_default_timeout(READY_MS)
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.on("console", note_message)
        page.on("request", note_request)
        page.goto(agent.url + fragment)
        page.locator("html[data-ready]").wait_for()
        return page

    yield open_
    for page in pages:
        page.close()
    assert complaints == []
