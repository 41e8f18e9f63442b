"""Who is to blame for a difference: the call in which it arose, or what came in from outside.

Every value of the target is followed from where it was made. A call is to blame if its results differ by more than
rounding and the differences of what it was given, and of what the calls within it made, explain; or if it gave a call
within it something that these do not explain. A parameter that differs, and an input that no call made, are themselves
where a difference began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from trainermon.analysis.compare.causes.literals import LiteralFinder
from trainermon.analysis.compare.causes.premises import has_nan_backward, has_other_input, other_weights
from trainermon.analysis.compare.flow import CallFacts, CallFlow
from trainermon.analysis.compare.items import INPUT, MODULE, OUTPUT, PARAMETERS, DumpCall, DumpRow, Value, value_of
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.merging.buffers import fills
from trainermon.analysis.compare.metrics import DumpRowDifference
from trainermon.analysis.compare.noise import (
    MAX_ROUNDING,
    SAFETY,
    cancelled,
    cast_roundoff,
    flips,
    gap_growth,
    growth,
    is_trivial,
    least_rounding,
    makes_weight_gradient,
    rounding,
    roundoff,
    takes_weight,
)
from trainermon.analysis.compare.verdicts import (
    ERROR,
    PASS,
    UNMATCHED,
    CallResult,
    Compared,
    JudgedCall,
    Measure,
    ResultRow,
    TensorError,
    TypePairs,
    most_severe,
    row_of,
    worst,
)
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, BUFFERS, FORWARD, PARAMETERS_GRAD

_NOTHING = DumpRowDifference(None)
# What these return is not yet written, or only a view: msprobe leaves them out as well.
_UNDEFINED = frozenset(
    [
        "empty",
        "empty_like",
        "numpy",
        "to",
        "__setitem__",
        "empty_with_format",
        "new_empty",
        "new_empty_strided",
        "empty_strided",
    ]
)
_HIDDEN = 2.0
"""How many times the error that statistics showed of a value earlier on is expected where they show less of it."""


class JudgedDumps(NamedTuple):
    """What is known of two dumps besides their calls.

    Attributes:
        parents: Key of the enclosing call, by the call's key.
        is_same: Whether a call gives those within it the same tensor on both sides.
        types: Those in which the two runs compute as a whole, where they differ.
        find_nan: Returns the key of the call in which the target's first value that is not finite arose; "": none.
    """

    parents: Mapping[str, str]
    is_same: bool = True
    types: TypePairs = frozenset()
    find_nan: Callable[[], str] = str


@dataclass(slots=True)
class SeenErrors:
    """The largest relative differences seen so far, while calls are judged in the order in which they ran.

    Attributes:
        known: Of each value, wherever it stood.
        available: Of what a call had for those within it, by the call's key; None is what is not within any.
        hiding: Of what was made within a call, by its key and 0, or at a place outside all calls.
        given: Of what a module's backward was given, as far as statistics may hide it.
        weights: The values of weights with which a difference came in.
    """

    known: dict[Value, float] = field(default_factory=dict)
    available: dict[str | None, float] = field(default_factory=dict)
    hiding: dict[tuple[str, int], float] = field(default_factory=dict)
    given: dict[str, float] = field(default_factory=dict)
    weights: set[Value] = field(default_factory=set)

    def add_available(self, key: str | None, error: float) -> None:
        """Record the relative difference `error` of a tensor that the call `key` can pass to those within it."""
        self.available[key] = worst(self.available.get(key, 0.0), error)

    def of_available(self, key: str | None) -> float:
        """Return the largest relative difference of what the call `key` can pass to those within it.

        0 if none was seen.
        """
        return self.available.get(key, 0.0)


class CallJudge:
    """Decides for each call of two dumps whether it passes, only passes a difference on, or made it.

    Args:
        pairs: The calls, in the order in which they ran.
        dumps: What is known of the two dumps besides their calls.
        measure: Returns how far the two tensors of each row are apart.
        baseline: By a row's name, how far two runs of the same side were apart: noise that no model knows.
        safety: How many times what rounding and the inputs explain still passes; 0 allows for no rounding either: equal
            inputs must give equal bits, and of unequal ones nothing can be expected.
    """

    def __init__(
        self,
        pairs: Iterable[CallPair],
        *,
        dumps: JudgedDumps,
        measure: Measure,
        baseline: Mapping[str, float] | None = None,
        safety: float = SAFETY,
    ) -> None:
        self._pairs = list(pairs)
        self._baseline = baseline or {}
        self._safety = safety
        self._sees_gaps = dumps.is_same
        self._types = dumps.types
        self._compared = _measured(self._pairs, measure)
        self._flow = CallFlow(self._pairs, self._compared, dumps.parents)
        self._finder = LiteralFinder(self._flow)
        self._seen = SeenErrors()
        self._is_elsewhere = bool(safety) and has_other_input(self._pairs, self._flow, self._floor)
        self._other_weights = (
            other_weights(self._pairs, self._flow, self._weight_limit) if safety >= SAFETY else frozenset()
        )
        self._nan = dumps.find_nan() if has_nan_backward(self._flow) else ""
        self._gaps: dict[str, tuple[str, float]] = {}
        self._blamed_within: set[str] = set()
        self._judged_keys: set[str] = set()

    def judge(self) -> list[CallResult]:
        """Return the result of every call (its rows, its errors, whether it is to blame), in the order of the pairs."""
        keys = [pair.target.key if pair.target and pair.golden else None for pair in self._pairs]
        found = {at: self._call(self._pairs[at], self._compared[at]) for at in self._flow.in_order(keys)}
        return [found[at] for at in range(len(self._pairs))]

    def _call(self, pair: CallPair, compared: list[Compared]) -> CallResult:
        call, golden = pair.target, pair.golden
        if call is None or golden is None:
            rows = tuple(ResultRow(ours, theirs, difference, UNMATCHED) for ours, theirs, difference in compared)
            return CallResult(target=call, golden=golden, rows=rows, result=UNMATCHED)
        facts = self._flow.facts[call.key]
        self._judged_keys.add(call.key)
        if not (facts.given or facts.made or facts.is_mispaired):
            judged = self._equal(call)
        elif self._is_rounded(call, facts):
            judged = self._rounded(call, facts)
        else:
            judged = self._judged(call, golden, facts)
        if chance := frozenset(item.place for item in call.items if fills(call, item.place)):
            judged = replace(judged, chance=chance)
        row_of_call = partial(row_of, judged, types=self._types, is_forward=call.direction == FORWARD)
        rows = tuple(row_of_call(self._noise(call, golden, *row[:2]), row) for row in compared)
        result = ERROR if judged.blamed else most_severe(rows)
        self._finder.note(facts, is_sound=result == PASS)
        return CallResult(
            target=call,
            golden=golden,
            rows=rows,
            result=result,
            input_error=judged.input_error,
            output_error=judged.output_error,
            expected=judged.expected,
            blamed=judged.blamed,
            origin=judged.origins[0] if judged.origins else "",
            given_to=judged.given_to,
        )

    def _equal(self, call: DumpCall) -> JudgedCall:
        """Return what is known of a call of which nothing differs, though it may have given something else within."""
        given_to, size = self._gaps.get(call.key, ("", 0.0))
        if not given_to:
            return JudgedCall()
        return self._blame(
            call, JudgedCall(output_error=size, given_to=given_to, blamed=call.key not in self._blamed_within)
        )

    def _is_rounded(self, call: DumpCall, facts: CallFacts) -> bool:
        """Return whether there is nothing to judge: most calls of two sound runs differ by less than any may."""
        least = least_rounding(self._flow.unit[call.key])
        is_small = facts.before <= least and facts.after <= least and not facts.is_mispaired
        return is_small and bool(self._safety) and call.key not in self._gaps and call.key not in self._blamed_within

    def _rounded(self, call: DumpCall, facts: CallFacts) -> JudgedCall:
        around = self._flow.around[call.key]
        self._seen.add_available(around, facts.after)
        least = least_rounding(self._flow.unit[call.key])
        return JudgedCall(
            input_error=facts.before, output_error=facts.after, expected=least, floor=least, tolerance=least
        )

    def _judged(self, call: DumpCall, golden: DumpCall, facts: CallFacts) -> JudgedCall:
        floor = self._floor(call, golden)
        tolerance = self._tolerance(call, golden)
        origins = self._origins(call, golden, facts, floor)
        if facts.is_mispaired:
            self._scatter(call, facts)
            return self._blame(
                call, JudgedCall(input_error=facts.before, tolerance=tolerance, origins=origins, blamed=bool(origins))
            )
        apart = self._apart(call, facts)
        made = [error for error in facts.made if error.item.place not in apart]
        before = worst(worst(facts.before, self._earlier(call, made)), self._seen.of_available(call.key))
        if call.direction == BACKWARD and not any(item.is_tensor for item in call.items if item.state == INPUT):
            before = worst(before, self._around(call))  # it was given a gradient, which was not dumped
        expected = self._expected(call, golden, before, floor)
        unexplained = call.name not in _UNDEFINED and any(
            self._is_unexplained(call, error, before, expected) for error in made
        )
        given_to, gap = self._gaps.get(call.key, ("", 0.0))
        is_whole = call.key not in self._blamed_within
        judged = JudgedCall(
            input_error=facts.before if given_to and not unexplained else before,
            output_error=gap if given_to and not unexplained else facts.after,
            expected=expected,
            floor=floor,
            tolerance=tolerance,
            is_unexplained=unexplained,
            blamed=bool(origins) or (is_whole and (unexplained or bool(given_to))),
            encloses_blame=not is_whole,
            given_to=given_to if is_whole and not unexplained else "",
            origins=origins,
            apart=apart,
            conditions={} if call.direction == FORWARD else self._conditions(call, made),
        )
        self._remember(call, made)
        return self._blame(call, judged)

    def _floor(self, call: DumpCall, golden: DumpCall) -> float:
        """Return by how much a row may differ whatever was given."""
        if not self._safety:
            return 0.0
        unit = max(self._flow.unit[call.key], roundoff(golden.items))
        return rounding(call, self._flow.inner[call.key], unit)

    def _tolerance(self, call: DumpCall, golden: DumpCall) -> float:
        """Return by how much a row may differ that nobody is blamed for, and still is rounding: several operations'."""
        if not self._safety:
            return 0.0
        unit = max(roundoff(call.items), roundoff(golden.items), self._flow.carried.get(call.key, 0.0))
        return min(SAFETY * rounding(call, self._flow.inner[call.key], unit), MAX_ROUNDING)

    def _earlier(self, call: DumpCall, made: list[TensorError]) -> float:
        """Return the error of what a backward also depends on: its forward, and what else makes the same gradient."""
        if call.direction == FORWARD:
            return 0.0
        error = self._flow.forward_error(call)
        if call.direction == PARAMETERS_GRAD:
            error = worst(error, self._flow.gradient_error(call))
        sharing = self._flow.uses if call.direction == PARAMETERS_GRAD else self._flow.consumers
        for key in {key for each in made for key in sharing(each.item)} - {call.key, *self._flow.above(call.key)}:
            error = worst(error, self._flow.given_error(key))
            if not self._flow.is_within(key, call.key):
                error = worst(error, self._flow.own_error(key))
        return error

    def _expected(self, call: DumpCall, golden: DumpCall, before: float, floor: float) -> float:
        if not self._safety:
            return math.inf if before else 0.0
        if not before:
            return floor + 2 * self._own_noise(call, golden)
        is_hidden = self._safety >= SAFETY and (self._is_elsewhere or self._takes_other_weight(call))
        if is_hidden or not math.isfinite(before):
            return math.inf  # a NaN or Inf on one side can become any number, as in tanh; and so can another index
        inner = self._flow.inner[call.key]
        slope = growth(call, inner)
        if call.direction == PARAMETERS_GRAD or (call.direction == BACKWARD and "norm" in call.name):
            slope = max(slope, math.sqrt(self._flow.spread(call)))
        seen = self._safety * slope * before
        if self._safety >= SAFETY:  # statistics hide a part
            seen = max(seen, _HIDDEN * slope * self._hidden(call))
        kinks = self._flips(call) if call.direction == BACKWARD else 0.0
        if call.direction != FORWARD:
            kinks += cancelled(call, max(self._flow.unit[call.key], roundoff(golden.items)), self._flow.spread(call))
        return seen + kinks + floor + 2 * self._own_noise(call, golden)

    def _takes_other_weight(self, call: DumpCall) -> bool:
        """Return whether a call was given a parameter that differs by more than rounding."""
        given = self._flow.facts[call.key].given if self._other_weights else ()
        return any(value_of(error.item) in self._other_weights for error in given)

    def _flips(self, call: DumpCall) -> float:
        return flips(call, self._flow.inner[call.key], self._flow.forward_error(call))

    def _hidden(self, call: DumpCall) -> float:
        """Return the largest error that was seen of what the call was given, wherever it stood before.

        Where code that was not dumped made it, of all that this code had.
        """
        if call.direction == PARAMETERS_GRAD:  # of what the module's backward was given
            return self._seen.given.get(call.name, 0.0)
        had = max((self._seen.hiding.get((key, 0), 0.0) for key in self._flow.above(call.key)), default=0.0)
        had = max(had, self._seen.hiding.get(self._outermost(call), 0.0))
        given = (value_of(item) for item in call.items if item.state == INPUT)
        return max((self._seen.known.get(value, had) for value in given if value is not None), default=0.0)

    def _is_unexplained(self, call: DumpCall, error: TensorError, before: float, expected: float) -> bool:
        if not math.isfinite(error.size):
            return self._is_first(call, error, before)
        if error.size <= expected or error.size <= expected * self._flow.condition(call, error):
            return False
        value = value_of(error.item)
        if call.direction == FORWARD and value is not None and value in self._seen.known:
            return False
        others = self._flow.consumers(error.item) if call.direction == BACKWARD else ()
        is_others = bool(others) and self._flow.is_others(call.key, error)
        if is_others or any(call.key in self._flow.above(key) for key in others):
            return False  # a call within this one is judged for it: a backward may be complete before those within it
        around = {call.key, *self._flow.above(call.key)}
        return not (is_trivial(call) and any(key not in around for key in others))

    def _is_first(self, call: DumpCall, error: TensorError, before: float) -> bool:
        """Return whether a NaN or Inf of one side, another index, or bits of which no more is known began in a call."""
        if math.isnan(error.size):  # other indices and masks, as well as NaN, may put a NaN or Inf elsewhere
            return call.key == self._nan if self._nan else math.isfinite(before)
        return not before and not (self._safety >= SAFETY and self._around(call))  # statistics hide other indices

    def _apart(self, call: DumpCall, facts: CallFacts) -> dict[str, str]:
        """Return, by place, why a gradient is not the same thing on both sides: they are sums over other calls."""
        found = {}
        for error in facts.made if call.direction == BACKWARD and call.key != self._nan else ():
            ours, theirs = self._flow.num_terms(call.key, error)
            if ours and theirs and ours != theirs:
                found[error.item.place] = (
                    f"a gradient that {ours} results share here, and {theirs} in the golden dump: sums of other terms."
                )
        return found

    def _conditions(self, call: DumpCall, made: list[TensorError]) -> dict[str, float]:
        """Return, by place, how much cancellation magnifies the rounding of a gradient's sum, where it does."""
        conditions = {error.item.place: self._flow.condition(call, error) for error in made}
        return {place: condition for place, condition in conditions.items() if condition > 1}

    def _origins(self, call: DumpCall, golden: DumpCall, facts: CallFacts, floor: float) -> tuple[str, ...]:
        """Return the places of what differs before the call without a call that made it, and note gaps around it.

        Plain arguments come first.
        """
        literals = self._literals(call, golden, facts, floor)
        found = [error.item.place for error in literals if self._finder.is_first(call, error)]
        around = self._flow.around[call.key]
        for error in facts.given:
            if error in literals or error.item.dtype is None or error.golden.dtype is None:
                continue
            if math.isnan(error.size) and self._nan:
                found += [error.item.place] if call.key == self._nan else []
                continue
            value = value_of(error.item)
            known = self._seen.weights if error.item.state == PARAMETERS else self._seen.known  # a view is no maker
            if value in known or error.size <= self._limit(call, golden, error, floor):
                continue
            is_weight = error.item.state == PARAMETERS or (around is None and takes_weight(call, error.item.place))
            if not is_weight and self._is_made(call, error, floor):
                continue
            if value is not None:
                self._seen.known[value] = error.size
            if value is not None and is_weight:
                self._seen.weights.add(value)
            is_own = is_weight or error.item.state == BUFFERS
            if is_own or (around is None and (error.item.requires_grad or call.direction == BACKWARD)):
                found.append(error.item.place)
            elif around is not None and around not in self._gaps and self._sees_gaps:
                self._gaps[around] = call.key, error.size
            self._seen.add_available(around, error.size)
        return tuple(found)

    def _literals(self, call: DumpCall, golden: DumpCall, facts: CallFacts, floor: float) -> list[TensorError]:
        """Return the plain arguments with which a difference begins.

        Not those of a module that makes this one call: it is named for its settings.
        """
        around = self._flow.around[call.key]
        is_setting = around is not None and self._flow.inner[around] == 1
        return [
            error
            for error in self._finder.literals(call, facts, floor)
            if not (is_setting and not self._is_made(call, error, floor))
            and error.size > self._limit(call, golden, error, floor)
        ]

    def _limit(self, call: DumpCall, golden: DumpCall, error: TensorError, floor: float) -> float:
        floor = self._tolerance(call, golden) if error.item.state == BUFFERS else floor  # statistics of what ran before
        return max(floor, 2 * self._noise(call, golden, error.item, error.golden), cast_roundoff(*error[:2]))

    def _weight_limit(self, call: DumpCall, golden: DumpCall, error: TensorError) -> float:
        return self._limit(call, golden, error, self._floor(call, golden))

    def _is_made(self, call: DumpCall, error: TensorError, floor: float) -> bool:
        """Return whether an input may come of what the call around this one had at that time."""
        if call.direction == BACKWARD:
            is_shared = bool(self._flow.consumers(error.item)) and not self._flow.are_unlike(error)
            if is_shared or self._flow.hands_on(error.item, call.key):
                return True
        had = self._around(call)
        if not math.isfinite(error.size):
            return bool(had) and (math.isnan(had) or not math.isnan(error.size))
        if not math.isfinite(had) or (had and not self._safety):
            return True
        kinks = math.sqrt(had) if call.direction == BACKWARD else 0.0
        return error.size <= self._safety * gap_growth(call.direction) * had + kinks + min(2 * floor, MAX_ROUNDING)

    def _around(self, call: DumpCall) -> float:
        """Return the largest error of what the call around this one had at that time."""
        around = self._flow.around[call.key]
        had = self._seen.of_available(around)
        if around is not None:
            had = worst(had, self._flow.facts[around].before)
        return had if call.direction == FORWARD else worst(had, self._flow.forward_of(around))

    def _scatter(self, call: DumpCall, facts: CallFacts) -> None:
        """Expect anything of what encloses a call that was given other elements on either side, if anything differs."""
        for key in (*self._flow.above(call.key), None):
            had = self._flow.facts[key].before if key in self._flow.facts else self._seen.of_available(key)
            if had or facts.before:
                self._seen.available[key] = math.inf
            if key in self._flow.facts:
                break

    def _remember(self, call: DumpCall, made: list[TensorError]) -> None:
        around, judged = self._flow.around[call.key], self._judged_keys
        for error in made:
            value = value_of(error.item)
            if value is not None:
                carried = self._hidden(call) if self._safety >= SAFETY else 0.0
                if self._safety >= SAFETY and call.direction == BACKWARD:  # each is there or not: few show it
                    carried = worst(carried, self._flips(call) / 2)
                self._seen.known[value] = worst(self._seen.known.get(value, 0.0), worst(error.size, carried))
            is_weights = makes_weight_gradient(call, error.item.place)  # which no other call takes
            if not is_weights and not (call.direction == BACKWARD and self._flow.awaits(error.item, call.key, judged)):
                self._seen.add_available(around, error.size)
            place = self._outermost(call) if around is None else (around, 0)
            self._seen.hiding[place] = worst(self._seen.hiding.get(place, 0.0), error.size)
        if call.direction == BACKWARD:
            self._seen.given[call.name] = worst(self._seen.given.get(call.name, 0.0), self._hidden(call))

    def _outermost(self, call: DumpCall) -> tuple[str, int]:
        """Return the place of what is not within any call; micro steps are told apart by the numbers of modules."""
        top = call.key
        for top in self._flow.above(call.key):  # noqa: B007
            pass
        return call.direction, split_key(top)[3] if top.startswith(MODULE) else 0

    def _blame(self, call: DumpCall, judged: JudgedCall) -> JudgedCall:
        if judged.blamed:
            self._blamed_within.update(self._flow.above(call.key))
        return judged

    def _noise(self, call: DumpCall, golden: DumpCall, ours: DumpRow | None, theirs: DumpRow | None) -> float:
        """Return by how much a row differs between two runs of one side, whichever that is."""
        if not self._baseline or ours is None or theirs is None:
            return 0.0
        names = f"{call.key}.{ours.place}", f"{golden.key}.{theirs.place}"
        return max(self._baseline.get(name, 0.0) for name in names)

    def _own_noise(self, *calls: DumpCall) -> float:
        """Return by how much the results of a call differ between two runs of one side."""
        if not self._baseline:
            return 0.0
        outputs = (f"{call.key}.{item.place}" for call in calls for item in call.items if item.state == OUTPUT)
        return max((self._baseline.get(name, 0.0) for name in outputs), default=0.0)


def _measured(pairs: list[CallPair], measure: Measure) -> list[list[Compared]]:
    rows = [list(pair.rows()) for pair in pairs]
    both = [(ours, theirs) for of_call in rows for ours, theirs in of_call if ours and theirs]
    differences = iter(measure(both))
    return [
        [(ours, theirs, next(differences) if ours and theirs else _NOTHING) for ours, theirs in of_call]
        for of_call in rows
    ]
