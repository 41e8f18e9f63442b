"""A process with few files: it asks for what it may have, and does not fill its log when that is used up."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import sys

from trainermon.agent.lifecycle.open_files import LoopFaults, raise_file_limit


def test_the_soft_limit_becomes_the_hard_one():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300));"
        "from trainermon.agent.lifecycle.open_files import raise_file_limit;"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_file_limit())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout.split() == ["300", "300", "300", "300"]


def test_used_up_files_are_told_once_and_other_faults_as_ever(caplog):
    loop = asyncio.new_event_loop()
    faults = LoopFaults()
    for _ in range(5):
        faults(loop, {"message": "accept", "exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE))})
    faults(loop, {"message": "something else", "exception": ValueError("x")})
    loop.close()

    assert [record.name for record in caplog.records] == ["trainermon.agent.lifecycle.open_files", "asyncio"]
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info is None


def test_a_limit_that_is_high_enough_stays():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
