"""Makes a process that was started by a rank a quiet guest of the node, with a log that cannot hold it up.

The output directory may be on a file system that hangs for minutes. Log records therefore go through a bounded queue to
a thread of their own, which also opens the file; what does not fit is dropped, never waited for.
"""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import queue
import signal
import sys
from pathlib import Path
from typing import Any

from trainermon.core.environment.secrets import Redactor
from trainermon.core.log import chosen_level
from trainermon.core.private_files import make_private_directory, open_private

NODES = "nodes"
LOG_FILE = "agent.log"
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
LOG_BYTES = 4 << 20
NICE = 5
_PENDING_RECORDS = 1000

_log = logging.getLogger(__name__)


def settle(nice: int = NICE) -> None:
    """Make this process a daemon, apart from the rank that started it.

    It gets every CPU, lower priority (`nice`), no blocked signals, private files (umask), and the folder `/`.
    """
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:  # a cpuset without any of these numbers; then the inherited set is the right one
        _log.debug("CPU affinity stays as it is: %s", error)
    os.nice(nice)


def open_log(run_dir: Path, host: str, fallback: Path, *, to_stderr: bool = False) -> logging.handlers.QueueListener:
    """Write this package's log to `nodes/<host>/agent.log` of a run, or to `fallback/agent.log` if that fails.

    It takes the place of a log that was opened before; with `to_stderr` it goes there too. Returns a started listener;
    stopping it writes out what is pending and may block as long as the file system does.
    """
    pending: queue.Queue[Any] = queue.Queue(_PENDING_RECORDS)
    logger = logging.getLogger("trainermon")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _DroppingHandler)]
    logger.addHandler(_DroppingHandler(pending))
    logger.setLevel(chosen_level() or logging.INFO)
    logger.propagate = False
    targets: list[logging.Handler] = [_NodeLog(run_dir, run_dir / NODES / host, fallback)]
    if to_stderr:
        targets.append(logging.StreamHandler())
    for target in targets:
        target.setFormatter(_WithoutSecrets(LOG_FORMAT))
    listener = logging.handlers.QueueListener(pending, *targets)
    listener.start()
    return listener


class _DroppingHandler(logging.handlers.QueueHandler):
    """Drops what the queue has no room for."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        del record


class _WithoutSecrets(logging.Formatter):
    """Takes out what messages of servers, libraries and the operating system may show of them."""

    def format(self, record: logging.LogRecord) -> str:
        return Redactor().text(super().format(record))


class _NodeLog(logging.handlers.RotatingFileHandler):
    """Opens its file with the first record, in the listener's thread; a full disk costs records, not the agent."""

    def __init__(self, run_dir: Path, folder: Path, fallback: Path) -> None:
        self._fallback = fallback / LOG_FILE
        self._folder = folder
        self._run_dir = run_dir
        super().__init__(folder / LOG_FILE, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", delay=True)

    def _open(self) -> io.TextIOWrapper:
        try:
            make_private_directory(self._folder, self._run_dir)
            return self._open_here()
        except OSError:
            self.baseFilename = str(self._fallback)
            return self._open_here()

    def _open_here(self) -> io.TextIOWrapper:
        return _appended(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Write the record beside the spool's files: the run's disk may be full, where the spool's is not."""
        if not isinstance(sys.exc_info()[1], OSError) or self.baseFilename == str(self._fallback):
            return
        with contextlib.suppress(OSError), _appended(self._fallback) as file:
            file.write(self.format(record) + self.terminator)


def _appended(path: Path) -> io.TextIOWrapper:
    # What is logged may hold names and paths that are no text.
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return io.TextIOWrapper(open(descriptor, "ab"), encoding="utf-8", errors="backslashreplace")
