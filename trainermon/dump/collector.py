"""Python's cyclic garbage collector while a dump is recorded: it has no reason to look through what a dump keeps."""

from __future__ import annotations

import gc

# Objects that are made between two collections: a dump of some hundred calls makes fewer. Usual are 700 to 2 000.
OBJECTS = 50_000


class RareCollections:
    """Lets the collector run seldom between `begin` and `end`, unless the script has it run more seldom still.

    What a dump keeps until its end are tens of thousands of objects, none of which is garbage: the collector would go
    through them every few hundred calls, and through everything else in the process soon after, which takes a tenth of
    a second. The script's own cycles are still collected, later.
    """

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """Make collections rare; does nothing where they are rare or switched off."""
        before = gc.get_threshold()
        if self._before is None and 0 < before[0] < OBJECTS:
            self._before = before
            gc.set_threshold(OBJECTS, *before[1:])

    def end(self) -> None:
        """Put back what `begin` has changed, unless somebody else has set it since."""
        before, self._before = self._before, None
        if before is not None and gc.get_threshold() == (OBJECTS, *before[1:]):
            gc.set_threshold(*before)
