"""Which dropouts of a dump drop just what an earlier one dropped: a generator was set back, or is not moved on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainermon.accuracy.randomness import DroppedElements, dropped_elements
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import EntryRecord
from trainermon.replay.dumped_calls import DumpedCall

_NAMES = ("dropout", "dropout_")


class RepeatedMasks:
    """Finds dropouts whose mask is that of an earlier one; what a checkpoint repeats is no call of its own.

    Args:
        entries: The forward calls of the dump, in order.
        rebuilt: Gives the call of an entry.
    """

    def __init__(self, entries: Sequence[EntryRecord], rebuilt: Callable[[EntryRecord], DumpedCall]) -> None:
        self._entries = [entry for entry in entries if _is_dropout(entry)]
        self._rebuilt = rebuilt
        self._known: dict[str, DroppedElements | None] = {}

    def earlier(self, entry: EntryRecord) -> str:
        """Return the key of the first call before this one that dropped the same; "" if there is none.

        Cost: each dropout of this shape is read once.
        """
        own = self._dropped(entry) if _is_dropout(entry) else None
        if own is None:
            return ""
        for other in self._entries:
            if other.key == entry.key:
                break
            dropped = self._dropped(other) if _shape(other) == _shape(entry) else None
            if dropped is not None and own.repeats(dropped):
                return other.key
        return ""

    def _dropped(self, entry: EntryRecord) -> DroppedElements | None:
        if entry.key not in self._known:
            try:
                dumped = self._rebuilt(entry)
                result = dumped.result[0] if dumped.result else None
                self._known[entry.key] = dropped_elements(dumped.name, dumped.call, result)
            except DumpError:  # its own row says why
                self._known[entry.key] = None
        return self._known[entry.key]


def _is_dropout(entry: EntryRecord) -> bool:
    return split_key(entry.key)[0] in _NAMES


def _shape(entry: EntryRecord) -> tuple[int, ...]:
    return entry.outputs[0].shape if entry.outputs else ()
