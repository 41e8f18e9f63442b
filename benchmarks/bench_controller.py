"""What a controller costs that watches 128 agents: CPU time per second, memory, and how long an alert takes to arrive.

    python -m benchmarks.bench_controller                      # about 40 seconds
    python -m benchmarks.bench_controller --agents 16 --seconds 5
    python -m benchmarks.bench_controller --agents 1280 --poll-s 1 10 100 --repeats 1

The controller runs as it does in production, as a process of its own; the agents are simulated, in another process. One
page asks it every two seconds, and a Prometheus every fifteen. CPU time is what other load on the machine hardly moves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKEN = "bench"
START_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--poll-s", type=float, nargs="+", default=[1.0], help="seconds between two questions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, simulated_agents(Path(name), args.agents, args.ranks) as found:
        for poll_s in args.poll_s:
            _measure(Path(name) / f"{poll_s:g}", *found, poll_s, args)
    return 0


def _measure(folder: Path, notes: Path, addresses: list[str], poll_s: float, args: argparse.Namespace) -> None:
    folder.mkdir()
    with started_controller(folder, addresses, poll_s=poll_s) as (pid, url):
        seconds = max(args.seconds, poll_s)
        loads = [_load(pid, url, seconds) for _ in range(args.repeats)]
        before_s = cpu_s(pid)
        delays_ms = [
            1e3 * _escalate(url, notes, f"{int(poll_s * 1e3):08x}{number:08x}", args.agents) for number in range(3)
        ]
        order_s = (cpu_s(pid) - before_s) / 3
        rss_mb = _rss_bytes(pid) / 1e6
    middle, low, high = statistics.median(loads), min(loads), max(loads)
    print(f"{args.agents} agents of {args.ranks} ranks, asked every {poll_s:g} s, {args.repeats} x {seconds:g} s")
    print(f"CPU of the controller   {middle:.2%} of a core [{low:.2%}-{high:.2%}], one page and a Prometheus included")
    print(f"resident memory         {rss_mb:.0f} MB")
    print(f"CPU of an escalation    {1e3 * order_s:.0f} ms, and what else there is to do meanwhile")
    print(f"webhook to last agent   {statistics.median(delays_ms):.0f} ms [{min(delays_ms):.0f}-{max(delays_ms):.0f}]")


@contextlib.contextmanager
def simulated_agents(
    folder: Path, num_agents: int, num_ranks: int, *, troubled: bool = False
) -> Iterator[tuple[Path, list[str]]]:
    """Start agents in another process; give the file with the orders that they take, and their addresses."""
    path = folder / "agents"
    with path.open("wb") as output:
        words = [str(num_agents), str(num_ranks), "2.0", *(["troubled"] if troubled else [])]
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.simulated_agents", *words], stdout=output)
    try:
        _wait(lambda: path.read_text().endswith("\n"), "the simulated agents")
        yield path, json.loads(path.read_text().splitlines()[0])
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def started_controller(folder: Path, addresses: list[str], *, poll_s: float = 1.0) -> Iterator[tuple[int, str]]:
    """Start a controller that knows its agents; give its process and address."""
    config, log = folder / "controller.json", folder / "controller.log"
    plain: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "port": 0,
        "discovery": {"agents": addresses},
        "agents": {"poll_s": poll_s},
        "limits": {"max_per_hour": 100},
    }
    config.write_text(json.dumps(plain))
    with log.open("wb") as output:
        command = [sys.executable, "-m", "trainermon", "controller", "--config", str(config)]
        environment = {**os.environ, "TRAINERMON_TOKEN": TOKEN}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        _wait(lambda: "page http" in log.read_text(), "the controller's page")
        found = re.search(r"page (http\S+)", log.read_text())
        assert found is not None
        _wait(lambda: _is_ready(found[1]), "the controller knows its agents")
        yield process.pid, found[1]
    finally:
        process.terminate()
        process.wait()


def _load(pid: int, url: str, seconds: float) -> float:
    """Return CPU seconds per second of the controller, while a page and a Prometheus ask it."""
    before_s, began_s = cpu_s(pid), time.monotonic()
    number = 0
    while time.monotonic() - began_s < seconds:
        time.sleep(max(0.0, began_s + 2.0 * number - time.monotonic()))
        _get(url + "api/v1/job")
        if number % 8 == 0:
            _get(url + "metrics")
        number += 1
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def _escalate(url: str, notes: Path, name: str, num_agents: int) -> float:
    """Return the seconds from a post of Alertmanager's form until every agent has the order."""
    labels = {"alertname": "Bench", "run": "run", "escalate": "statistics"}
    alert = {
        "status": "firing",
        "labels": labels,
        "annotations": {},
        "startsAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprint": name,
    }
    body = {"version": "4", "alerts": [alert], "truncatedAlerts": 0}
    before, began_s = len(notes.read_text().splitlines()), time.monotonic()
    request = urllib.request.Request(
        f"{url}api/v1/alerts", data=json.dumps(body).encode(), headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=START_S):
        pass
    _wait(lambda: len(notes.read_text().splitlines()) == before + num_agents, "all agents have the order")
    return time.monotonic() - began_s


def _is_ready(url: str) -> bool:
    try:
        _get(f"{url}readyz")
    except OSError:
        return False
    return True


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=START_S) as answer:
        content: bytes = answer.read()
    return content


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not seen within {START_S:g} s: {what}")
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
