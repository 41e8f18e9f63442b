"""Runs the commands of a page of the docs as they stand there, and holds what they print against the page."""

import itertools
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path

from tests.fork_server import ROOT, start_script

PROGRAMS = Path(sys.executable).parent
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


def run_in_shell(commands, folder, environment):
    """Return what each of the commands printed, typed one after the other into a shell."""
    script = "".join(f"{command}\necho '{MARK}'\n" for command in commands)
    return _printed(script, folder, environment).split(f"{MARK}\n")[:-1]


def run_forked(commands, folder, environment):
    """Return the same in less time: every program but `trainermon run` is forked from a process that has torch."""
    outputs = []
    for command in commands:
        if assigned := re.fullmatch(r"(\w+)=(\S+)", command):
            environment = environment | {assigned[1]: assigned[2]}
        is_forked = re.match(r"python |trainermon (?!run)", command)
        outputs.append((_printed_forked if is_forked else _printed)(command, folder, environment))
    return outputs


def _unwrapped(lines):
    """Return the lines, what stands in the second column of a report joined to the one before: paths decide wraps."""
    return re.sub(r"\n {11}(?=\S)", " ", "\n".join(lines)).splitlines()


def check_page(page, folder, run=run_in_shell, **variables):
    """Run the commands one after the other in `folder`; what they print stands there, but for digits behind points."""
    commands = commands_of(page)
    (folder / "examples").symlink_to(ROOT / "examples")
    outputs = run([command for command, _ in commands], folder, _environment(folder) | variables)
    assert len(outputs) == len(commands)
    for (command, expected), output in zip(commands, outputs, strict=True):
        text = "".join(f"{_normalised(line)}\n" for line in _unwrapped(output.splitlines()))
        assert _pattern(_unwrapped(expected)).fullmatch(text), (
            f"$ {command}\n{output}\nis not what the page says:\n{expected}"
        )


def _environment(folder):
    tools = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "TRAINERMON_SPOOL": str(folder / "spool"), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in environment.items() if name != "TRAINERMON_OUTPUT"}


def _printed(script, folder, environment):
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
    return done.stdout


def _printed_forked(command, folder, environment):
    command, _, behind = command.partition(" | ")
    program, *arguments = shlex.split(string.Template(command).substitute(environment))
    script = folder / arguments.pop(0) if program == "python" else PROGRAMS / program
    output = folder / "printed.txt"
    status = start_script(script, *arguments, output=output, environment=environment, folder=folder).wait(1500)
    assert status == 0, output.read_text()
    return _printed(f"{behind or 'cat'} < {output.name}", folder, environment)


def _normalised(text):
    return FLOAT.sub("<float>", re.sub(r"[ \t]+", " ", text.strip()))


def _pattern(lines):
    """Return what matches an output: a line of `…` stands for any lines, `…` within a line for anything in it.

    What was wrapped may be the rest of a line before `…`.
    """
    parts = [
        "(?:.*\n)*?" if line == "…" else f"{_wildcards(_normalised(line))}{'(?: .*)?' if after == '…' else ''}\n"
        for line, after in itertools.zip_longest(lines, lines[1:])
    ]
    return re.compile("".join(parts))


def _wildcards(line):
    return ".*".join(re.escape(piece) for piece in line.split("…"))
