"""`trainermon run -- COMMAND`: signals, exit status, the last flush, the last words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.nodes import RANK_SCRIPT, expected, is_agent, wait_for
from trainermon.agent.lifecycle.summary import merge_ranks, summarise
from trainermon.core.values import Alert, AlertState, Kind, Severity

RUN = "import argparse, sys; from trainermon.agent.lifecycle import launch; p = argparse.ArgumentParser(); \
launch.add_arguments(p); sys.exit(launch.main(p.parse_args()))"
LAUNCH = (sys.executable, "-c", RUN)


def rank_command(run):
    return [sys.executable, str(RANK_SCRIPT), str(run.spool), run.run_id, "0", "1", "1", run.settings]


def job(run, *, steps=5, status=0, then="end"):
    """Return a command like torchrun's: it starts a rank, which starts the agent, and ends with `status`."""
    lines = f"steps 0 {steps}\n{then}\n"
    script = f"""
        import subprocess, sys
        rank = subprocess.Popen({rank_command(run)}, stdin=subprocess.PIPE, text=True)
        rank.stdin.write({lines!r})
        rank.stdin.close()
        rank.wait()
        sys.exit({status})
    """
    return [sys.executable, "-c", textwrap.dedent(script)]


def launch(*arguments, **options):
    return subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, timeout=900, check=False, **options)


def test_everything_is_stored_when_the_command_returns(make_run):
    run = make_run(linger_s=60, flush_s=1000)

    done = launch("--", *job(run))

    assert done.returncode == 0, done.stderr
    assert not run.spool.exists()
    assert run.stored() == expected(0, range(5))


@pytest.mark.parametrize("status", [0, 3, 77])
def test_the_exit_status_is_kept(status):
    assert launch("--", sys.executable, "-c", f"raise SystemExit({status})").returncode == status


def test_the_exit_status_is_kept_when_an_agent_was_waited_for(make_run):
    run = make_run(linger_s=60)

    assert launch("--", *job(run, status=9)).returncode == 9

    assert run.stored() == expected(0, range(5))


def test_a_command_that_died_by_a_signal_gives_128_and_its_number():
    done = launch("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")

    assert done.returncode == 128 + 9


def test_a_command_that_cannot_be_started_gives_what_a_shell_would():
    done = launch("--", "/nonexistent/command")
    assert done.returncode == 127
    assert "cannot start '/nonexistent/command': No such file or directory" in done.stderr
    assert launch("--", "/etc/passwd").returncode == 126


def test_no_command_is_an_error():
    done = subprocess.run(
        [sys.executable, "-m", "trainermon", "run"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "trainermon run: found no command, expected `trainermon run -- COMMAND …`\n"


def test_arguments_reach_the_command_as_they_are():
    done = launch("--quiet", "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--serve", "a b", "--")

    assert done.stdout == "['--serve', 'a b', '--']\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command(number):
    script = f"""
        import signal, sys, time
        signal.signal({int(number)}, lambda n, f: sys.exit(40 + n))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)  # a signal just before `signal.pause()` would be waited out
    """
    process = subprocess.Popen(
        [*LAUNCH, "--", sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=900)

    assert process.returncode == 40 + number


def test_the_summary_says_where_everything_is_and_what_went_wrong(make_run):
    run = make_run(linger_s=60)

    done = launch("--", *job(run, then="steps 5 2 nan\nend"))

    assert str(run.output) in done.stdout
    assert "gradient-nonfinite: NaN or Inf in 1 of 4 gradients at step 5 on rank 0" in done.stdout
    assert "h.2.weight" in done.stdout


def test_equal_alerts_of_several_ranks_are_one_line():
    def nan(rank, *, step=5, count=1):
        message = f"gradient-nonfinite: NaN or Inf in {count} of 4 gradients at step {step} on rank {rank}, worst h.2"
        finding = {"kind": Kind.GRAD_REDUCED, "value": 3.0, "baseline": 0.0, "num_series": 1, "findings": ()}
        where = {"rank": rank, "attempt": 1, "step": step, "first_step": step, "time_s": 0.0}
        what = {"id": f"{rank}-{step}", "severity": Severity.FATAL, "state": AlertState.FIRING}
        values: dict[str, Any] = finding | where | what
        return Alert(rule="gradient-nonfinite", message=message, **values)

    assert merge_ranks([nan(0), nan(1), nan(10), nan(2, count=2), nan(0, step=6)]) == [
        "gradient-nonfinite on ranks 0, 1, 10: NaN or Inf in 1 of 4 gradients at step 5, worst h.2",
        nan(2, count=2).message,
        nan(0, step=6).message,
    ]


def test_the_summary_ends_with_the_diagnosis_of_a_dump(make_run):
    run = make_run()
    (run.output / "dumps/a1/attempt1/step7/rank0").mkdir(parents=True)

    said = summarise(run.output, diagnose=("echo", "first bad module h.3"))
    failed = summarise(run.output, diagnose=("false",))
    assert f"page       trainermon serve {run.output}\n" in said

    assert said.endswith(f"\nfirst bad module h.3 {run.output}\n")
    assert "dumps/a1/attempt1/step7" in said
    assert "try: trainermon diagnose" in failed


def test_serving_goes_on_until_the_user_leaves(make_run):
    run = make_run(linger_s=0)
    process = subprocess.Popen(
        [*LAUNCH, "--serve", "--", *job(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = [""]
        while not lines[-1].startswith("page http://"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        assert f"run        {run.output}\n" in lines  # what happened is said before, not after the user has left
        time.sleep(0.5)  # longer than the linger of 0 s: the page must still be there
        assert run.get_json("api/run")["state"] == "finished"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=900)[0] == f"stopped; the run is in {run.output}\n"
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert not run.spool.exists()


def test_an_agent_is_let_go_by_the_death_of_its_launcher(make_run):
    run = make_run(linger_s=0.5)
    process = subprocess.Popen([*LAUNCH, "--serve", "--", *job(run)], stdout=subprocess.DEVNULL)
    pid = run.running()["pid"]
    process.kill()
    process.wait()

    wait_for(lambda: not is_agent(pid), "the end of the agent")

    assert run.stored() == expected(0, range(5))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root for a pid namespace")
def test_as_pid_1_of_a_container_it_lets_the_agent_flush_and_reaps_orphans(make_run):
    """When the first process of a pid namespace ends, the kernel kills the rest: here, the agent in its last flush."""
    run = make_run(linger_s=60, flush_s=1000)
    orphan = "(sleep 0.2 &) ; "
    command = ["sh", "-c", orphan + 'exec "$@"', "sh", *job(run, status=4)]

    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *LAUNCH, "--", *command],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )

    assert done.returncode == 4, done.stderr
    assert run.stored() == expected(0, range(5))


def test_the_launcher_does_not_wait_for_ever(make_run):
    """A rank that outlives its launcher keeps the agent; the launcher says so and leaves."""
    run = make_run(linger_s=60)
    script = f"""
        import os, subprocess
        rank = subprocess.Popen(
            {rank_command(run)},
            stdin=os.open({str(fifo(run))!r}, os.O_RDWR), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        rank.stdout.readline()
        os._exit(0)
    """
    done = launch("--flush-timeout", "1", "--", sys.executable, "-c", textwrap.dedent(script))
    try:
        assert done.returncode == 0
        assert "has not stored everything yet" in done.stderr
    finally:
        beat = json.loads(run.get("api/run"))["ranks"][0]
        assert beat["alive"]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().split(b"\0") if path.exists() else []
            if str(RANK_SCRIPT).encode() in words and str(run.spool).encode() in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
    run.gone()


def fifo(run):
    path = run.output / "stdin"
    os.mkfifo(path)
    return path
