"""Which call of one dump is compared with which of the other, and which row with which row."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from trainermon.analysis.compare.items import MODULE, Call, Item, Rows
from trainermon.analysis.compare.mappings import Mappings
from trainermon.analysis.compare.naming import Naming
from trainermon.dump.records import BACKWARD


class CallPair(NamedTuple):
    """A call of the target and the golden call it is compared with; one of both may be missing.

    `places` gives the golden place of a row of the target where it is another one.
    """

    target: Call | None
    golden: Call | None
    places: Mapping[str, str] = MappingProxyType({})

    def rows(self) -> Iterator[tuple[Item | None, Item | None]]:
        """Yield the rows of both, paired by their place; those of the golden call alone come last."""
        if self.target and self.golden and not self.places and _places(self.target) == _places(self.golden):
            yield from zip(self.target.items, self.golden.items, strict=True)
            return
        theirs = {item.place: item for item in self.golden.items} if self.golden else {}
        taken = set()
        for item in self.target.items if self.target else ():
            place = self.places.get(item.place, item.place)
            taken.add(place)
            yield item, theirs.get(place)
        for place, item in theirs.items():
            if place not in taken:
                yield None, item


def _places(call: Call) -> list[str]:
    return [item.place for item in call.items]


def match_calls(target: Rows, golden: Rows, *, fuzzy: bool = False, mappings: Mappings | None = None) -> list[CallPair]:
    """Return every call of both dumps once: the target's in its order, then those that only the golden dump has.

    Calls match by name and number, modules also without what wrappers such as DDP add to their names; backward calls
    are numbered anew in the order in which they ran, as msprobe does, so that a gap does not matter; and so are all
    calls where names are mapped. `fuzzy` pairs what is left by what is called, within which module, in which direction,
    in order, whatever its number and prefix. A data mapping may give the rows of one call to several golden calls: then
    there is a pair for each of these.
    """
    mappings = mappings or Mappings()
    naming = Naming(mappings, target, golden)
    if naming.is_needed:
        left = dict(_counted(golden.calls, naming.theirs))
        ours = _counted(target.calls, naming.ours)
        partners = {call.key: left.pop(key) for key, call in ours if key in left}
    else:
        left = dict(_numbered(golden.calls))
        partners = _same_modules(dict(_numbered(target.calls)), left)
    if fuzzy:
        partners |= _fuzzy(target.calls, left, partners)
        taken = {call.key for call in partners.values()}
        left = {key: call for key, call in left.items() if call.key not in taken}
    pairs = [_pair(call, partners.get(call.key), naming) for call in target.calls]
    pairs += [CallPair(None, call) for call in left.values()]
    return match_rows(pairs, target, golden, mappings.data) if mappings.data else pairs


def _pair(call: Call, partner: Call | None, naming: Naming) -> CallPair:
    if partner is None or not naming.is_needed:
        return CallPair(call, partner)
    return CallPair(call, partner, naming.places(call, partner))


def _same_modules(ours: Mapping[Hashable, Call], left: dict[Hashable, Call]) -> dict[str, Call]:
    """Return partners by name and number, of what is left by the names without wrappers, and take them from `left`."""
    partners = {call.key: left.pop(key) for key, call in ours.items() if key in left}
    bare = {_bare(key, call): key for key, call in left.items() if call.family == MODULE}
    for key, call in ours.items():
        if call.key not in partners and _bare(key, call) in bare:
            partners[call.key] = left.pop(bare.pop(_bare(key, call)))
    return partners


def _bare(key: Any, call: Call) -> Hashable:
    _, direction, number = key
    return call.family, _unwrapped(call.name), direction, number


def _numbered(calls: Iterable[Call]) -> Iterator[tuple[Hashable, Call]]:
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls:
        number = call.number
        name = f"{call.family}.{call.name}" if call.family else call.key
        if call.direction == BACKWARD:
            number = counts[call.family, call.name]
            counts[call.family, call.name] += 1
        yield (name, call.direction, number), call


def _counted(calls: Iterable[Call], name_of: Callable[[Call], str]) -> Iterator[tuple[Hashable, Call]]:
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls:
        name = name_of(call), call.direction
        yield (*name, counts[name]), call
        counts[name] += 1


def match_rows(pairs: Iterable[CallPair], target: Rows, golden: Rows, table: Mapping[str, str]) -> list[CallPair]:
    """Return `pairs` with every row that `table` names beside the golden row that it gives.

    `table` holds full names of rows. A golden row that it gives away is also that of its own name, if that is in the
    target and not in the table.
    """
    homes = {f"{call.key}.{item.place}": (call, item) for call in golden.calls for item in call.items}
    names = (f"{call.key}.{item.place}" for call in target.calls for item in call.items)
    given = frozenset(table[name] for name in names if name in table)
    return [part for pair in pairs for part in _split(pair, homes, given, table)]


def _split(
    pair: CallPair, homes: Mapping[str, tuple[Call, Item]], given: frozenset[str], table: Mapping[str, str]
) -> Iterator[CallPair]:
    """Yield one pair for every golden call that the rows of `pair` belong to, then what is left of its golden call."""
    call, partner = pair.target, pair.golden
    own = {item.place for item in call.items if f"{call.key}.{item.place}" not in table} if call else set()
    free = tuple(
        item
        for item in (partner.items if partner else ())
        if partner and (item.place in own or f"{partner.key}.{item.place}" not in given)
    )
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in call.items if call else ():
        home = homes.get(table.get(f"{call.key}.{item.place}", "")) if call else None
        groups[home[0].key if home else partner.key if partner else ""].append(item)
    for key, items in groups.items():
        assert call is not None
        named = [(item, homes[table[name]]) for item in items if table.get(name := f"{call.key}.{item.place}") in homes]
        is_own = partner is not None and key == partner.key
        theirs = (*(theirs for _, (_, theirs) in named), *(free if is_own else ()))
        home_call = named[0][1][0] if named else partner
        places = {item.place: theirs.place for item, (_, theirs) in named}
        yield CallPair(
            call._replace(items=tuple(items)),
            home_call._replace(items=theirs) if home_call else None,
            {**pair.places, **places},
        )
    if partner and partner.key not in groups and free:
        yield CallPair(None, partner._replace(items=free))


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
    is_module = call.family == MODULE
    path = call.name.rpartition(".")[0] if is_module else call.name.strip("_")
    return is_module, _unwrapped(path), _unwrapped(call.scope), call.direction


def _unwrapped(path: str) -> str:
    """Return the path of a module without what DDP and the like add to it in msprobe's dumps.

    >>> _unwrapped("module.fc"), _unwrapped("0.module.module.fc")
    ('fc', '0.fc')
    """
    return re.sub(r"^(\d+\.)?(?:module\.)+", r"\1", path)
