"""What goes wrong on a node, and what an agent makes of it: it goes on, says so, and nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import textwrap

import pytest

from tests.agent.nodes import expected, wait_for

needs_mounts = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")

# Loaded by every Python that starts with its folder on PYTHONPATH: the wall clock is what the file says it is off.
CLOCK = """
    import time
    _time = time.time
    def time_off():
        with open({path!r}) as file:
            return _time() + float(file.read() or 0)
    time.time = time_off
"""


@pytest.fixture
def small_output(make_run):
    """A run whose directory is a file system of 4 MiB of its own."""
    run = make_run(linger_s=60)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", run.output], check=False)
    if mounted.returncode != 0:
        pytest.skip("cannot mount here")
    yield run
    run.close()
    subprocess.run(["umount", "--lazy", "--recursive", run.output], check=True)


def steps_are_watched(run, rank, first):
    """Five steps, the last one bad: the page, /metrics and the rules see them at once."""
    rank.steps(first, 4)
    rank.steps(first + 4, 1, nan=True)
    wait_for(lambda: run.get_json("api/run")["step"] == first + 4, "the last step on the page")
    assert f'trainermon_step{{run="run",rank="0"}} {first + 4}.0'.encode() in run.get("metrics")
    wait_for(lambda: run.get_json("api/run")["alerts_firing"], "an alert")


def end_and_check(run, rank, steps):
    rank.end()
    wait_for(lambda: run.status()["state"] == "finished", "everything stored")
    assert run.stored() == expected(0, steps)
    assert run.status()["problem"] == ""
    fired = [alert["id"] for alert in run.alerts() if alert["state"] == "firing"]
    assert fired
    assert len(fired) == len(set(fired))


@needs_mounts
def test_a_full_disk_costs_nothing_once_there_is_space_again(small_output, monkeypatch):
    run = small_output
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    wait_for(lambda: len(run.stored()) == 5, "the first five steps stored")
    filler = run.output / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # until there is no space left
        file.writelines(itertools.repeat(b"x" * 4096))

    steps_are_watched(run, rank, 5)
    problem = wait_for(lambda: run.status()["problem"], "the problem in the status")
    assert "could not be written" in problem
    assert run.get_json("api/run")["problem"] == problem
    assert len(run.stored()) == 5
    filler.unlink()

    end_and_check(run, rank, range(10))


@needs_mounts
def test_a_run_directory_that_becomes_read_only_costs_nothing_once_it_is_writable_again(small_output):
    run = small_output
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    wait_for(lambda: len(run.stored()) == 5, "the first five steps stored")
    wait_for(lambda: not run.status().get("problem"), "no problem yet")
    make_read_only(run)

    steps_are_watched(run, rank, 5)
    assert wait_for(lambda: run.status()["problem"], "the problem in the status")
    make_writable(run)

    end_and_check(run, rank, range(10))


def make_read_only(run):
    # A file system with a file open for writing, the agent's log, cannot be remounted; a view on top of it can.
    subprocess.run(["mount", "--bind", run.output, run.output], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", run.output], check=True)


def make_writable(run):
    subprocess.run(["umount", "--lazy", run.output], check=True)


@needs_mounts
def test_a_run_directory_that_cannot_be_written_at_the_start_is_waited_for(small_output):
    """A rank would refuse to start; but an agent may be restarted in the middle of a run."""
    run = small_output
    rank = run.rank()
    rank.steps(0, 3)
    make_read_only(run)
    run.launch_agent()
    wait_for(lambda: run.status().get("problem"), "the problem in the status")

    make_writable(run)

    run.running()
    rank.end()
    wait_for(lambda: run.status()["state"] == "finished", "everything stored")
    assert run.stored() == expected(0, range(3))


@needs_mounts
def test_a_read_only_root_without_home_or_temporary_folder_is_enough(make_run, tmp_path):
    run = make_run()
    # Only the run's own folders are writable; home, working directory, /tmp and /var/tmp are not.
    script = f"""
        set -e
        mount --bind {tmp_path} {tmp_path}
        mount --bind / / && mount -o remount,bind,ro /
        for folder in /tmp /var/tmp /dev/shm; do
            mountpoint -q $folder && mount -o remount,bind,ro $folder || true
        done
        ! touch /tmp/x /var/tmp/x $PWD/x 2>/dev/null
        exec "$@"
    """
    prefix = ("unshare", "--mount", "sh", "-c", textwrap.dedent(script), "sh")
    environment = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"}

    rank = run.rank(start_agent=True, prefix=prefix, environment=environment)
    steps_are_watched(run, rank, 0)
    assert run.post("api/flush")[0] == 200
    rank.end()
    run.gone()

    assert run.stored() == expected(0, range(5))
    assert "ERROR" not in run.log()


def test_a_clock_that_steps_an_hour_either_way_changes_nothing(make_run, tmp_path):
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(CLOCK.format(path=str(offset))))
    run = make_run(linger_s=1)
    rank = run.rank(start_agent=True, environment={"PYTHONPATH": str(tmp_path / "site")})
    rank.steps(0, 5)
    wait_for(lambda: run.get_json("api/run")["step"] == 4, "step 4")
    for first, seconds in ((5, 3600), (10, -3600)):
        offset.write_text(str(seconds))
        rank.steps(first, 5)
        found = wait_for(lambda step=first + 4: (r := run.get_json("api/run"))["step"] == step and r, "the last step")
        assert found["state"] == "running"
        assert 0 <= found["ranks"][0]["lag_s"] < 10
        assert found["lag_s"] < 10
        assert "stood still" not in run.log()
    started_s = run.get_json("api/run")["started_s"]
    rank.end()
    run.gone()

    assert started_s > 0
    assert run.stored() == expected(0, range(15))
    assert not [alert for alert in run.alerts() if alert["state"] == "firing"]


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="root obeys no permissions")
def test_an_unwritable_home_and_working_directory_are_no_hindrance(run, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    obedient = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.getuid() == 0 else ()
    refused = ("sh", "-c", '! touch "$HOME/x" "$PWD/y" 2>/dev/null && exec "$@"', "sh")

    rank = run.rank(start_agent=True, prefix=(*obedient, *refused), environment={"HOME": str(home)}, folder=home)
    steps_are_watched(run, rank, 0)
    rank.end()
    run.gone()

    assert run.stored() == expected(0, range(5))
    assert "ERROR" not in run.log()
