"""`trainermon node`: the agent of every run on this node, for sites that do not let the ranks start it.

A container beside the training, a systemd unit or a batch system's prolog starts this once. It looks for spools in one
folder and gives each its agent, a process of its own: what befalls one run does not touch another. A rank that
finds this service starts no agent; a run that has one already is left alone.

Only the standard library is imported here, so that watching costs next to nothing. Time is monotonic, but for the
sign of life, which another process reads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainermon.agent.lifecycle.lock import FINISHED, SETTINGS_FILE, is_followed, read_status
from trainermon.agent.lifecycle.overrides import add_overrides, override_words
from trainermon.agent.lifecycle.process import LOG_FORMAT
from trainermon.core.errors import ConfigError
from trainermon.core.launcher import SERVICE_FILE, agent_environment, check_rules
from trainermon.core.spool import list_ranks, rank_alive, spool_root

SUMMARY = "be the agent of every run on this node"
POLL_S = 0.5
STALE_S = 30.0
DRAIN_TIMEOUT_S = 25.0
MAX_PAUSE_S = 60.0
STEADY_S = 120.0
CRASH_LOOP = 3
"""An agent that ended so often, each time within `STEADY_S`, will not stay."""
AGENTS, SERVICE = "agents", "service"
NOT_LIVING, FAILING = 1, 3

_log = logging.getLogger("trainermon.node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `trainermon node`."""
    parser.add_argument("--spool", type=Path, help="folder of the spools (default: as for the ranks)")
    parser.add_argument(
        "--check",
        nargs="?",
        choices=(AGENTS, SERVICE),
        const=AGENTS,
        help="only tell whether the service of that folder lives (status 0, or 1) and its agents stay (else 3); "
        f"`--check={SERVICE}` asks for the service alone",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="after SIGTERM, longest time to wait until runs without a rank are stored (default %(default)g)",
    )
    parser.add_argument(
        "--exit-when-idle",
        type=float,
        metavar="SECONDS",
        help="end after so long without any run (default: only after SIGTERM)",
    )
    add_overrides(parser)


def main(args: argparse.Namespace) -> int:
    """Keep one agent running for every run on this node (`trainermon node`), until SIGTERM or SIGINT, or none is left.

    Returns 0, or with `--check` the result of the check.

    Raises:
        ConfigError: No agent could be started with the options; another service has the folder, or it cannot be used.
    """
    root = (args.spool or spool_root()).absolute()
    if args.check:
        return _check(root, args.check)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    args.rules = _usable_rules(args.rules)
    _require_usable(override_words(args))
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    service = NodeService(root, override_words(args))
    patience_s = math.inf if args.exit_when_idle is None else args.exit_when_idle
    while not stopping.is_set():
        with sign_of_life(root) as path:
            _log.info("follows the runs in %s", root)
            _work(service, path, stopping, patience_s=patience_s)
            service.stop(args.drain_timeout)
        if service.is_idle():  # asked without the lock: a rank that still found this service has its spool by now
            break
    return 0


def _check(root: Path, what: str) -> int:
    if not is_living(root / SERVICE_FILE):
        sys.stdout.write(f"no service follows the runs in {root}\n")
        return NOT_LIVING
    failing = read_failures(root / SERVICE_FILE) if what == AGENTS else ()
    sys.stdout.writelines(f"{failure}\n" for failure in failing)
    return FAILING if failing else 0


def _require_usable(options: Sequence[str]) -> None:
    """Refuse options with which every agent would end at once; ranks that find this service start none themselves."""
    command = [sys.executable, "-m", "trainermon.agent.lifecycle.overrides", *options]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own module)
    if checked.returncode:
        raise ConfigError(checked.stderr.strip().rpartition("\n")[2] or "the options cannot be checked")


def _usable_rules(rules: str | None) -> str | None:
    """Return `rules`, or None if agents could not read them: watching by a run's own rules beats not watching."""
    if rules is None:
        return None
    try:
        check_rules(Path(rules))
    except ConfigError as error:
        _log.error("the runs are watched by their own rules instead of %s: %s", rules, error)
        return None
    return rules


def _work(service: NodeService, path: Path, stopping: threading.Event, *, patience_s: float) -> None:
    """Return once `stopping` is set, or there was nothing to do for `patience_s`."""
    busy_s = time.monotonic()
    while not stopping.wait(POLL_S):
        now_s = time.monotonic()
        service.turn(now_s)
        path.write_text(json.dumps(service.failures()), encoding="utf-8")
        os.utime(path)
        if not service.is_idle():
            busy_s = now_s
        elif now_s - busy_s > patience_s:
            return


@contextlib.contextmanager
def sign_of_life(root: Path) -> Iterator[Path]:
    """Return a context in which this service alone uses the folder `root`, by a file there that it locks and touches.

    Raises:
        ConfigError: Another service has it, or the folder cannot be made or written.
    """
    path = root / SERVICE_FILE
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"the folder of the spools {root} cannot be used: {error.strerror}") from error
    with os.fdopen(descriptor):
        if not _waits_for_lock(descriptor):
            raise ConfigError(f"another `trainermon node` follows the runs in {root}; one is enough")
        yield path


def _waits_for_lock(descriptor: int) -> bool:
    """Return whether the lock could be had; a rank that looks for a service holds it for a moment."""
    deadline_s = time.monotonic() + POLL_S
    while not _locks(descriptor):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S / 10)
    return True


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_failures(path: Path) -> Sequence[str]:
    """Return the lines in a service's file on agents that keep ending soon after their start; () during a write."""
    try:
        return tuple(map(str, json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return ()


def is_living(path: Path) -> bool:
    """Whether a service has touched its file within the last half minute."""
    try:
        return abs(time.time() - path.stat().st_mtime) < STALE_S
    except OSError:
        return False


@dataclasses.dataclass(slots=True)
class _AgentStart:
    """When an agent of a spool was started, and how long to wait with the next one."""

    started_s: float
    pause_s: float = 1.0
    num_ends: int = 0
    status: int = 0


class NodeService:
    """Runs one agent for every spool in `root` that has none.

    Args:
        root: Folder of the spools.
        options: Passed on to every agent.
        start: Starts a process; for tests.
    """

    def __init__(
        self, root: Path, options: Sequence[str], *, start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self._root = root
        self._options = tuple(options)
        self._start = start
        self._agents: dict[Path, subprocess.Popen[bytes]] = {}
        self._starts: dict[Path, _AgentStart] = {}

    def turn(self, now_s: float) -> None:
        """Collect agents that have ended, and start those that are missing; call it again and again.

        `now_s` is monotonic. A run that is over but waits for a restart gives way to a new one: the port should be the
        new one's. Until it has, the journals keep what the new run writes.
        """
        self._reap()
        missing = [spool for spool in self._spools() if self._needs_agent(spool, now_s)]
        lingering = [spool for spool in self._agents if _state(spool) == FINISHED] if missing else []
        for spool in lingering:
            self._agents[spool].terminate()
        if not lingering:
            for spool in missing:
                self._start_agent(spool, now_s)

    def is_idle(self) -> bool:
        """Return whether there is no agent, and no spool that would need one."""
        return not self._agents and not any(list_ranks(spool) for spool in self._spools())

    def failures(self) -> list[str]:
        """Return a line for each run whose agents keep ending soon after their start."""
        return [
            f"{spool.name}: its agent has ended {start.num_ends} times, the last time with status {start.status}; "
            f"agent.log in the run directory or in {spool} says why"
            for spool, start in self._starts.items()
            if start.num_ends >= CRASH_LOOP
        ]

    def stop(self, timeout_s: float) -> None:
        """End every agent: at once where a rank lives, else when all is stored, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._agents and time.monotonic() < deadline_s:
            for spool, agent in self._agents.items():
                if _state(spool) == FINISHED or _has_living_rank(spool):
                    agent.terminate()
            time.sleep(POLL_S / 10)
            self._reap()
        for spool, agent in self._agents.items():
            _end(agent, spool, timeout_s)

    def _spools(self) -> Iterator[Path]:
        """Yield the spools of this user; what others lay into a shared folder must not be followed in our name."""
        with os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        yield Path(entry.path)

    def _needs_agent(self, spool: Path, now_s: float) -> bool:
        if spool in self._agents or not (spool / SETTINGS_FILE).exists() or not list_ranks(spool):
            return False
        last = self._starts.get(spool)
        return (last is None or now_s - last.started_s >= last.pause_s) and not is_followed(spool)

    def _start_agent(self, spool: Path, now_s: float) -> None:
        last = self._starts.get(spool)
        again = last is not None and now_s - last.started_s < STEADY_S
        self._starts[spool] = _AgentStart(now_s)
        if last is not None and again:
            pause_s = min(2 * last.pause_s, MAX_PAUSE_S)
            self._starts[spool] = _AgentStart(now_s, pause_s, last.num_ends, last.status)
        command = [sys.executable, "-m", "trainermon.agent", str(spool), *self._options]
        environment = agent_environment(os.environ)
        self._agents[spool] = self._start(
            command, stdin=subprocess.DEVNULL, cwd="/", env=environment, start_new_session=True
        )
        _log.info("agent %d follows %s", self._agents[spool].pid, spool.name)

    def _reap(self) -> None:
        for spool, agent in list(self._agents.items()):
            status = agent.poll()
            if status is None:
                continue
            del self._agents[spool]
            if spool.exists():
                start = self._starts[spool]
                start.num_ends, start.status = start.num_ends + 1, status
                _log.info("the agent of %s has ended with status %d; its spool is still there", spool.name, status)
            else:
                self._starts.pop(spool, None)
                _log.info("%s is over, and stored", spool.name)


def _state(spool: Path) -> str | None:
    status = read_status(spool)
    return None if status is None else str(status.get("state"))


def _has_living_rank(spool: Path) -> bool:
    return any(rank_alive(spool, rank) for rank in list_ranks(spool))


def _end(agent: subprocess.Popen[bytes], spool: Path, timeout_s: float) -> None:
    agent.terminate()
    try:
        agent.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _log.error("the agent of %s does not end, and is killed; the next one goes on from its last commit", spool)
        agent.kill()
