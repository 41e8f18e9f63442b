"""Runs the commands of a page of the docs as they stand there, and holds what they print against the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "@@@ command"
FLOAT = re.compile(r"-?\d+\.\d+(e[+-]\d+)?|-?\d+e[+-]\d+")


def commands_of(page):
    """Return every command of a page in `docs` with the lines that it should print."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    pieces = [
        piece
        for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]
    return [(command, expected) for command, *expected in map(str.splitlines, pieces)]


def check_page(page, folder, **variables):
    """Run the commands one after the other in `folder`; what they print stands there, but for digits behind points."""
    commands = commands_of(page)
    outputs = _run([command for command, _ in commands], folder, variables)
    assert len(outputs) == len(commands)
    for (command, expected), output in zip(commands, outputs, strict=True):
        text = "".join(f"{_normalised(line)}\n" for line in output.splitlines())
        assert _pattern(expected).fullmatch(text), f"$ {command}\n{output}\nis not what the page says:\n{expected}"


def _run(commands, folder, variables):
    (folder / "examples").symlink_to(ROOT / "examples")
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


def _normalised(text):
    return FLOAT.sub("<float>", re.sub(r"[ \t]+", " ", text.strip()))


def _pattern(lines):
    """Return what matches an output: a line of `…` stands for any lines, `…` within a line for anything in it."""
    parts = ["(?:.*\n)*?" if line == "…" else f"{_wildcards(_normalised(line))}\n" for line in lines]
    return re.compile("".join(parts))


def _wildcards(line):
    return ".*".join(re.escape(piece) for piece in line.split("…"))
