"""How a test of a page ends: whatever the order of its fixtures, the page goes before its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from tests.dashboards.conftest import NewPage

pytestmark = pytest.mark.server


@pytest.fixture
def outlasted() -> Iterator[list[Page]]:
    """Pages that must be closed when this fixture ends, which is before those that a test has named before it."""
    pages: list[Page] = []
    yield pages
    assert [page.is_closed() for page in pages] == [True, True]


def test_pages_are_closed_before_the_servers_of_later_fixtures_end(new_page: NewPage, outlasted: list[Page]) -> None:
    outlasted.extend((new_page(), new_page()))
