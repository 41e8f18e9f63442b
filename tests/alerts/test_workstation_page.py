"""docs/deploy/workstation.md: its commands, run in their order as a reader would, against the real programs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal_rows import spool_named
from tests.ports import free_port
from tests.server_programs import find_program, wait_until
from trainermon.agent.lifecycle.lock import is_followed, read_status

pytestmark = [pytest.mark.server, pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "workstation.md"
PORTS = ("9090", "9093", "9461")
LIMIT_S = 240


def script() -> str:
    """Return the blocks of the page as one script, on ports that nobody uses."""
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    for port in PORTS:
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    return f"set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{text}wait\n"


def end_agent(spool: Path) -> None:
    """End the agent, which would wait for a minute whether the training comes back."""
    status = read_status(spool)
    if status is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(status["pid"], signal.SIGTERM)
        wait_until(lambda: not is_followed(spool), what="the agent has ended")


def test_every_command_of_the_page_works_as_written(tmp_path: Path) -> None:
    programs = {str(Path(find_program(name)).parent) for name in ("prometheus", "prometheus-alertmanager")}
    path = os.pathsep.join([str(Path(sys.executable).parent), *programs, os.environ["PATH"]])
    output = tmp_path / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            ["bash", "-c", script()],
            cwd=ROOT,
            env=os.environ | {"HOME": str(tmp_path), "PATH": path, "TRAINERMON_SPOOL": str(tmp_path / "spool")},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(LIMIT_S)
        finally:
            process.terminate()  # bash then ends what it has started
            process.wait()
            end_agent(spool_named(tmp_path / "spool" / "first-run"))

    said = output.read_text()
    assert process.returncode == 0, said
    assert re.search(r'run:trainermon_step:max\{run="first-run"\} => \d+', said)
    assert "TrainermonGradientNonfinite" in said
    assert re.search(r"dumps/LookAtIt-\w+/attempt1/step\d+/rank1/dump\.json", said)


def test_the_page_names_what_is_not_run() -> None:
    others = set(re.findall(r"^```(\w*)$", PAGE.read_text(), re.MULTILINE)) - {"", "sh"}

    assert others == {"console"}
