"""The spool that an agent follows, and whether it still does."""

from __future__ import annotations

import logging
from pathlib import Path

from trainermon.agent.lifecycle.lock import RunLock, is_followed

_log = logging.getLogger(__name__)


class SpoolClaim:
    """Checks that the spool an agent has locked is still the same folder, and not one that was removed and made again.

    Args:
        spool: The spool.
        lock: Its lock; None: nothing is checked.

    Attributes:
        spool: The spool.
        is_lost: Whether it was found to be another folder than was locked.
    """

    def __init__(self, spool: Path, lock: RunLock | None) -> None:
        self.spool = spool
        self.is_lost = False
        self._lock = lock

    @property
    def has_successor(self) -> bool:
        """Whether the spool is lost and another agent follows the new one."""
        return self.is_lost and is_followed(self.spool)

    def check(self) -> bool:
        """Look whether the spool is still the folder that was locked; return True if it is lost.

        Whoever follows the new one writes to the store.
        """
        if self._lock is not None and self._lock.is_lost(self.spool):
            _log.error("somebody has removed %s and made it again: this agent ends, another one follows it", self.spool)
            self.is_lost = True
        return self.is_lost
