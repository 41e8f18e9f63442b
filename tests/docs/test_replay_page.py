"""The commands of docs/replay.md are run as they stand there, and the lines that it shows come in that order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "replay.md"


def words(line):
    return re.sub(r"\s+", " ", line).strip()


@pytest.mark.slow
def test_the_page_replays_the_step(tmp_path):
    (block,) = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": tools, "TRAINERMON_SPOOL": str(tmp_path / "spool"), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRAINERMON_OUTPUT"} | variables

    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    printed = iter(words(line) for line in (done.stderr + done.stdout).splitlines())
    for line in lines:
        if not line.startswith("$ ") and line != "…":
            pattern = re.compile(".*".join(map(re.escape, words(line).split("…"))))
            assert any(pattern.match(text) for text in printed), f"{line!r} is missing in\n{done.stdout}{done.stderr}"
