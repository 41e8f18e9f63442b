"""What FSDP's adapters refuse and leave behind; both ranks check for themselves."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_refusals_detaching_and_what_fsdp_does_not_manage(tmp_path):
    places: Any = {"TRAINERMON_SPOOL": f"{tmp_path}/spool", "TRAINERMON_OUTPUT": f"{tmp_path}/output"}

    run_ranks(Path(__file__).with_name("edges_worker.py"), **places)
