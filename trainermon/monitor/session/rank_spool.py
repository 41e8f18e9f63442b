"""The files that one rank holds open in the run's spool."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import trainermon
from trainermon.core.config import MonitorConfig
from trainermon.core.control import ControlPage
from trainermon.core.journal import Header, JournalWriter
from trainermon.core.outbox import Outbox
from trainermon.core.spool import RankLock, memory_share_bytes, open_spool
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Coordinates


class RankSpool:
    """Holds the files of one rank in the run's spool open, until `close`.

    Attributes:
        directory: The run's spool.
        page: Control page of the rank.
        journal: Journal of the rank.
        outbox: What the rank sends to the run directory.

    Raises:
        SpoolError: The spool cannot be written, or another process has the rank's place.
    """

    def __init__(self, run: RunIdentity, coordinates: Coordinates, config: MonitorConfig) -> None:
        self.directory = open_spool(run.run_id, Path(config.spool_dir) if config.spool_dir else None)
        self._lock = RankLock(self.directory, coordinates.rank)
        self.page = ControlPage(self.directory, coordinates.rank)
        budget = min(int(config.spool_mb * (1 << 20)), memory_share_bytes(self.directory, coordinates.local_world_size))
        self.journal = JournalWriter(self.directory, _header(run, coordinates), budget_bytes=budget)
        self.outbox = Outbox(self.directory, run.directory, coordinates.rank)

    def close(self) -> None:
        """Close the files, and release the rank's lock."""
        self.journal.close()
        self.page.close()
        self._lock.close()


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
