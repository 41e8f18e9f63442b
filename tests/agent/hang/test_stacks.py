"""Stacks as py-spy and faulthandler write them; both tools are asked for real ones, too."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from trainermon.agent.hang.evidence import StackFrame
from trainermon.agent.hang.stacks import (
    find_py_spy,
    parse_faulthandler,
    parse_py_spy,
    stacks_by_py_spy,
    stacks_by_signal,
)

FAULTHANDLER = """\
Thread 0x00007f0000000002 (most recent call first):
  File "/lib/threading.py", line 10 in wait

Current thread 0x00007f0000000001 [trainer] (most recent call first):
  File "/job/my file.py", line 31 in <listcomp>
  File "/job/train.py", line 5 in main
"""
WAITER = """
import faulthandler, signal, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True, name="helper").start()
with open(sys.argv[1], "ab", buffering=0) as file:
    if len(sys.argv) > 2:
        faulthandler.register(signal.SIGRTMIN + 5, file, all_threads=True, chain=False)
    def stand_still():
        print(threading.main_thread().ident, flush=True)
        threading.Event().wait()
    stand_still()
"""


@contextlib.contextmanager
def waiter(*arguments):
    """Run a process that stands still in `stand_still`; hand out the process and its main thread's identifier."""
    child = subprocess.Popen([sys.executable, "-c", WAITER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    try:
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def ask(child, path, main_thread, *, limit_s=10.0):
    number = int(signal.SIGRTMIN) + 5
    asked = stacks_by_signal(child.pid, number=number, path=path, main_thread=main_thread, limit_s=limit_s)
    return asyncio.run(asked)


def test_stacks_of_faulthandler_begin_with_the_main_thread():
    main, other = parse_faulthandler(FAULTHANDLER, 0x7F0000000001)

    assert (main.thread, main.is_main, other.is_main) == ("trainer", True, False)
    assert main.frames[0] == StackFrame(function="<listcomp>", file="/job/my file.py", line=31)
    assert [frame.function for frame in main.frames] == ["<listcomp>", "main"]
    assert [frame.function for frame in other.frames] == ["wait"]


def test_main_thread_that_is_not_known_is_the_last_one():
    assert parse_faulthandler(FAULTHANDLER, 1)[0].thread == "trainer"


def test_only_what_follows_a_fatal_error_counts():
    stacks = parse_faulthandler(FAULTHANDLER + "Fatal Python error: Segmentation fault\n\n" + FAULTHANDLER, 0)

    assert len(stacks) == 2


def test_anything_else_is_no_stack():
    assert parse_faulthandler("", 0) == ()
    for output in (b"", b"{}x", b"[1]", b'[{"frames": [{}]}]'):
        with pytest.raises(OSError, match="py-spy wrote something else"):
            parse_py_spy(output, 1)


def test_signal_brings_the_stacks_and_the_process_goes_on(tmp_path):
    path = tmp_path / "stacks"
    path.write_text("what was written before\n" + FAULTHANDLER)
    with waiter(path, "registered") as (child, main_thread):
        first, again = ask(child, path, main_thread), ask(child, path, main_thread)
        assert child.poll() is None

    for stacks in (first, again):
        assert "stand_still" in [frame.function for frame in stacks[0].frames]
        assert stacks[0].is_main
        assert len(stacks) == 2


def test_signal_is_never_sent_to_a_process_that_it_would_end(tmp_path):
    path = tmp_path / "stacks"
    path.touch()
    with waiter(path) as (child, main_thread):
        with pytest.raises(OSError, match="does not handle signal"):
            ask(child, path, main_thread)
        assert child.poll() is None


def test_stopped_process_does_not_hold_up_the_agent(tmp_path):
    path = tmp_path / "stacks"
    path.touch()
    with waiter(path, "registered") as (child, main_thread):
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(OSError, match=r"nothing was written within 0.2 s"):
            ask(child, path, main_thread, limit_s=0.2)
        child.send_signal(signal.SIGCONT)


def test_py_spy_brings_the_stacks(tmp_path):
    with waiter(tmp_path / "stacks") as (child, _):
        stacks = asyncio.run(stacks_by_py_spy(find_py_spy(), child.pid, limit_s=20))

    assert stacks[0].is_main
    assert [frame.function for frame in stacks[0].frames if "threading" not in frame.file] == [
        "stand_still",
        "<module>",
    ]


def test_py_spy_says_why_it_tells_nothing():
    with subprocess.Popen(["sleep", "100"]) as child:
        try:
            with pytest.raises(OSError, match="it ended with status 1"):
                asyncio.run(stacks_by_py_spy(find_py_spy(), child.pid, limit_s=20))
        finally:
            child.kill()
