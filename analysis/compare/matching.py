"""Which call of one dump is compared with which of the other, and which row with which row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from trainermon.analysis.compare.items import Call, Item, Rows
from trainermon.dump.records import BACKWARD


class CallPair(NamedTuple):
    """A call of the target and the golden call it is compared with; one of both may be missing."""

    target: Call | None
    golden: Call | None

    def rows(self) -> Iterator[tuple[Item | None, Item | None]]:
        """Yield the rows of both, paired by their place; those of the golden call alone come last."""
        theirs = {item.place: item for item in self.golden.items} if self.golden else {}
        for item in self.target.items if self.target else ():
            yield item, theirs.pop(item.place, None)
        for item in theirs.values():
            yield None, item


def match_calls(
    target: Rows, golden: Rows, *, fuzzy: bool = False, rename: Callable[[str], str] = str
) -> list[CallPair]:
    """Return every call of both dumps once: the target's in its order, then those that only the golden dump has.

    Calls match by name and number; backward calls are numbered anew in the order in which they ran, as msprobe does, so
    that a gap does not matter. `fuzzy` pairs what is left by what is called, within which module, in which direction,
    in order, whatever its number and prefix. `rename` gives a target's key the name that it has in the golden dump.
    """
    left = dict(_numbered(golden.calls))
    partners: dict[str, Call] = {}
    for key, call in _numbered(target.calls, rename):
        if key in left:
            partners[call.key] = left.pop(key)
    if fuzzy:
        partners |= _fuzzy(target.calls, left, partners)
        taken = {call.key for call in partners.values()}
        left = {key: call for key, call in left.items() if call.key not in taken}
    pairs = [CallPair(call, partners.get(call.key)) for call in target.calls]
    return pairs + [CallPair(None, call) for call in left.values()]


def _numbered(calls: Iterable[Call], rename: Callable[[str], str] = str) -> Iterator[tuple[Hashable, Call]]:
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls:
        number = call.number
        name = f"{call.family}.{rename(call.name)}" if call.family else rename(call.key)
        if call.direction == BACKWARD:
            number = counts[call.family, call.name]
            counts[call.family, call.name] += 1
        yield (name, call.direction, number), call


def _fuzzy(calls: Iterable[Call], left: dict[Hashable, Call], partners: dict[str, Call]) -> dict[str, Call]:
    queues: dict[Hashable, list[Call]] = defaultdict(list)
    for call in left.values():
        queues[_likeness(call)].append(call)
    found = {}
    for call in calls:
        queue = queues.get(_likeness(call))
        if call.key not in partners and queue:
            found[call.key] = queue.pop(0)
    return found


def _likeness(call: Call) -> Hashable:
    is_module = call.family == "Module"
    path = call.name.rpartition(".")[0] if is_module else call.name.strip("_")
    return is_module, path.removeprefix("module."), call.scope.removeprefix("module."), call.direction
