"""Starts the node agent from a training process, so that it outlives the job and disturbs nothing in it.

Only the standard library is used, and the agent is named, never imported: this stands below everything. What the
agent must not inherit from a rank is decided here: its standard streams (an open stdout keeps `torchrun | tee` alive),
its session (torchrun kills process groups), its working directory and the variables that make it look like a rank.
Re-parenting itself is done by the new process (`trainermon.agent.__main__`): a rank has threads and device contexts and
must never fork.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import site
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import trainermon
from trainermon.core.errors import ConfigError, SpoolError
from trainermon.core.private_files import open_private, replace_file

START_TIMEOUT_S = 20.0
STDERR_FILE = "agent.stderr"
# An agent holds a lock on the one as long as it lives, and says in the other how it is doing.
LOCK_FILE = "agent.lock"
STATUS_FILE = "agent.status.json"
# `trainermon run` sets this to `<its pid>:<folder>`; every spool whose agent is started under it is told there.
LAUNCHER_VARIABLE = "TRAINERMON_LAUNCHER"
LINGER_FILE = "agent.linger"
# `trainermon node` holds a lock on this file in the folder of the spools as long as it follows the runs there.
SERVICE_FILE = ".trainermon-node"

_DROPPED_PREFIXES = (
    "ASCEND_",
    "CUDA_",
    "GOMP_",
    "GROUP_",
    "HCCL_",
    "KMP_",
    "MASTER_",
    "NCCL_",
    "OMP_",
    "ROLE_",
    "TORCH",
)
_DROPPED = frozenset(
    {
        "LD_PRELOAD",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "PYTHONINSPECT",
        "PYTHONSTARTUP",
        "RANK",
        "WORLD_SIZE",
        LAUNCHER_VARIABLE,
    }
)


def start_agent(spool: Path) -> None:
    """Start the agent of `spool` as a process of its own; return once it has left this process's family.

    Where a service of this node follows all spools of this user (`trainermon node`), that is left to it. Whether it
    stays is its own affair: where another agent already follows this spool, the new one ends at once.
    Takes about as long as a Python interpreter needs to start (20-50 ms). `agent.json` must stand in the spool. What
    the agent says before its log is open is kept in `agent.stderr` there.

    Raises:
        SpoolError: The interpreter could not be started, or it could not import trainermon.
    """
    register(spool)
    if not _is_locked(spool / LOCK_FILE):  # of one that was killed: its address would be taken for that of the next
        (spool / STATUS_FILE).unlink(missing_ok=True)
    if is_served(spool.absolute().parent):
        return
    errors = spool / STDERR_FILE
    child = None
    try:
        with open(errors, "wb", opener=open_private) as stream:
            command = [sys.executable, "-m", "trainermon.agent", "--detach", str(spool.absolute())]
            child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd="/",
                env=agent_environment(os.environ),
                start_new_session=True,
            )
            status = child.wait(START_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        if child is not None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        raise SpoolError(f"the agent cannot be started by {sys.executable!r}: {error}") from error
    if status != 0:
        said = errors.read_text(errors="replace").strip().rpartition("\n")[2]
        raise SpoolError(f"the agent ended at its start with status {status}: {said or 'no message'}")


def deliver(spool: Path, run_directory: Path, limit_s: float) -> bool:
    """Move the waiting dumps from the outbox of `spool` to the run directory; return whether done in `limit_s` seconds.

    It is done by a process of its own, which goes on after that time: a file system may keep it waiting for ever.
    """
    command = [sys.executable, "-m", "trainermon.core.outbox", str(spool.absolute()), str(run_directory.absolute())]
    try:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=agent_environment(os.environ),
            start_new_session=True,
        )
        return child.wait(limit_s) == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_served(root: Path) -> bool:
    """Return whether a `trainermon node` of this user, in whatever container, starts agents for spools in `root`."""
    return _is_locked(root / SERVICE_FILE)


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file of this user's; locks of others mean nothing to us."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(descriptor).st_uid == os.getuid()
    finally:
        os.close(descriptor)
    return False


def check_rules(path: Path) -> None:
    """Raise ConfigError if the agent could not read the alert rules in `path`. Starts an interpreter (0.2 s).

    The rank does not import what reads rules, so a fresh interpreter is asked.
    """
    code = "import sys; from trainermon.alerts.rules import load_rules; load_rules(sys.argv[1])"
    asked = subprocess.run(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-c", code, str(path.absolute())],
        env=agent_environment(os.environ),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        said = asked.stderr.strip().rpartition("\n")[2] or f"the interpreter ended with status {asked.returncode}"
        raise ConfigError(f"rules: {said.partition('RuleError: ')[2] or said}")


def register(spool: Path) -> None:
    """Register the agent with the `trainermon run` that started the job, if one did, so that each knows the other.

    The agent then stays until the launcher lets it go, and not a fixed time after the last rank.
    """
    pid, _, folder = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    if pid.isdecimal() and folder and Path(folder).is_dir():
        replace_file(spool / LINGER_FILE, json.dumps({"hold_pid": int(pid)}).encode())
        (Path(folder) / uuid.uuid4().hex).write_text(str(spool.absolute()), encoding="utf-8")
    else:
        (spool / LINGER_FILE).unlink(missing_ok=True)


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what belongs to a rank, with one thread per library and an absolute import path."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    kept |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    path = _import_path(environment.get("PYTHONPATH", ""))
    if path:
        kept["PYTHONPATH"] = path
    return kept


def _import_path(python_path: str) -> str:
    """Return PYTHONPATH as it means here, where the working directory still is the user's.

    A source checkout that is found only through the script's folder or the working directory is added at the end. A
    site folder never is: in PYTHONPATH it would come before the standard library.
    """
    folders = [str(Path(entry).absolute()) for entry in python_path.split(os.pathsep) if entry]
    package = str(Path(trainermon.__file__).absolute().parent.parent)
    if package not in folders and package not in {*site.getsitepackages(), site.getusersitepackages()}:
        folders.append(package)
    return os.pathsep.join(folders)
