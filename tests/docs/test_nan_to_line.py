"""The page's commands are run as they stand there, and print what stands there, but for digits behind the point."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "nan_to_line.md"
MARK = "@@@ command"
FLOAT = re.compile(r"-?\d+\.\d+(e[+-]\d+)?|-?\d+e[+-]\d+")


def steps():
    """Yield every command of the page with the lines that it should print."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *expected = piece.splitlines()
            yield command, expected


def normalised(text):
    return FLOAT.sub("<float>", re.sub(r"[ \t]+", " ", text.strip()))


def pattern(lines):
    """Return what matches an output: a line of `…` stands for any lines, `…` within a line for anything in it."""
    parts = ["(?:.*\n)*?" if line == "…" else f"{wildcards(normalised(line))}\n" for line in lines]
    return re.compile("".join(parts))


def wildcards(line):
    return ".*".join(re.escape(piece) for piece in line.split("…"))


def run(folder, **variables):
    (folder / "examples").symlink_to(ROOT / "examples")
    commands = [command for command, _ in steps()]
    script = "".join(f"{command}\necho '{MARK}'\n" for command in commands)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "TRAINERMON_SPOOL": str(folder / "spool"), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if name != "TRAINERMON_OUTPUT"} | variables
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split(f"{MARK}\n")[:-1]


def check(outputs):
    assert len(outputs) == len(list(steps())) > 9
    for (command, expected), output in zip(steps(), outputs, strict=True):
        text = "".join(f"{normalised(line)}\n" for line in output.splitlines())
        assert pattern(expected).fullmatch(text), f"$ {command}\n{output}\nis not what the page says:\n{expected}"


def test_the_commands_lead_to_the_line(tmp_path):
    check(run(tmp_path, LATE_NAN_FIRST="7990"))

    named = re.search(r"Line (\d+) must say", PAGE.read_text(encoding="utf-8"))
    assert "torch.softmax" in (ROOT / "examples" / "late_nan.py").read_text().splitlines()[int(named[1]) - 1]


@pytest.mark.slow
def test_the_same_from_the_first_step_on(tmp_path):
    check(run(tmp_path))
