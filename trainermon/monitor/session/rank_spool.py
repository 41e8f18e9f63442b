"""The files that one rank holds open in the run's spool."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

import trainermon
from trainermon.core.config import MonitorConfig
from trainermon.core.control import ControlPage
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.journal.spool_thread import CLOSE_S, SpoolThread
from trainermon.core.outbox import Outbox
from trainermon.core.spool import RankLock, disk_type, memory_share_bytes, open_spool, spool_of
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates

logger = logging.getLogger("trainermon")


class RankSpool:
    """Holds the files of one rank in the run's spool open, until `close`.

    Attributes:
        directory: The run's spool.
        disk: The type of the file system if that may be a disk, "" for memory; a disk is written to by a thread.
        page: Control page of the rank.
        journal: Journal of the rank.
        outbox: What the rank sends to the run directory.

    Raises:
        SpoolError: The spool cannot be written, or another process has the rank's place.
    """

    def __init__(self, run: RunIdentity, coordinates: Coordinates, config: MonitorConfig) -> None:
        self.directory = open_spool(spool_of_run(run, config))
        with contextlib.ExitStack() as opened:  # closes what is open if the rest cannot be opened
            self._lock = RankLock(self.directory, coordinates.rank)
            opened.callback(self._lock.close)
            self.disk = disk_type(self.directory)
            self._thread = SpoolThread() if self.disk else None
            opened.callback(self._end_thread)
            self.page = ControlPage(self.directory, coordinates.rank, self._thread)
            opened.callback(self.page.close)
            share = memory_share_bytes(self.directory, coordinates.local_world_size)
            budget = min(int(config.spool_mb * (1 << 20)), share)
            header = _header(run, coordinates)
            self.journal = JournalWriter(self.directory, header, budget_bytes=budget, thread=self._thread)
            opened.callback(self.journal.close)
            self.outbox = Outbox(self.directory, run.directory, coordinates.rank)
            opened.pop_all()

    def close(self) -> None:
        """Close the files, and release the rank's lock; a disk that hangs is waited for 5 seconds."""
        self.journal.close()
        self.page.close()
        self._end_thread()
        self._lock.close()

    def _end_thread(self) -> None:
        if self._thread is not None and not self._thread.close():
            logger.warning(
                "the spool %s took nothing for %.0f s: what the monitor wrote last is lost", self.directory, CLOSE_S
            )


def spool_of_run(run: RunIdentity, config: MonitorConfig) -> Path:
    """Return where the spool of a run is on this node; it need not exist yet."""
    return spool_of(run.run_id, run.directory, Path(config.spool_dir) if config.spool_dir else None)


def _header(run: RunIdentity, coordinates: Coordinates) -> Header:
    return Header(
        run_id=run.run_id,
        attempt=run.attempt,
        coordinates=coordinates,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_s=time.time(),
        version=trainermon.__version__,
        series=(),
        placements=(),
    )
