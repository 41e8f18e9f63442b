"""What monitors of training are known to get wrong in Megatron-Core, watched by `TrainerMon` on two ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks


@pytest.mark.distributed
def test_every_row_is_that_of_the_whole_model_and_megatron_alone_changes_nothing(tmp_path):
    places: Any = {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}
    worker = Path(__file__).with_name("known_faults_megatron.py")
    run_ranks(worker, world_size=2, timeout_s=900, PYTHONWARNINGS="ignore", **places)
