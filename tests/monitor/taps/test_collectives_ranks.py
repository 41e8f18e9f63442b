"""Collectives between two real ranks; what is checked is in the worker, on both of them."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks


@pytest.mark.distributed
def test_every_form_is_seen_and_what_is_not_seen_is_counted():
    texts = run_ranks(Path(__file__).with_name("collectives_worker.py"))

    assert all(text.rstrip().endswith("done") for text in texts), texts
