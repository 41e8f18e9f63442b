"""What `set_monitor` makes on disk, noted before it does, so that one that is refused leaves nothing behind."""

from __future__ import annotations

import contextlib
import shutil
import socket
from pathlib import Path

from trainermon.core.outbox import OUTBOX_FOLDER
from trainermon.core.spool import list_ranks
from trainermon.core.values import Coordinates


class MadePlaces:
    """Knows which files and folders of a rank were not there when this was created.

    Args:
        run_directory: Where the run will be.
        spool: Where its spool will be.
        coordinates: The rank's position in the job.
    """

    def __init__(self, run_directory: Path, spool: Path, coordinates: Coordinates) -> None:
        self._spool = spool
        rank = coordinates.rank
        node = run_directory / "nodes" / socket.gethostname()
        self._patterns = [] if rank in list_ranks(spool) else [f"rank{rank:05d}.*"]
        if coordinates.local_rank == 0 and not (spool / "agent.json").exists():
            self._patterns.append("agent.*")
        files = [run_directory / "ranks" / f"rank{rank:05d}.json"]
        files += [run_directory / "run.json"] if rank == 0 else []
        self._files = [path for path in files if not path.exists()]
        folders = [run_directory / "ranks", node, spool / OUTBOX_FOLDER]
        folders = [path for folder in folders for path in (folder, *folder.parents)]
        self._folders = sorted({path for path in folders if not path.exists()}, key=lambda path: -len(path.parts))
        self._node = node if coordinates.local_rank == 0 and node in self._folders else None

    def remove(self) -> None:
        """Remove what has come since, as far as no other rank has put anything there; raises nothing."""
        with contextlib.suppress(OSError):
            for pattern in self._patterns:
                for path in self._spool.glob(pattern):
                    path.unlink(missing_ok=True)
            for path in self._files:
                path.unlink(missing_ok=True)
        if self._node is not None:
            shutil.rmtree(self._node, ignore_errors=True)
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
