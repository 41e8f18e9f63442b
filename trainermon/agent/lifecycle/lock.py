"""One agent per spool: the lock, the status file, and who gives way to whom.

Only the standard library is imported: of thirty agents started at once twenty-nine end before they load anything.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.core.private_files import replace_file
from trainermon.core.spool import try_enter

SETTINGS_FILE = "agent.json"
LOCK_FILE = "agent.lock"
STATUS_FILE = "agent.status.json"
RUNNING = "running"
DRAINING = "draining"
FINISHED = "finished"
PATIENCE_S = 120.0


class ToldAlert(NamedTuple):
    """What the status says of alerts that fired on one step by one rule.

    Attributes:
        attempt: The start of the job.
        rule: Name of the rule.
        first_step: The step on which they began.
        severity: How urgent they are.
        message: The first of them in words.
    """

    attempt: int
    rule: str
    first_step: int
    severity: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """The content of `agent.status.json`, in which an agent says how it is doing.

    Attributes:
        pid: Its process id.
        run_id: The run.
        output: The run directory.
        state: `running` while a rank lives, `draining` until all they left is stored, then `finished`.
        url: Address of its page; None: it has none.
        flushed: By rank, as text, the journal position (file number, offset) up to which everything is stored for good.
        problem: What keeps commits from succeeding; "" if nothing does.
        alerts: Those that have fired, as the rank that logs them tells them apart and puts them.
    """

    pid: int
    run_id: str
    output: str
    state: str = RUNNING
    url: str | None = None
    flushed: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    problem: str = ""
    alerts: tuple[ToldAlert, ...] = ()


class RunLock:
    """A file lock that makes this process the only agent of a spool, held until `close` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def try_acquire(cls, spool: Path) -> RunLock | None:
        """Take the lock of `spool` and return it; None while another process holds it or takes the spool away.

        Raises:
            FileNotFoundError: The spool is gone.
        """
        inside = try_enter(spool)  # a lock file made in the midst of its removal would be all that is left of a spool
        if inside is None:
            spool.stat()
            return None
        try:
            descriptor = os.open(spool / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        finally:
            os.close(inside)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def is_lost(self, spool: Path) -> bool:
        """Whether `spool` is another one than was locked: somebody has removed it, and it was made again. A stat."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.lstat(spool / LOCK_FILE))
        except FileNotFoundError:
            return spool.exists()

    def close(self) -> None:
        """Release the lock, so that another agent can follow the spool."""
        os.close(self._descriptor)


def claim(
    spool: Path, *, patience_s: float = PATIENCE_S, sleep: Callable[[float], None] = time.sleep
) -> RunLock | None:
    """Wait for the lock of `spool` and return it, or None if another agent is there to follow it.

    An agent that is not `running` any more may be past its last look for new ranks. It is waited for, up to
    `patience_s` seconds: either it sees the new ranks and runs again, or it releases the lock. A job that restarts is
    therefore never left without an agent.
    """
    deadline = time.monotonic() + patience_s
    refusals = 0
    while time.monotonic() < deadline:
        try:
            lock = RunLock.try_acquire(spool)
        except FileNotFoundError:
            return None  # the agent that was there has ended and taken the spool away: nobody is left to follow
        if lock is not None:
            return lock
        status = read_status(spool)
        running = status is not None and status.get("state") == RUNNING
        refusals = refusals + 1 if running else 0
        if refusals > 1:  # once may have been `is_followed` beside the last word of an agent that was killed
            return None
        sleep(0.1)
    return None


def is_followed(spool: Path) -> bool:
    """Return whether an agent holds the lock of `spool`; false if the spool is gone."""
    try:
        # Never made here: a lock file beside a leaving agent would keep it from taking the spool away.
        descriptor = os.open(spool / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_status(spool: Path, status: AgentStatus) -> None:
    """Write `agent.status.json` of `spool`, replacing the old one by a rename."""
    replace_file(spool / STATUS_FILE, json.dumps(dataclasses.asdict(status)).encode())


def read_status(spool: Path) -> dict[str, Any] | None:
    """Return `agent.status.json` of `spool` as a mapping; None if there is none yet or it cannot be read."""
    try:
        status = json.loads((spool / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None
