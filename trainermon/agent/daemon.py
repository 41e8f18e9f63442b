"""The agent as a process: from the command line to the last flush.

Everything heavy is imported only once the lock of the spool is held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainermon.agent.lifecycle.lock import SETTINGS_FILE, AgentStatus, RunLock, claim, write_status
from trainermon.agent.lifecycle.open_files import LoopFaults, raise_file_limit
from trainermon.agent.lifecycle.overrides import add_overrides, overridden
from trainermon.agent.lifecycle.process import open_log, settle
from trainermon.core.errors import ConfigError, StoreError, TrainermonError
from trainermon.core.spool import list_ranks, rank_alive

if TYPE_CHECKING:
    from trainermon.agent.assembly import AgentParts
    from trainermon.agent.settings import AgentSettings
    from trainermon.exporters.store.segments import JournalPosition

SUMMARY = "follow the journals of one run on this node: store, rules, metrics and page"
START_RETRY_S = 5.0
END_LIMIT_S = 2.0
COUNT_LIMIT_S = 2.0

_log = logging.getLogger(__name__)


class _Following(NamedTuple):
    """What an agent has done: by rank, up to where its journal is stored, and whether that is everything."""

    stored: Mapping[int, JournalPosition]
    is_done: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `trainermon agent`."""
    parser.add_argument("spool", type=Path, help="spool directory of the run, with agent.json")
    add_overrides(parser)


def main(args: argparse.Namespace) -> int:
    """Run the agent of a spool (`trainermon agent SPOOL`) in this process until its run is over.

    Return the exit status.

    Raises:
        ConfigError: The folder is no spool, or the settings in it are wrong.
    """
    spool = args.spool.absolute()
    if not (spool / SETTINGS_FILE).is_file():  # before a lock is left in a folder that has nothing to do with us
        missing = "it does not exist" if not spool.is_dir() else f"there is no {SETTINGS_FILE} in it"
        raise ConfigError(f"{spool} is not the spool of a run: {missing}; a run that is stored has none any more")
    settle()
    raise_file_limit()
    lock = claim(spool)
    if lock is None:
        return 0
    from trainermon.agent.settings import load_settings

    status = None
    while status is None:
        settings = overridden(load_settings(spool), args)
        with contextlib.suppress(OSError):  # a full disk: what is in the spool can be read all the same
            write_status(spool, AgentStatus(pid=os.getpid(), run_id=settings.run_id, output=settings.output))
        host = args.node_name or socket.gethostname()
        status = follow(spool, settings, lock, host=host, log_to_stderr=args.log_to_stderr)
    lock.close()
    return status


def run_command_line() -> int:
    """Run `python -m trainermon.agent SPOOL`; errors become one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m trainermon.agent", description=SUMMARY)
    add_arguments(parser)
    try:
        return main(parser.parse_args())
    except TrainermonError as error:
        sys.stderr.write(f"trainermon agent: {error}\n")
        return 2


def follow(
    spool: Path, settings: AgentSettings, lock: RunLock, *, host: str, log_to_stderr: bool = False
) -> int | None:
    """Follow the ranks of `spool`, whose `lock` is held, until the run is over.

    Remove the spool if all of it is stored. `host` names this node in the run directory: what one agent began there,
    the next of the same name continues.

    Returns 0 if all is stored, 1 if not, and None if the spool must be followed anew: a rank came when this agent had
    already looked for the last time. If a thread hangs in a file system that does not answer, the process ends here.
    """
    from trainermon.agent.lifecycle.release import is_needed, remove_run_spool

    listener = open_log(settings.run_dir, host, spool, to_stderr=log_to_stderr)
    executor = ThreadPoolExecutor(1, thread_name_prefix="store")
    status: int | None = 1
    try:
        stored, is_done = asyncio.run(_follow(spool, settings, executor, lock=lock, host=host))
        if not is_done:
            _tell_unstored(spool, stored, lock)
        else:
            status = 0
            if remove_run_spool(spool, stored):
                _log.info("everything is stored; the spool is gone")
            elif is_needed(spool, stored):
                status = None
                _log.info("a rank has come while this agent was leaving; it is followed too")
    except Exception:  # noqa: BLE001 - the border: whatever it was, the log shall say it, and the spool stays as it is
        _log.exception("the agent ends by a fault of its own; the next one goes on from the last commit")
    endings = (partial(executor.shutdown, cancel_futures=True), listener.stop)
    ended = [_ends_within(ending, END_LIMIT_S) for ending in endings]
    if not all(ended):
        os._exit(status or 0)  # the interpreter would wait for that thread for ever
    return status


async def _follow(spool: Path, settings: AgentSettings, executor: Executor, *, lock: RunLock, host: str) -> _Following:
    from trainermon.agent.loop import NodeAgent

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopFaults())
    stopping = asyncio.Event()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that a job was started from is nothing to us
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    parts = await _assembled(spool, settings, executor, stopping, host=host)
    if parts is None:
        return _Following({}, is_done=False)
    agent = NodeAgent(parts, executor, host=host, lock=lock)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    if stopping.is_set():
        agent.stop()
    is_done = await agent.run()
    return _Following(parts.pipeline.flushed, is_done)


def _tell_unstored(spool: Path, stored: Mapping[int, JournalPosition], lock: RunLock) -> None:
    """Log how much this agent leaves behind in a spool that is still its own."""
    from trainermon.agent.lifecycle.release import num_unstored

    if lock.is_lost(spool):
        return
    number, is_all = num_unstored(spool, stored, limit_s=COUNT_LIMIT_S)
    if number or not is_all:
        _log.warning(
            "this agent ends with %s%d records of steps not stored; they stay in %s, and are stored by the next one: "
            "trainermon agent %s",
            "" if is_all else "at least ",
            number,
            spool,
            spool,
        )


async def _assembled(
    spool: Path, settings: AgentSettings, executor: Executor, stopping: asyncio.Event, *, host: str
) -> AgentParts | None:
    """Return the agent's parts once the run directory can be used, which is tried again until it can.

    None if the agent is told to leave first, or no rank has been there for too long.
    """
    from trainermon.agent.assembly import assemble
    from trainermon.agent.lifecycle.release import give_up_s

    node_dir = settings.run_dir / "nodes" / host
    stop = asyncio.ensure_future(stopping.wait())
    lived_s = time.monotonic()
    while not stop.done():
        job = asyncio.get_running_loop().run_in_executor(executor, assemble, spool, settings, node_dir, executor)
        await asyncio.wait((job, stop), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            break
        error = job.exception()
        if error is None:
            stop.cancel()
            return job.result()
        if not isinstance(error, OSError | StoreError):
            raise error
        _log.error("the run directory cannot be used: %s; it is tried again every %g s", error, START_RETRY_S)
        status = AgentStatus(pid=os.getpid(), run_id=settings.run_id, output=settings.output, problem=str(error))
        with contextlib.suppress(OSError):
            write_status(spool, status)
        if any(rank_alive(spool, rank) for rank in list_ranks(spool)):
            lived_s = time.monotonic()
        elif time.monotonic() - lived_s > give_up_s(spool, settings.agent.linger_s):
            break
        await asyncio.wait((stop,), timeout=START_RETRY_S)
    stop.cancel()
    return None


def _ends_within(action: Callable[[], object], limit_s: float) -> bool:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()
