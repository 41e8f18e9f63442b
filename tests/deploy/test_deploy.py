"""Units, scripts and commands of docs/deploy, as far as this machine can run them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.charts import CHART, helm
from tests.package_programs import find_wheels
from tests.server_programs import find_program
from trainermon.agent.controller import command as controller
from trainermon.agent.lifecycle import service

pytestmark = pytest.mark.server

ROOT = CHART.parents[1]
DEPLOY = ROOT / "docs" / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted([*(DEPLOY / "slurm").glob("*.s[bh]*"), *DEPLOY.glob("object_storage/*.sh")])
PROLOG = DEPLOY / "slurm" / "prolog.sh"
TASK_PROLOG = DEPLOY / "slurm" / "task_prolog.sh"
MAX_EXPOSURE = "25"  # in tenths
OPTIONS = {"TRAINERMON_NODE_OPTIONS": "--host 0.0.0.0 --port 9461"}


def named(path):
    return path.name


def exec_start(unit):
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    return line


@pytest.mark.parametrize("unit", UNITS, ids=named)
def test_a_unit_is_valid(unit, tmp_path):
    # Whether the program is there is the only thing that is looked for outside of the unit.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit.read_text(), flags=re.MULTILINE)
    copy = tmp_path / unit.name
    copy.write_text(text)

    done = subprocess.run(
        [find_program("systemd-analyze"), "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit.name != "trainermon-node.service"], ids=named)
def test_a_unit_of_the_system_is_closed(unit):
    command = [find_program("systemd-analyze"), "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", unit]

    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PAGER": "cat"})

    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("unit", UNITS, ids=named)
def test_the_command_of_a_unit_takes_its_options(unit):
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: OPTIONS[name[1]], exec_start(unit)))
    parser = argparse.ArgumentParser()
    (controller if words[1] == "controller" else service).add_arguments(parser)

    assert Path(words[0]).name == "trainermon"
    assert parser.parse_args(words[2:])


def test_the_environment_file_is_what_the_unit_reads():
    text = (DEPLOY / "systemd" / "node.env").read_text()
    unit = (DEPLOY / "systemd" / "trainermon-node@.service").read_text()
    values = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))

    assert values == OPTIONS
    assert "EnvironmentFile=-/etc/trainermon/node.env" in unit


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_shellcheck_has_no_complaint(script):
    checker = find_wheels("shellcheck") / "bin" / "shellcheck"

    done = subprocess.run(
        [checker, "--enable=all", "--severity=info", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def prolog(tmp_path):
    """Run the prolog with a `systemctl` that does what the test says; return its exit status and what was started."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("timeout", "sh", "sleep"):
        (commands / name).symlink_to(shutil.which(name))

    def run(systemctl, user="alice"):
        started = tmp_path / "started"
        if systemctl is not None:
            path = commands / "systemctl"
            path.write_text(f'#!/bin/sh\necho "$@" >> {started}\n{systemctl}\n')
            path.chmod(0o755)
        done = subprocess.run([PROLOG], env={"PATH": str(commands), "SLURM_JOB_USER": user}, check=False, timeout=900)
        return done.returncode, started.read_text().splitlines() if started.exists() else []

    return run


def test_the_prolog_starts_the_service_of_the_user(prolog):
    assert prolog("exit 0") == (0, ["start trainermon-node@alice.service"])


@pytest.mark.parametrize("systemctl", ["exit 1", None], ids=["fails", "missing"])
def test_a_prolog_never_fails(prolog, systemctl):
    status, _ = prolog(systemctl)

    assert status == 0


def test_a_prolog_holds_no_job_up_for_ever(prolog):
    status, _ = prolog("trap '' TERM; while :; do sleep 1; done")

    assert status == 0


@pytest.mark.parametrize("user", ["", "root", "../x", "a b", "$(id)", "a@b"])
def test_the_prolog_does_nothing_for_names_that_are_no_users(prolog, user):
    assert prolog("exit 0", user) == (0, [])


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLURM_SUBMIT_DIR": "/work"}, "export TRAINERMON_OUTPUT=/work/trainermon_output\n"),
        ({"HOME": "/users/a"}, "export TRAINERMON_OUTPUT=/users/a/trainermon_output\n"),
        ({"SLURM_SUBMIT_DIR": "/work", "TRAINERMON_OUTPUT": "/mine"}, ""),
    ],
)
def test_the_task_prolog_says_where_runs_go(environment, said):
    done = subprocess.run([TASK_PROLOG], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout == said


def helm_commands():
    """Return every call of helm on the page; one that needs a cluster is only rendered."""
    blocks = re.findall(r"^```sh\n(.+?)^```", (DEPLOY / "kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line)[1:] for line in lines if line.startswith("helm ")]
    return [
        ["template", *(word for word in call[1:] if word not in ("--install", "--create-namespace"))]
        if call[0] == "upgrade"
        else call
        for call in words
    ]


@pytest.mark.parametrize("arguments", helm_commands(), ids=lambda words: " ".join(words)[:60])
def test_a_command_of_the_page_works_as_written(arguments, tmp_path):
    here = [
        str(ROOT / word) if word.startswith("helm/") else str(tmp_path) if word == "build" else word
        for word in arguments
    ]

    done = helm(*here)

    assert done.returncode == 0, done.stderr


def test_every_kind_of_command_is_on_the_page():
    assert {call[0] for call in helm_commands()} == {"lint", "template", "package"}


@pytest.mark.parametrize("page", ["kubernetes.md", "slurm.md", "systemd.md"])
def test_files_that_a_page_names_are_there(page):
    text = (DEPLOY / page).read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    named_files = re.findall(r"\b(?:docs/deploy|helm/trainermon|docker)/[\w./@-]+\w", text)

    for target in links:
        assert (DEPLOY / target).exists(), target
    for name in named_files:
        assert (ROOT / name).exists(), name


def test_the_check_of_the_page_tells_whether_a_service_lives(tmp_path):
    command = [sys.executable, "-m", "trainermon", "node", "--check", "--spool", tmp_path]

    assert subprocess.run(command, check=False).returncode == 1
