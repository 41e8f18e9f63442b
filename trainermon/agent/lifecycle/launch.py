"""`trainermon run -- COMMAND`: starts a job and stays until its agents have stored everything.

In a container the first process's end is everybody's: when `torchrun` itself is PID 1, the kernel kills the agent in
the middle of its last flush. This wrapper takes that place. It passes signals on, reaps whatever is re-parented to it,
keeps the command's exit status, and waits, for a bounded time, for the agents of the runs that were started under it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from trainermon.agent.lifecycle.lock import FINISHED, is_followed, read_status
from trainermon.agent.lifecycle.summary import summarise
from trainermon.core.errors import ConfigError
from trainermon.core.launcher import LAUNCHER_VARIABLE, LINGER_FILE
from trainermon.core.private_files import replace_file

SUMMARY = "run a training command, wait for the last flush, keep its exit status"
FLUSH_TIMEOUT_S = 60.0
START_GRACE_S = 15.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_POLL_S = 0.05
_WAKE_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `trainermon run`."""
    parser.add_argument("--serve", action="store_true", help="keep agent and page up until Ctrl-C")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no summary at the end")
    parser.add_argument(
        "--flush-timeout",
        type=float,
        default=FLUSH_TIMEOUT_S,
        metavar="SECONDS",
        help="longest time to wait for the agents after the command has ended (default %(default)g)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command with its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the training command given to `trainermon run`, wait for its agents, and return the command's exit status.

    It is 128 + number for a signal, 126 or 127 if the command could not be started.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("found no command, expected `trainermon run -- COMMAND …`")
    folder = Path(tempfile.mkdtemp(prefix="trainermon-run-"))
    job = LaunchedJob(folder)
    try:
        with _signals(job.handle):
            status = job.run(command)
            agents = [LaunchedAgent(Path(file.read_text(encoding="utf-8"))) for file in sorted(folder.iterdir())]
            agents = list({agent.spool: agent for agent in agents}.values())
            if not args.serve:
                _let_go(agents)
            _wait_for(job, agents, args.flush_timeout)
            if not args.quiet:
                sys.stdout.write("".join(summarise(Path(agent.output)) for agent in agents if agent.output))
            if args.serve:
                _serve(job, agents)
                _let_go(agents)
                _wait_for(job, agents, args.flush_timeout)
                sys.stdout.write(
                    "".join(f"stopped; the run is in {agent.output}\n" for agent in agents if agent.output)
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status


class LaunchedJob:
    """Runs the training command as a child process, and passes signals on to it.

    Args:
        folder: Where the ranks register the spools of their agents.
    """

    def __init__(self, folder: Path) -> None:
        self._variable = f"{os.getpid()}:{folder}"
        self._pid = 0
        self._status: int | None = None
        self._early: list[int] = []
        self.interrupted = False

    def run(self, command: Sequence[str]) -> int:
        """Start `command` and return its exit status when it has ended; reaps every child meanwhile."""
        try:
            child = subprocess.Popen(command, env={**os.environ, LAUNCHER_VARIABLE: self._variable})  # noqa: S603 - the user's own command
        except OSError as error:
            sys.stderr.write(f"trainermon run: cannot start {command[0]!r}: {error.strerror}\n")
            return 127 if error.errno == errno.ENOENT else 126
        self._pid = child.pid
        for number in self._early:
            child.send_signal(number)
        # reaped here, together with everything that was re-parented to us
        child.returncode = self._status = self._status_at_end(child.pid)
        self.interrupted = False
        return self._status

    def _status_at_end(self, pid: int) -> int:
        # Not by a `waitpid` without end: a signal that arrives just before it would be passed on only after the end.
        descriptor = os.pidfd_open(pid)
        try:
            while True:
                select.select([descriptor], [], [], _WAKE_S)
                while self._reap(os.WNOHANG):
                    pass
                if self._status is not None:
                    return self._status
        finally:
            os.close(descriptor)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on while the command runs; afterwards remember that the user wants to leave.

        A signal handler.
        """
        del frame
        self.interrupted = True
        if not self._pid:
            self._early.append(number)
        elif self._status is None and not _came_from_terminal(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def pause(self) -> None:
        """Sleep for a moment, and collect child processes that have ended."""
        time.sleep(_POLL_S)
        while self._reap(os.WNOHANG):
            pass

    def _reap(self, options: int) -> bool:
        try:
            pid, wait_status = os.waitpid(-1, options)
        except ChildProcessError:
            return False
        if pid == self._pid:
            code = os.waitstatus_to_exitcode(wait_status)
            self._status = code if code >= 0 else 128 - code
        return pid != 0


class LaunchedAgent:
    """Watches, for `trainermon run`, the agent of one spool by its status file.

    Attributes:
        output: The run directory, '' if the agent never said so.
        url: Address of the page, or None.
    """

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.output = ""
        self.url: str | None = None
        self.stored = False
        self._seen = self._free = False
        self._appears_s = time.monotonic() + START_GRACE_S
        self.look()

    def look(self) -> bool:
        """Read the agent's status file; return whether the agent is running or has only just been started."""
        status = read_status(self.spool)
        if status is not None:
            self.output = str(status.get("output") or self.output)
            self.url = status.get("url") or self.url
            self.stored = status.get("state") == FINISHED
        if is_followed(self.spool):
            self._seen = True
            return True
        self.stored = self.stored or not self.spool.exists()
        return not (self.stored or self._seen) and time.monotonic() < self._appears_s

    def allow_end(self) -> None:
        """Tell the agent, by a file in its spool, that it may end once everything is stored.

        From now on `is_done` waits for its end, too. If the file cannot be written, nothing is raised.
        """
        self._free = True
        with contextlib.suppress(OSError):
            replace_file(self.spool / LINGER_FILE, json.dumps({"hold_pid": None}).encode())

    def is_done(self) -> bool:
        """Whether nothing is left to wait for: all is stored, and the agent has ended if it may."""
        return not self.look() or (self.stored and not self._free)


def _serve(job: LaunchedJob, agents: Sequence[LaunchedAgent]) -> None:
    shown: set[str] = set()
    job.interrupted = False
    while not job.interrupted and sum(agent.look() for agent in agents):
        for url in {agent.url for agent in agents if agent.url} - shown:
            sys.stdout.write(f"page {url}   metrics {url}metrics   (Ctrl-C ends)\n")
            sys.stdout.flush()
            shown.add(url)
        job.pause()
    job.interrupted = False


def _wait_for(job: LaunchedJob, agents: Sequence[LaunchedAgent], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(agent.is_done() for agent in agents) and time.monotonic() < deadline and not job.interrupted:
        job.pause()
    for agent in agents:
        if not agent.stored:
            sys.stderr.write(
                f"trainermon run: the agent of {agent.spool} has not stored everything yet; what is left stays in the"
                f" spool, and is stored by it or by the next agent: trainermon agent {agent.spool}\n"
            )


def _let_go(agents: Sequence[LaunchedAgent]) -> None:
    for agent in agents:
        agent.allow_end()


def _came_from_terminal(number: int) -> bool:
    """Whether the kernel has sent this signal to the whole foreground group, the command included."""
    if number not in _FROM_TERMINAL:
        return False
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
