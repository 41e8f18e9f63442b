"""Which call of one dump is compared with which of the other, and which row with which row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from trainermon.analysis.compare.alignment import align
from trainermon.analysis.compare.insertions import matching_parts
from trainermon.analysis.compare.items import INPUT, MODULE, DumpCall, DumpRow, DumpRows
from trainermon.analysis.compare.mappings import NameMappings
from trainermon.analysis.compare.naming import CallNaming
from trainermon.analysis.compare.siblings import unwrapped
from trainermon.dump.files.records import BACKWARD


class CallPair(NamedTuple):
    """A call of the target and the golden call it is compared with.

    Attributes:
        target: None: only the golden dump has this call.
        golden: None: only the target has it.
        places: The golden place (`input.1`) of a row, by the target's place, where they differ.
    """

    target: DumpCall | None
    golden: DumpCall | None
    places: Mapping[str, str] = MappingProxyType({})

    def rows(self) -> Iterator[tuple[DumpRow | None, DumpRow | None]]:
        """Yield pairs (target's row, golden row) at the same place of the call; None where a side has none there.

        Rows that only the golden call has come last.
        """
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


def _places(call: DumpCall) -> list[str]:
    return [item.place for item in call.items]


def match_calls(
    target: DumpRows,
    golden: DumpRows,
    *,
    fuzzy: bool = False,
    mappings: NameMappings | None = None,
    matched: Mapping[str, str] = MappingProxyType({}),
) -> list[CallPair]:
    """Return every call of both dumps once: the target's in its order, then those that only the golden dump has.

    Modules match by name and number, also without what wrappers such as DDP add to their names; functions in their
    order within the module that calls them, where the shapes of their inputs help to tell which of them one side alone
    has; a backward by its forward, and where that was not dumped, by its number among those of its name, as in msprobe.
    Across frameworks, parallel splits and under a layer mapping all calls match by their names, in order. `fuzzy` pairs
    what is left by what is called, within which module, in which direction, in order, whatever its number and prefix. A
    data mapping may give the rows of one call to several golden calls: then there is a pair for each of these.
    Before all that come the partners that are `matched` already, golden keys by the target's.
    """
    mappings = NameMappings() if mappings is None else mappings
    naming = CallNaming(mappings, target, golden)
    partners = _known(golden, matched)
    if naming.is_in_order:
        taken = {call.key for call in partners.values()}
        partners |= _by_names(
            [call for call in target.calls if call.key not in partners],
            [call for call in golden.calls if call.key not in taken],
            naming,
        )
    else:
        partners = _partners(target, golden, naming, partners)
    taken = {call.key for call in partners.values()}
    left = {call.key: call for call in golden.calls if call.key not in taken}
    if fuzzy:
        partners |= _fuzzy(target.calls, left, partners)
        taken = {call.key for call in partners.values()}
        left = {key: call for key, call in left.items() if call.key not in taken}
    pairs = [_pair(call, partners.get(call.key), naming) for call in target.calls]
    pairs += [CallPair(None, call) for call in left.values()]
    return match_rows(pairs, target, golden, mappings.data) if mappings.data else pairs


def _known(golden: DumpRows, matched: Mapping[str, str]) -> dict[str, DumpCall]:
    calls = {call.key: call for call in golden.calls} if matched else {}
    return {key: calls[partner] for key, partner in matched.items()}


def _pair(call: DumpCall, partner: DumpCall | None, naming: CallNaming) -> CallPair:
    if partner is None or not naming.is_needed:
        return CallPair(call, partner)
    return CallPair(call, partner, naming.places(call, partner))


def _partners(
    target: DumpRows, golden: DumpRows, naming: CallNaming, known: Mapping[str, DumpCall]
) -> dict[str, DumpCall]:
    """Return, by key of a call of the target, its golden call; calls without one are left out."""
    ours, theirs = _split_by_kind(target.calls), _split_by_kind(golden.calls)
    taken = {call.key for call in known.values()}
    partners = dict(known) | _same_modules(
        [call for call in ours.modules if call.key not in known],
        [call for call in theirs.modules if call.key not in taken],
        naming,
    )
    partners |= _same_functions(ours.functions, theirs.functions, (target, golden), partners, naming)
    partners = _backwards(ours, theirs, partners) | partners
    taken = {call.key for call in partners.values()}
    left = dict(_numbered((call for call in theirs.backwards if call.key not in taken), naming.theirs))
    lone = _numbered((call for call in ours.backwards if call.key not in partners), naming.ours)
    return partners | {call.key: left[key] for key, call in lone if key in left}


class _CallKinds(NamedTuple):
    """Calls by what they are matched by; `backwards` are those of functions and modules."""

    modules: list[DumpCall]
    functions: list[DumpCall]
    backwards: list[DumpCall]


def _split_by_kind(calls: Iterable[DumpCall]) -> _CallKinds:
    kinds = _CallKinds([], [], [])
    for call in calls:
        if call.direction == BACKWARD:
            kinds.backwards.append(call)
        elif call.family in (MODULE, ""):
            kinds.modules.append(call)
        else:
            kinds.functions.append(call)
    return kinds


def _same_modules(ours: Iterable[DumpCall], theirs: Iterable[DumpCall], naming: CallNaming) -> dict[str, DumpCall]:
    """Return partners by name and number, and of what is left by the names without wrappers."""
    left = {(naming.theirs(call), call.direction, call.number): call for call in theirs}
    partners, lone = {}, []
    for call in ours:
        partner = left.pop((naming.ours(call), call.direction, call.number), None)
        if partner is None:
            lone.append(call)
        else:
            partners[call.key] = partner
    bare = {(unwrapped(call.name), call.direction, call.number): call for call in left.values()}
    for call in lone:
        partner = bare.pop((unwrapped(call.name), call.direction, call.number), None)
        if partner is not None:
            partners[call.key] = partner
    return partners


def _same_functions(
    ours: Iterable[DumpCall],
    theirs: Iterable[DumpCall],
    rows: tuple[DumpRows, DumpRows],
    partners: Mapping[str, DumpCall],
    naming: CallNaming,
) -> dict[str, DumpCall]:
    """Return partners of functions, in order within the innermost call around both that has a partner.

    In order of the whole step where a side does not tell how calls nest, as without `construct.json`.
    """
    target, golden = rows
    is_nested = bool(target.parents and golden.parents)
    back = {partner.key: key for key, partner in partners.items()}
    groups: dict[str | None, tuple[list[DumpCall], list[DumpCall]]] = defaultdict(lambda: ([], []))
    for call in ours:
        groups[_nearest(call, target.parents, partners) if is_nested else None][0].append(call)
    for call in theirs:
        above = _nearest(call, golden.parents, back) if is_nested else None
        groups[back[above] if above is not None else None][1].append(call)
    found: dict[str, DumpCall] = {}
    for one, other in groups.values():
        for part in matching_parts(one, other, (_kinds(one, naming.ours), _kinds(other, naming.theirs))):
            found |= _in_order(*part, naming)
    return found


def _kinds(calls: Sequence[DumpCall], name_of: Callable[[DumpCall], str]) -> list[Hashable]:
    return [(name_of(call), _shapes(call), call.direction) for call in calls]


def _nearest(call: DumpCall, parents: Mapping[str, str], known: Container[str]) -> str | None:
    above = parents.get(call.key)
    while above is not None and above not in known:
        above = parents.get(above)
    return above


def _in_order(ours: Sequence[DumpCall], theirs: Sequence[DumpCall], naming: CallNaming) -> dict[str, DumpCall]:
    """Return partners of equal names and shapes, and of what is left by names alone."""
    found: dict[str, DumpCall] = {}
    for with_shapes in (True, False):
        one = [(naming.ours(call), _shapes(call) if with_shapes else None, call.direction) for call in ours]
        other = [(naming.theirs(call), _shapes(call) if with_shapes else None, call.direction) for call in theirs]
        pairs = align(one, other)
        found |= {ours[index].key: theirs[partner] for index, partner in pairs}
        taken = [{index for index, _ in pairs}, {partner for _, partner in pairs}]
        ours = [call for index, call in enumerate(ours) if index not in taken[0]]
        theirs = [call for index, call in enumerate(theirs) if index not in taken[1]]
        if not ours or not theirs:
            break
    return found


def _shapes(call: DumpCall) -> tuple[tuple[int, ...] | None, ...]:
    return tuple([item.shape for item in call.items if item.state == INPUT and item.is_tensor])


def _backwards(ours: _CallKinds, theirs: _CallKinds, partners: Mapping[str, DumpCall]) -> dict[str, DumpCall]:
    """Return partners of the backwards of calls whose forwards are partners."""
    golden = {(call.family, call.name, call.number): call for call in theirs.backwards}
    forwards = {(call.family, call.name, call.number): call.key for call in (*ours.modules, *ours.functions)}
    found = {}
    for call in ours.backwards:
        forward = partners.get(forwards.get((call.family, call.name, call.number), ""))
        partner = golden.get((forward.family, forward.name, forward.number)) if forward else None
        if partner is not None:
            found[call.key] = partner
    return found


def _numbered(calls: Iterable[DumpCall], name_of: Callable[[DumpCall], str]) -> Iterator[tuple[Hashable, DumpCall]]:
    """Yield backwards with their names and their numbers among those of that name."""
    counts: Counter[str] = Counter()
    for call in calls:
        name = name_of(call)
        yield (name, counts[name]), call
        counts[name] += 1


def _counted(
    calls: Iterable[DumpCall], name_of: Callable[[DumpCall], str]
) -> Iterator[tuple[tuple[str, str, int], DumpCall]]:
    """Yield calls with their names, directions, and numbers among those of that name and direction."""
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls:
        name = name_of(call), call.direction
        yield (*name, counts[name]), call
        counts[name] += 1


def _by_names(ours: Sequence[DumpCall], theirs: Sequence[DumpCall], naming: CallNaming) -> dict[str, DumpCall]:
    """Return partners by name, the n-th of a name with the n-th.

    Where one side has more functions of a name, those are partners that stand between the same others, as far as shapes
    tell; what is left goes by names.
    """
    one, other = list(_counted(ours, naming.ours)), list(_counted(theirs, naming.theirs))
    numbers = [Counter(key[:2] for key, _ in side) for side in (one, other)]
    uneven = {name for name, number in numbers[0].items() if number != numbers[1][name]}
    named = dict(other)
    partners = {
        call.key: named[key] for key, call in one if key in named and (call.family == MODULE or key[:2] not in uneven)
    }
    places = [
        [(key[:2], _shapes(call)) if key[:2] in uneven and call.family != MODULE else key for key, call in side]
        for side in (one, other)
    ]
    between = [(ours[at], theirs[to]) for at, to in align(*places)]
    partners |= {call.key: partner for call, partner in between if call.key not in partners}
    taken = {partner.key for partner in partners.values()}
    left = dict(_counted([call for call in theirs if call.key not in taken], naming.theirs))
    rest = _counted([call for call in ours if call.key not in partners], naming.ours)
    return partners | {call.key: left[key] for key, call in rest if key in left}


def match_rows(
    pairs: Iterable[CallPair], target: DumpRows, golden: DumpRows, table: Mapping[str, str]
) -> list[CallPair]:
    """Return `pairs` with single rows moved beside the golden rows that the user's data mapping `table` gives them.

    `table` maps full names of the target's rows to golden ones. A golden row that it gives away is also that of its own
    name, if that is in the target and not in the table.
    """
    homes = {f"{call.key}.{item.place}": (call, item) for call in golden.calls for item in call.items}
    names = (f"{call.key}.{item.place}" for call in target.calls for item in call.items)
    given = frozenset(table[name] for name in names if name in table)
    return [part for pair in pairs for part in _split(pair, homes, given, table)]


def _split(
    pair: CallPair, homes: Mapping[str, tuple[DumpCall, DumpRow]], given: frozenset[str], table: Mapping[str, str]
) -> Iterator[CallPair]:
    """Yield one pair for every golden call that the rows of `pair` belong to, then what is left of its golden call."""
    call, partner = pair.target, pair.golden
    own = {item.place for item in call.items if f"{call.key}.{item.place}" not in table} if call else set()
    free = tuple(
        item
        for item in (partner.items if partner else ())
        if partner and (item.place in own or f"{partner.key}.{item.place}" not in given)
    )
    groups: dict[str, list[DumpRow]] = defaultdict(list)
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


def _fuzzy(
    calls: Iterable[DumpCall], left: Mapping[Any, DumpCall], partners: Mapping[str, DumpCall]
) -> dict[str, DumpCall]:
    queues: dict[Hashable, list[DumpCall]] = defaultdict(list)
    for call in left.values():
        queues[_likeness(call)].append(call)
    found = {}
    for call in calls:
        queue = queues.get(_likeness(call))
        if call.key not in partners and queue:
            found[call.key] = queue.pop(0)
    return found


def _likeness(call: DumpCall) -> Hashable:
    is_module = call.family == MODULE
    path = call.name.rpartition(".")[0] if is_module else call.name.strip("_")
    return is_module, unwrapped(path), unwrapped(call.scope), call.direction
