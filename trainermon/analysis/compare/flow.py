"""What is known of all calls before any is judged: how they nest, which values they share, and how far each is apart.

A value is one tensor wherever it stands: as the result of a call, of the module around it, as the input of the next.
It is known by its statistics, which views share, and which dumps of every kind have.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, DumpCall, DumpRow, Value, value_of
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.noise import (
    TensorSize,
    cast_roundoff,
    condition,
    overwrites,
    roundoff,
    roundoff_of,
    size_of,
    sums_up,
)
from trainermon.analysis.compare.shared_gradients import SharedGradients, above
from trainermon.analysis.compare.verdicts import Compared, TensorError, worst
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD

_PLAIN_TYPES = frozenset([None, *(f"<class '{name}'>" for name in ("int", "float", "bool", "str"))])


def are_plain(ours: DumpRow, theirs: DumpRow) -> bool:
    """Return whether both are a number, a truth value, a text or None, and not both None."""
    if ours.is_tensor or theirs.is_tensor or ours.dtype is theirs.dtype is None:
        return False
    return ours.dtype in _PLAIN_TYPES and theirs.dtype in _PLAIN_TYPES


def is_comparable(ours: DumpRow, theirs: DumpRow) -> bool:
    """Return whether two rows can differ by a size: plain arguments can.

    Tensors can if they have one shape, and both are floating or both not.
    """
    if are_plain(ours, theirs):
        return True
    if ours.shape != theirs.shape:
        return False
    return ours.dtype == theirs.dtype or (not roundoff((ours,))) == (not roundoff((theirs,)))


@dataclass(slots=True)
class CallFacts:
    """What is known of one call that both dumps have, before it is judged.

    Attributes:
        given: Differences of its inputs and parameters.
        made: Differences of its results.
        before: The largest relative difference in `given`.
        after: The largest relative difference in `made`.
        unit: The coarsest unit roundoff (half the distance from 1 to the next number) among its tensors.
        is_mispaired: A tensor has another shape on the other side.
    """

    given: list[TensorError] = field(default_factory=list)
    made: list[TensorError] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    unit: float = 0.0
    is_mispaired: bool = False


class CallFlow:
    """How tensors and their differences flow through the calls of two dumps that are compared.

    Calls are named by the target's keys.

    Attributes:
        facts: Of every call that both sides made.
        inner: How many calls of its direction were compared within each call, at any depth.
        unit: The coarsest unit roundoff (half the distance from 1 to the next number) within each call.
        carried: The coarsest of what each call was given came through: a cast is not dumped. Only where it is coarser.
        around: The innermost compared call around each call; None at the top.
    """

    def __init__(
        self, pairs: Sequence[CallPair], compared: Sequence[list[Compared]], parents: Mapping[str, str]
    ) -> None:
        self.facts: dict[str, CallFacts] = {}
        self.inner: Counter[str] = Counter()
        self.unit: dict[str, float] = {}
        self.carried: dict[str, float] = {}
        self.around: dict[str, str | None] = {}
        self._parents = parents
        self._forward: dict[tuple[str, int], float] = {}
        self._gradients: dict[str, float] = {}
        self._reshaped: set[str] = set()
        self._made: dict[str, int] = {}
        self._given: defaultdict[tuple[str, str], TensorSize] = defaultdict(TensorSize)
        self._worst_forward = 0.0
        self._dtypes: set[str | None] = set()
        self._shared = SharedGradients(parents)
        both = [(pair, rows) for pair, rows in zip(pairs, compared, strict=True) if pair.target and pair.golden]
        for pair, rows in both:
            assert pair.target
            self.facts[pair.target.key] = self._facts(pair.target, rows)
        for pair, _ in both:
            assert pair.target
            self._nest(pair.target)
        if len({unit for dtype in self._dtypes if (unit := roundoff_of(dtype))}) > 1:
            self._carry(both)

    def forward_error(self, call: DumpCall) -> float:
        """Return the largest relative difference in the forward of the backward `call`, and in all calls within it.

        Infinite if its forward took other shapes on either side, or was not dumped and any did.
        """
        if _operation(call) in self._reshaped or (self._reshaped and call.name not in self._made):
            return math.inf
        return self._forward.get((call.name, call.number), 0.0)

    def forward_of(self, key: str | None) -> float:
        """Return the largest relative difference in the forward of the backward `key`.

        For None, the largest of all forwards.
        """
        if key is None:
            return self._worst_forward
        name, family, _, number = split_key(key)
        return self._forward.get((f"{name}.{family}", number), 0.0)

    def gradient_error(self, call: DumpCall) -> float:
        """Return the relative difference of the gradients that the module of the parameter's entry `call` was given.

        If the dump has none of them, the largest of all forwards.
        """
        return self._gradients.get(call.name, self._worst_forward)

    def spread(self, call: DumpCall) -> float:
        """Return how many terms each element of a parameter's gradient sums up, by the size of the module's output."""
        smallest = min((item.num_elements for item in call.items if item.is_tensor), default=1)
        return self._made.get(call.name, 1) / max(1, smallest)

    def condition(self, call: DumpCall, error: TensorError) -> float:
        """Return by what factor, at least 1, cancellation in a gradient's sum magnifies its relative error."""
        place = _operation(call)
        given = self._given[BACKWARD, place]
        if not given.norm or not sums_up(call, error.item, given):
            return 1.0
        norm = error.norm or max(size_of(error.item).norm, size_of(error.golden).norm)
        return condition(error.item, norm, given, self._given[FORWARD, place])

    def given_error(self, key: str) -> float:
        """Return the relative difference of what the backward `key` was given.

        For a parameter's gradient, its module's inputs.
        """
        name, family, direction, _ = split_key(key)
        before = self.facts[key].before
        if direction != PARAMETERS_GRAD:
            return before
        return worst(before, self._gradients.get(f"{name}.{family}", self._worst_forward))

    def own_error(self, key: str) -> float:
        """Return the relative difference of what only the backward `key` makes.

        That is results of its own, and the gradients of its parameters.
        """
        made = [error for error in self.facts[key].made if self._shared.consumers(error.item) == [key]]
        gradients = self.facts.get(f"{key.rpartition(f'.{BACKWARD}.')[0]}.{PARAMETERS_GRAD}.0")
        return max((error.size for error in [*made, *(gradients.made if gradients else ())]), default=0.0)

    def hands_on(self, item: DumpRow, key: str) -> bool:
        """Return whether the backward of another module was given the gradient `item` and returned it unchanged.

        One that is nested with `key` does not count.
        """
        handed = self._shared.handed(item)
        return any(each != key and not self.is_within(each, key) and not self.is_within(key, each) for each in handed)

    def is_within(self, key: str, other: str) -> bool:
        """Return whether the call `key` runs inside the call `other`, at any depth."""
        return other in self.above(key)

    def consumers(self, item: DumpRow) -> Sequence[str]:
        """Return the keys of the backward calls whose results add up to the gradient `item`."""
        return self._shared.consumers(item)

    def uses(self, item: DumpRow) -> Sequence[str]:
        """Return the keys of the parameters' entries that have the gradient `item`: a tied weight has several."""
        return self._shared.uses(item)

    def awaits(self, item: DumpRow, key: str, judged: Set[str]) -> bool:
        """Return whether a backward that is not among those `judged` adds to a gradient: so it was not given it.

        One that is nested with `key` does not count.
        """
        return any(
            each not in judged and not self.is_within(each, key) and not self.is_within(key, each)
            for each in self.consumers(item)
        )

    def num_terms(self, key: str, error: TensorError) -> tuple[int, int]:
        """Return of how many backward calls a result of `key` is the sum: (in the target, in the golden dump)."""
        return self._shared.num_terms(key, error)

    def is_others(self, key: str, error: TensorError) -> bool:
        """Return whether a gradient that `key` adds to is changed by another module that adds to it, and not by it."""
        changers = self._shared.changers(error)
        return bool(changers) and not any(key == each or self.is_within(key, each) for each in changers)

    def are_unlike(self, error: TensorError) -> bool:
        """Return whether unlike numbers of backward calls have a gradient among their results, on both sides some."""
        return self._shared.are_unlike(error)

    def in_order(self, keys: Sequence[str | None]) -> list[int]:
        """Return the positions of the calls `keys` in an order in which each comes after those within it.

        Backwards may be written before theirs. Gradients of parameters come last, as they depend on all backwards of
        their module.
        """
        last, behind = self._behind_makers({key: position for position, key in enumerate(keys) if key is not None})
        for position, key in enumerate(keys):
            position = last.get(key, position) if key is not None else position
            for around in self.above(key) if key is not None else ():
                if last.get(around, position) < position:
                    last[around] = position
        inner = [self.inner[key] if key is not None else 0 for key in keys]
        ends = [last[key] if key is not None else at for at, key in enumerate(keys)]
        late = [key is not None and f".{PARAMETERS_GRAD}." in key for key in keys]
        waits = [behind.get(key, 0) for key in keys]
        return sorted(range(len(keys)), key=lambda at: (late[at], ends[at], inner[at], waits[at]))

    def _behind_makers(self, places: Mapping[str, int]) -> tuple[dict[str, int], Counter[str | None]]:
        """Return the positions `places` of calls, and behind how many others at the same position each of them comes.

        Backwards are moved to where what they were given was made: that call is written once all gradients that it
        makes are known, so what takes one of these may be written before it.
        """
        found, behind = dict(places), Counter[str | None]()
        for key, position in places.items():
            for error in self.facts[key].given if f".{BACKWARD}" in key else ():
                for maker in self.consumers(error.item):
                    if found.get(maker, -1) > position and not self.is_within(maker, key):
                        found[key] = max(found[key], found[maker])
                        behind[key] = max(behind[key], behind[maker] + 1)
        return found, behind

    def above(self, key: str) -> Iterator[str]:
        """Yield the keys of the calls around the call `key`, innermost first."""
        return above(key, self._parents)

    def _facts(self, call: DumpCall, rows: list[Compared]) -> CallFacts:
        facts = CallFacts()
        is_gradient = call.direction != FORWARD
        passed = {value_of(item) for item in call.items if item.state != OUTPUT} if is_gradient else set()
        their_given = [theirs for _, theirs, _ in rows if theirs and theirs.state != OUTPUT] if is_gradient else []
        their_passed = {value_of(item) for item in their_given}
        for ours, theirs, difference in rows:
            if ours is None or theirs is None:
                continue
            if ours.shape != theirs.shape and ours.is_tensor and theirs.is_tensor:
                facts.is_mispaired = True
            if is_gradient:
                self._share(call, ours, theirs, is_handed=(value_of(ours) in passed, value_of(theirs) in their_passed))
            self._dtypes.add(ours.dtype)
            self._dtypes.add(theirs.dtype)
            size = difference.relative
            if not size or not is_comparable(ours, theirs) or overwrites(call, ours.place):
                continue
            if ours.state == OUTPUT and not (is_gradient and value_of(ours) in passed):
                facts.made.append(TensorError(ours, theirs, size, difference.norm))
                facts.after = worst(facts.after, size)
            elif ours.state != OUTPUT:
                facts.given.append(TensorError(ours, theirs, size, difference.norm))
                facts.before = worst(facts.before, size)
        if facts.given and facts.made:
            facts.made = [error for error in facts.made if not _is_handed_on(error, facts.given)]
        return facts

    def _share(self, call: DumpCall, ours: DumpRow, theirs: DumpRow, *, is_handed: tuple[bool, bool]) -> None:
        """Register a row of a backward, or of gradients of parameters, that both sides have."""
        if call.direction == PARAMETERS_GRAD:
            self._shared.add_use(call.key, ours)
        elif ours.state == INPUT:
            self._shared.add_taken(ours, theirs)
        elif ours.state == OUTPUT:
            self._shared.add(call.key, ours, is_handed=is_handed[0])
            self._shared.add_theirs(call.key, theirs, is_handed=is_handed[1])

    def _nest(self, call: DumpCall) -> None:
        facts = self.facts[call.key]
        unit = roundoff(call.items)
        if call.direction != PARAMETERS_GRAD:
            given = [size_of(item) for item in call.items if item.state == INPUT]
            so_far, more = self._given[call.direction, _operation(call)], max(given, default=TensorSize())
            together = TensorSize(math.hypot(so_far.norm, more.norm), so_far.number + more.number)
            self._given[call.direction, _operation(call)] = together
        error = 0.0 if facts.is_mispaired else worst(facts.before, facts.after)
        is_forward = call.direction == FORWARD
        if is_forward and facts.is_mispaired:
            self._reshaped.add(_operation(call))
        if is_forward:
            self._note_forward(call.name, call.number, error)
            self._worst_forward = worst(self._worst_forward, error)
            sizes = [item.num_elements for item in call.items if item.state == OUTPUT and item.is_tensor]
            self._made[call.name] = max([self._made.get(call.name, 0), *sizes])
        elif call.direction == BACKWARD:
            self._gradients[call.name] = worst(self._gradients.get(call.name, 0.0), facts.before)
        self.unit[call.key] = max(self.unit.get(call.key, 0.0), unit)
        around = None
        for key in self.above(call.key):
            around = around or (key if key in self.facts else None)
            self.inner[key] += call.direction != PARAMETERS_GRAD
            self.unit[key] = max(self.unit.get(key, 0.0), unit)
            if is_forward and error:
                self._note_within(key, error)
        self.around[call.key] = around

    def _carry(self, both: Sequence[tuple[CallPair, list[Compared]]]) -> None:
        """Note by what unit roundoff each call's values may be off because of the types that they came through."""
        of_value: dict[Value | None, float] = {}
        of_operation: dict[str, float] = {}
        backwards = [one for one in both if one[0].target and one[0].target.direction != FORWARD]
        for pair, rows in (*both, *backwards):  # a backward may be written before those that made what it was given
            call, golden = pair.target, pair.golden
            assert call
            assert golden
            unit = max(self.unit[call.key], roundoff(golden.items), self.carried.get(call.key, 0.0))
            unit = max([unit, *self._carried_in(call, rows, of_value)])
            place = _operation(call)
            unit = max(unit, of_operation.get(place, 0.0)) if call.direction != FORWARD else unit
            of_operation[place] = max(unit, of_operation.get(place, 0.0))
            for extrema in (_extrema(item) for item in call.items if item.state == OUTPUT):
                if extrema is not None:
                    of_value[extrema] = max(unit, of_value.get(extrema, 0.0))
            for key in (call.key, *self.above(call.key)):
                self.carried[key] = max(unit, self.carried.get(key, 0.0))

    def _carried_in(
        self, call: DumpCall, rows: Sequence[Compared], of_value: Mapping[Value | None, float]
    ) -> Iterator[float]:
        """Yield the unit roundoffs by which what a call was given may be off, and the gradients that it adds to."""
        had = self.carried.get(self.around[call.key] or "", 0.0)
        for ours, theirs, _ in rows:
            if ours is None or theirs is None or not roundoff_of(ours.dtype):
                continue
            if ours.state == OUTPUT and call.direction != BACKWARD:
                continue
            unit = of_value.get(_extrema(ours))
            if unit is None and ours.state == INPUT:  # it came of what the call around had by then, or was cast before
                unit = max(had, cast_roundoff(ours, theirs))
            yield unit or 0.0

    def _note_within(self, key: str, error: float) -> None:
        name, family, _, number = split_key(key)
        self._note_forward(f"{name}.{family}", number, error)

    def _note_forward(self, name: str, number: int, error: float) -> None:
        place = name, number
        self._forward[place] = worst(self._forward.get(place, 0.0), error)


def _extrema(item: DumpRow) -> Value | None:
    """Return what a cast to a finer type leaves as it is; the norm's last digit may change. None where ambiguous."""
    value = value_of(item)
    return value[:2] if value is not None and item.max is not None else None


def _is_handed_on(made: TensorError, given: Sequence[TensorError]) -> bool:
    """Return whether a result is what the call was given, as dropout returns it in evaluation, on both sides.

    The same elements in another order have the same statistics, but not the same difference.
    """
    size = made.size
    return any(
        (each.size == size or math.isclose(each.size, size, rel_tol=1e-6))
        and value_of(each.item) == value_of(made.item) is not None
        and value_of(each.golden) == value_of(made.golden)
        for each in given
    )


def _operation(call: DumpCall) -> str:
    """Return what a forward, its backward and the gradients of its parameters share: the module, or the call."""
    return call.name if call.family == MODULE else f"{call.name}.{call.number}"
