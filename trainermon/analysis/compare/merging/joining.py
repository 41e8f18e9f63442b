"""Modules that do what others do, by the user's word: one what another does, or several what one does.

Decides which calls belong together, by the names in a mapping file or what was matched by hand. Of several, as q, k and
v beside a fused one, one call is made; what becomes of their rows is decided in `merge_items.py`, by the other side's
shapes, as with ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, PARAMETERS, DumpCall, DumpRow, DumpRows
from trainermon.analysis.compare.mappings import JoinRule
from trainermon.analysis.compare.merging.merge_items import MergeCounts, MergedRow, ReferenceRow, Sources, merge_row
from trainermon.dump.files.records import BACKWARD, PARAMETERS_GRAD

_Place = tuple[tuple[str, ...], str, int]
"""What the wildcards stand for, the direction, and the number of the call."""


class JoinedSides(NamedTuple):
    """Two dumps after joining.

    Attributes:
        target: The target.
        golden: The golden dump.
        members: By the key of a joined call, the keys of the calls that it was made of; of both sides.
        matched: By the key of a call of the target that stands for one other, the key of that golden call.
        notes: What was joined or matched, and rules that fit nothing.
    """

    target: DumpRows
    golden: DumpRows
    members: Mapping[str, tuple[str, ...]]
    matched: Mapping[str, str]
    notes: tuple[str, ...]


def join_sides(target: DumpRows, golden: DumpRows, rules: Sequence[JoinRule]) -> JoinedSides:
    """Return both dumps with the calls that `rules` name together as one call each, and which of them are partners.

    A joined call has the name of its counterpart, so that it is matched by it, and stands where the last of its members
    stood. Calls of functions within the modules are joined likewise, where all have the same ones in the same order.
    Where one module stands for one other, so do the modules within them that have the same path from there on. Of
    several rules for a module the first counts.
    """
    sides = _JoinedSide(target), _JoinedSide(golden)
    matched: dict[str, DumpCall] = {}
    notes = []
    for rule in rules:
        if rule.is_single:
            pairs = dict(_match(rule, *sides))
            matched |= pairs
            count, done = len(pairs), "matched"
        else:
            count, done = sum(1 for _ in _join(rule, *sides)), "joined"
        notes.append(f"{rule}: {count:,} calls were {done}" if count else f"{rule}: no call of both sides is named so")
    matched |= _within(matched, *sides)
    members = {key: found for side in sides for key, found in side.members.items()}
    partners = {key: partner.key for key, partner in matched.items()}
    return JoinedSides(sides[0].rows(), sides[1].rows(), members, partners, tuple(notes))


def _match(rule: JoinRule, target: _JoinedSide, golden: _JoinedSide) -> Iterator[tuple[str, DumpCall]]:
    """Yield the target's calls that `rule` names, by their keys, each with the one that it stands for."""
    ours, theirs = target.named(rule.target), golden.named(rule.golden)
    for place in [place for place in ours if place in theirs]:
        (call,), (partner,) = ours[place], theirs[place]
        target.taken.add(call.key)
        golden.taken.add(partner.key)
        yield call.key, partner


def _within(
    matched: Mapping[str, DumpCall], target: _JoinedSide, golden: _JoinedSide
) -> Iterator[tuple[str, DumpCall]]:
    """Yield calls of modules within those that were `matched`, each with the one at the same path from there on."""
    homes = {target.calls[key].path: partner.path for key, partner in matched.items()}
    theirs = {(call.path, call.direction, call.number): call for call in golden.free_modules()}
    for call in target.free_modules() if homes else ():
        above, _, rest = call.path.rpartition(".")
        while above and above not in homes:
            above, _, part = above.rpartition(".")
            rest = f"{part}.{rest}"
        partner = theirs.get((f"{homes[above]}.{rest}", call.direction, call.number)) if above else None
        if partner is not None:
            yield call.key, partner


def _join(rule: JoinRule, target: _JoinedSide, golden: _JoinedSide) -> Iterator[str]:
    """Join what `rule` names on both sides; yield the keys of the calls that came of it."""
    ours, theirs = target.named(rule.target), golden.named(rule.golden)
    order = rule.keeps_order
    for place in [place for place in ours if place in theirs]:
        several, others = ours[place], theirs[place]
        if len(others) == 1 and len(several) > 1:
            yield target.join(several, others[0], keeps_order=order, inner_like=golden).key
        elif len(several) == 1 and len(others) > 1:
            yield golden.join(others, several[0], keeps_order=order, inner_like=target).key
        else:
            joined = golden.join(others, None, keeps_order=order)
            yield target.join(several, joined, keeps_order=order).key


class _JoinedSide:
    """The calls of one side, of which several become one.

    Attributes:
        calls: By their keys: those of the dump, and those that were joined of them.
        taken: Keys of the calls that a rule has joined or matched.
        members: By the key of a joined call, the keys of the calls that it was made of.
    """

    def __init__(self, rows: DumpRows) -> None:
        self._rows = rows
        self._sources: Sources = dict(rows.sources)
        self._counts = MergeCounts()
        self.calls = {call.key: call for call in rows.calls}
        self.taken: set[str] = set()
        self._places = {key: place for place, key in enumerate(self.calls)}
        self._joined_into: dict[str, str] = {}
        self.members: dict[str, tuple[str, ...]] = {}
        self._within: defaultdict[str, list[str]] = defaultdict(list)
        for call in rows.calls:
            if call.family != MODULE and call.key in rows.parents:
                self._within[rows.parents[call.key]].append(call.key)

    def rows(self) -> DumpRows:
        """Return the dump as it is now."""
        if not self.members:
            return self._rows
        stands_for = {max(keys, key=self._places.__getitem__): key for key, keys in self.members.items()}
        keys = [stands_for.get(key, key) for key in self._places if key in stands_for or key not in self._joined_into]
        into = self._joined_into
        parents = {into.get(key, key): into.get(parent, parent) for key, parent in self._rows.parents.items()}
        stacks = {key: self._rows.stacks[keys[0]] for key, keys in self.members.items() if keys[0] in self._rows.stacks}
        return self._rows._replace(
            calls=tuple(self.calls[key] for key in keys),
            parents=parents,
            stacks={**self._rows.stacks, **stacks},
            sources=self._sources or self._rows.sources,
        )

    def free_modules(self) -> Iterator[DumpCall]:
        """Yield the calls of modules that no rule has taken."""
        return (call for call in self._rows.calls if call.family == MODULE and call.key not in self.taken)

    def named(self, patterns: Sequence[str]) -> dict[_Place, list[DumpCall]]:
        """Return the calls of modules that all of `patterns` name, by what they have in common."""
        tests = [pattern.split("*") for pattern in patterns]
        found: defaultdict[_Place, dict[int, DumpCall]] = defaultdict(dict)
        for call in self.free_modules():
            for number, test in enumerate(tests):
                texts = texts_between(test, call.path)
                if texts is not None:
                    found[texts, call.direction, call.number].setdefault(number, call)
        whole = {place: calls for place, calls in found.items() if len(calls) == len(tests)}
        return {place: [calls[number] for number in range(len(tests))] for place, calls in whole.items()}

    def join(
        self,
        calls: Sequence[DumpCall],
        other: DumpCall | None,
        *,
        keeps_order: bool,
        inner_like: _JoinedSide | None = None,
    ) -> DumpCall:
        """Put one call in the place of `calls`, with the name of `other`, its counterpart, and return it.

        Tensors whose elements come in another order are left to their statistics. The calls of functions within are
        joined too if `inner_like`, the side of a counterpart that is one call as it is, has the same ones there.
        """
        joined = self._joined(calls, _key(calls), other, keeps_order=keeps_order)
        self._replace(calls, joined)
        if inner_like is None or other is None:
            return joined
        inner = [self._within[call.key] for call in calls]
        counterparts = inner_like._within[other.key]
        names = inner_like._names(counterparts)
        if all(self._names(keys) == names for keys in inner):
            for keys, counterpart in zip(zip(*inner, strict=True), counterparts, strict=True):
                parts = [self.calls[key] for key in keys]
                partner = inner_like.calls[counterpart]
                self._replace(parts, self._joined(parts, " + ".join(keys), partner, keeps_order=keeps_order))
        return joined

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self.calls[key].name for key in keys]

    def _replace(self, calls: Sequence[DumpCall], joined: DumpCall) -> None:
        self.calls[joined.key] = joined
        self.members[joined.key] = tuple(call.key for call in calls)
        self._joined_into.update(dict.fromkeys(self.members[joined.key], joined.key))
        self.taken.update(self.members[joined.key])

    def _joined(self, calls: Sequence[DumpCall], key: str, other: DumpCall | None, *, keeps_order: bool) -> DumpCall:
        theirs = {item.place: item for item in other.items} if other is not None else {}
        rows = [{item.place: item for item in call.items} for call in calls]
        for item in (item for call in calls for item in call.items if item.data_name):
            path = self._rows.tensor_path(item)
            if path is not None:
                self._sources.setdefault(str(item.data_name), path)
        items = []
        for item in calls[0].items:
            reference = theirs.get(item.place)
            row = MergedRow(
                name=f"{key}.{item.place}",
                items=[row[item.place] for row in rows if item.place in row],
                axis="part",
                reference=ReferenceRow(shape=reference.shape, item=reference) if reference is not None else None,
                split=_usual_split(calls[0], item) if reference is None else None,
                sums=None,
                is_function=calls[0].family != MODULE,
            )
            merged = merge_row(row, self._sources, self._counts)
            if merged is not None:
                items.append(merged if keeps_order or merged is item else merged._replace(data_name=None))
        return calls[0]._replace(key=key, name=calls[0].name if other is None else other.name, items=tuple(items))


def _usual_split(call: DumpCall, item: DumpRow) -> tuple[int, int] | None:
    """Return how tensors of modules beside each other are joined where no shape tells: at the last dimension."""
    if item.state == PARAMETERS or call.direction == PARAMETERS_GRAD:
        return 0, 1
    is_result = item.state == (INPUT if call.direction == BACKWARD else OUTPUT)
    return (len(item.shape or ()) - 1, 1) if is_result and item.shape else None


def _key(calls: Sequence[DumpCall]) -> str:
    """Return a key for joined calls of modules.

    Of `Module.h.0.q.Linear.forward.0` and `Module.h.0.k.Linear.forward.0` it is `Module.h.0.{q,k}.Linear.forward.0`.
    """
    paths = [call.path.split(".") for call in calls]
    common = next((at for at, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)
    names = ",".join(".".join(path[common:]) for path in paths)
    head = "".join(f"{part}." for part in paths[0][:common])
    first = calls[0].key
    before, _, after = first.partition(".".join(paths[0]))
    return f"{before}{head}{{{names}}}{after}"


def texts_between(parts: Sequence[str], name: str) -> tuple[str, ...] | None:
    """Return what stands in `name` between `parts`, which it consists of otherwise; None: it does not.

    The earlier a text, the longer it is, as those of a regular expression `a(.*)b(.*)c`; which can take hours, however.

    >>> texts_between(["layers.", ".", ""], "layers.3.mlp.fc"), texts_between(["a", "b"], "ac")
    (('3.mlp', 'fc'), None)
    """
    first, *others = parts
    if not others:
        return () if name == first else None
    *inner, last = others
    begin, end = len(first), len(name) - len(last)
    if begin > end or not name.startswith(first) or not name.endswith(last):
        return None
    found = []
    for part in reversed(inner):
        place = name.rfind(part, begin, end)
        if place < 0:
            return None
        found.append(name[place + len(part) : end])
        end = place
    return (name[begin:end], *reversed(found))
