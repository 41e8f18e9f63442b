"""How processes ended that the agent is not the parent of; here the test is, and collects them before or after."""

import os
import signal
import subprocess
import sys

import pytest

from tests.agent.nodes import wait_for
from trainermon.agent.hang import exits as exits_module
from trainermon.agent.hang.evidence import ProcessExit
from trainermon.agent.hang.exits import ExitWatch


@pytest.fixture
def watch():
    watch = ExitWatch()
    yield watch
    watch.close()


@pytest.fixture
def start():
    children = []

    def start(code):
        children.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.stdin.close()
        child.wait()


def ended(watch, rank):
    def look():
        watch.poll()
        return watch.exit_of(rank)

    return wait_for(look, "the end of the process")


@pytest.fixture(params=["with PIDFD_GET_INFO", "without it"])
def kernel(request, monkeypatch):
    """Have the kernel tell an exit status through a pidfd, as Linux does since 6.15, or not."""
    if request.param == "without it":
        monkeypatch.setattr(exits_module, "_code_from_pidfd", lambda descriptor: None)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("input(); raise SystemExit(7)", ProcessExit(status=7)),
        ("input()", ProcessExit(status=0)),
        ("import os; input(); os.kill(os.getpid(), 9)", ProcessExit(signal=9)),
    ],
)
def test_exit_of_a_process_that_nobody_has_collected_yet(watch, start, code, expected):
    child = start(code)
    watch.follow(3, child.pid)
    watch.poll()
    assert watch.exit_of(3) is None

    child.stdin.write(b"\n")
    child.stdin.flush()

    assert ended(watch, 3) == expected


def test_exit_that_cannot_be_known_is_told_as_such(watch, start, monkeypatch):
    monkeypatch.setattr(exits_module, "_code_from_pidfd", lambda descriptor: None)
    child = start("")
    watch.follow(0, child.pid)
    child.wait()

    assert ended(watch, 0) == ProcessExit()
    assert ProcessExit().text.endswith("(exit status not known here)")


def test_next_process_of_a_rank_takes_the_place_of_the_last_one(watch, start):
    first, second = start("input()"), start("input()")
    watch.follow(0, first.pid)
    first.kill()
    assert ended(watch, 0) == ProcessExit(signal=signal.SIGKILL)

    watch.follow(0, second.pid)

    assert watch.exit_of(0) is None
    assert watch.pid(0) == second.pid


def test_process_that_is_gone_already_and_nobody_are_no_error(watch, start):
    child = start("")
    child.wait()
    watch.follow(0, child.pid)
    watch.follow(1, 0)

    watch.poll()

    assert (watch.exit_of(0), watch.exit_of(1), watch.pid(1)) == (None, None, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_of_ends_that_are_seen_at_once_the_first_is_known(watch, start, order):
    children = {rank: start("input()") for rank in range(3)}
    for rank, child in children.items():
        watch.follow(rank, child.pid)
    for rank in order:
        children[rank].kill()
        os.waitid(os.P_PID, children[rank].pid, os.WEXITED | os.WNOWAIT)

    watch.poll()

    assert watch.in_order([4, *range(3)]) == [*order, 4]


def test_nothing_stays_open(start):
    before = len(os.listdir("/proc/self/fd"))
    watch, child = ExitWatch(), start("input()")
    watch.follow(0, child.pid)

    watch.close()
    child.stdin.close()

    assert len(os.listdir("/proc/self/fd")) == before
