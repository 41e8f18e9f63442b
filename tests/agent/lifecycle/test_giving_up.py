"""An agent whose disk stays full ends by itself, says what is not stored, and leaves it to the next one."""

import os
import subprocess
import sys

import pytest

from tests.agent.nodes import DEADLINE_S, expected

# Its arguments: the largest file that it can write, in bytes, and after how many seconds without a rank it gives up.
AGENT = """
import resource, sys
from trainermon.agent import daemon
from trainermon.agent.lifecycle import release
size, release.GIVE_UP_S = int(sys.argv.pop(1)), float(sys.argv.pop(1))
daemon.START_RETRY_S = 0.05
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.exit(daemon.run_command_line())
"""


@pytest.mark.parametrize(
    ("size", "reason"),
    [(1000, "not everything is stored; the rest stays in"), (0, "the run directory cannot be used: [Errno 27]")],
)
def test_an_agent_without_room_ends_and_the_next_one_stores_the_rest(make_run, size, reason):
    run = make_run()
    rank = run.rank()
    rank.steps(0, 5)
    rank.end()

    ended = subprocess.run(
        [sys.executable, "-c", AGENT, str(size), "0.5", run.spool, "--log-to-stderr"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # a module that ends early would never be loaded again
    )

    assert ended.returncode == 1, ended.stderr
    assert reason in ended.stderr
    assert "this agent ends with 5 records of steps not stored" in ended.stderr
    run.launch_agent()
    run.gone()
    assert run.stored() == expected(0, range(5))
