"""What a driver that hangs, and processes that die, cost the agent: nothing but the readings."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import psutil
import pytest

from tests.agent.accelerators.stand_in import environment, gpu
from tests.agent.nodes import wait_for
from trainermon.agent.accelerators import watch as watch_module
from trainermon.agent.accelerators.watch import AcceleratorWatch

pytestmark = pytest.mark.extras


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The file that the driver's stand-in reads."""
    file = tmp_path / "told"
    for name, value in environment(file).items():
        monkeypatch.setenv(name, value)
    return file


@pytest.fixture
def make_watch():
    watches = []

    def make(every_s=0.02):
        watches.append(AcceleratorWatch("nvml", every_s))
        return watches[-1]

    yield make
    for watch in watches:
        watch.close()
    wait_for(lambda: not children(), "the end of all reading processes")


def children():
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if watch_module.MODULE in " ".join(child.cmdline())]


def some(watch):
    return wait_for(lambda: watch.poll(time.monotonic()), "a sample")


def test_samples_come_in_order_and_follow_the_driver(told, make_watch):
    told.write_text(gpu("GPU-a", utilization=10))
    watch = make_watch()
    first = some(watch)[0]
    told.write_text(gpu("GPU-a", utilization=70))
    last = wait_for(
        lambda: [s for s in watch.poll(time.monotonic()) if s.readings[0].utilization == 0.7], "the new reading"
    )[0]
    assert first.readings[0].utilization == 0.1
    assert first.time_s < last.time_s <= time.time()


def test_a_driver_that_hangs_is_left_alone_and_tried_again_later(told, make_watch, caplog):
    told.write_text(gpu("GPU-a"))
    watch = make_watch()
    some(watch)
    told.write_text("hang\n")
    now_s = time.monotonic()
    (hanging,) = children()
    began_s = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            watch.poll(now_s)
        watch.poll(now_s + watch_module.DEADLINE_S + 1)
    waited_s = time.perf_counter() - began_s
    assert waited_s < watch_module.DEADLINE_S  # a hundred looks; none of them waited for the driver
    assert "has said nothing for 30 s: the driver does not answer; it is tried again after 300 s" in caplog.text
    wait_for(lambda: not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE, "its end")
    told.write_text(gpu("GPU-a"))
    assert not watch.poll(now_s + watch_module.DEADLINE_S + 10)
    assert not children()  # it is not tried before its time
    later_s = now_s + watch_module.DEADLINE_S + watch_module.RETRY_S + 2
    assert wait_for(lambda: watch.poll(later_s), "a sample of the next process")


def test_a_process_that_dies_again_and_again_is_given_up(told, make_watch, monkeypatch, caplog):
    monkeypatch.setattr(watch_module, "RETRY_S", 0.0)
    told.write_text(gpu("GPU-a"))
    watch = make_watch()
    with caplog.at_level(logging.WARNING):
        while not watch.is_given_up:
            watch.poll(time.monotonic())
            for child in children():
                child.send_signal(signal.SIGKILL)
    assert watch.is_given_up
    assert "ended with status -9; it is not tried again" in caplog.text


def test_without_a_driver_it_says_so_once(tmp_path, monkeypatch, make_watch, caplog):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    watch = make_watch()
    with caplog.at_level(logging.INFO):
        wait_for(lambda: watch.poll(time.monotonic()) or watch.is_given_up, "giving up")
        watch.poll(time.monotonic())
    assert caplog.text.count("accelerators are not read: NVIDIA's GPUs cannot be read") == 1


def test_what_a_library_prints_is_no_sample(told, make_watch, monkeypatch, tmp_path):
    program = tmp_path / "talkative"
    program.write_text(f"#!/bin/sh\necho 'hello {{}}'\nexec {sys.executable} \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    told.write_text(gpu("GPU-a"))
    assert [reading.uuid for reading in some(make_watch())[0].readings] == ["GPU-a"]
    assert os.getpid() != children()[0].pid
