"""Gradients that a script writes to before the optimizer's step are seen as it uses them, and clipping is none."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_what_the_optimizer_uses_is_taken_again_unless_the_script_only_clipped(tmp_path):
    run_ranks(Path(__file__).with_name("written_worker.py"), str(tmp_path))
