"""Faults of the loop's turns, which are survived as long as some turn succeeds now and then."""

from __future__ import annotations

import logging

MAX_FAULTS = 600

_log = logging.getLogger(__name__)


class TurnFaults:
    """Counts the turns of the agent's loop that failed.

    Attributes:
        total: Since the agent started.
    """

    def __init__(self) -> None:
        self.total = 0
        self._num_in_a_row = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether turns have failed for so long that the agent should end."""
        return self._num_in_a_row >= MAX_FAULTS

    def note(self) -> None:
        """Count and log a turn that failed; called while its exception is handled."""
        self._num_in_a_row += 1
        self.total += 1
        if self.total.bit_count() == 1:  # 1st, 2nd, 4th ... so that a lasting fault does not fill the log
            _log.exception("a turn of the agent failed (number %d)", self.total)

    def end_row(self) -> None:
        """Reset the count of failures in a row, after a turn that succeeded."""
        self._num_in_a_row = 0
