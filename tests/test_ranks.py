"""Jobs of several ranks in tests: what becomes of one whose ranks do not all start."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

SCRIPT = """
import os
import torch.distributed as dist

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        raise OSError("no room for rank 1")
    dist.init_process_group("gloo")
"""


def test_a_job_of_which_one_rank_does_not_start_ends_with_that_ranks_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with status 1; rank 0 .*OSError: no room for rank 1"):
        run_ranks(script, patience_s=1, timeout_s=60)
