"""Calls judged in worker processes: what ends or hangs one costs a row, and the order is that of the calls."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from trainermon.analysis.check.checking import CheckedCall
from trainermon.analysis.check.runner import Workers, run_calls
from trainermon.core.errors import DumpError


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Judges calls as told: by number a signal that ends the process, or `hang`."""

    fates: dict

    def __call__(self):
        if self.fates.get("start"):
            raise RuntimeError("no such library")
        return self

    def check(self, number):
        fate = self.fates.get(number)
        if fate == "hang":
            signal.pause()
        if fate is not None:
            os.kill(os.getpid(), fate)
        return CheckedCall(key=f"Torch.add.{number}.forward", skipped=str(os.getpid()))


def run(fates, numbers, workers):
    return dict(run_calls([Scripted(fates)], numbers, workers))


def test_every_call_is_judged_by_as_many_processes_as_asked_for():
    found = run({}, range(20), Workers(2))

    assert [found[number].key for number in range(20)] == [f"Torch.add.{number}.forward" for number in range(20)]
    assert str(os.getpid()) not in {call.skipped for call in found.values()}


def test_a_call_that_ends_its_process_costs_no_other():
    found = run({1: signal.SIGSEGV, 2: signal.SIGKILL}, range(5), Workers(1))

    assert found.pop(1) == "crash: SIGSEGV ended its process"
    assert found.pop(2).startswith("crash: SIGKILL ended its process, as the kernel does where memory runs out")
    assert sorted(found) == [0, 3, 4]
    assert all(isinstance(call, CheckedCall) for call in found.values())


def test_a_call_that_hangs_is_ended():
    begun = time.monotonic()

    found = run({0: "hang"}, range(3), Workers(2, timeout_s=3.0))

    assert found.pop(0) == "timeout: it took longer than 3 s"
    assert [found[number].key for number in (1, 2)] == ["Torch.add.1.forward", "Torch.add.2.forward"]
    assert time.monotonic() - begun > 3


def test_no_process_is_left_when_nobody_wants_more():
    with contextlib.closing(run_calls([Scripted({})], range(100), Workers(1))) as calls:
        _, call = next(calls)

    with pytest.raises(ProcessLookupError):
        os.kill(int(call.skipped), 0)


def test_a_worker_that_cannot_start_is_no_endless_loop(capfd):
    with pytest.raises(DumpError, match="a worker cannot start: its process ended with status 1"):
        run({"start": True}, range(3), Workers(1))
    assert "no such library" in capfd.readouterr().err


class Hanging:
    """Says that it is asked, and never answers."""

    def check(self, number):
        print("hangs", flush=True)
        signal.pause()


def test_a_worker_does_not_outlive_the_one_that_started_it():
    code = (
        "from tests.analysis.check.test_runner import Hanging, Workers, run_calls\n"
        "if __name__ == '__main__':\n    list(run_calls([Hanging], [0], Workers()))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "hangs\n"
    parent.kill()

    rest, _ = parent.communicate(timeout=60)  # the worker has this pipe, too: it ends when both have ended

    assert rest == ""
