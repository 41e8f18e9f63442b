"""A kept step is replayed later: the page's commands are run as they stand there."""

import pytest

from tests.docs.pages import check_page


@pytest.mark.slow
def test_the_page_replays_the_step(tmp_path):
    check_page("replay.md", tmp_path)
