"""What a difference means: pass, warning or error, and whether the operation is to blame for it.

An operation is blamed (error) if its result differs by more than rounding and the differences of what it was given
explain. What differs but is explained is a warning and says so. A value that is finite on one side alone is always an
error, and blamed where it first appears. Decides nothing about files and tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS, Call, Item
from trainermon.analysis.compare.matching import CallPair
from trainermon.analysis.compare.metrics import Difference, ItemPair
from trainermon.analysis.compare.noise import SAFETY, growth, rounding, roundoff
from trainermon.dump.records import BACKWARD, FORWARD

PASS = "pass"  # noqa: S105
WARNING = "warning"
ERROR = "error"
UNMATCHED = "unmatched"
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


Measure = Callable[[Sequence[ItemPair]], Iterable[Difference]]
"""Returns how far the rows of each pair are apart, in their order."""

_Compared = tuple[Item | None, Item | None, Difference]
_NOTHING = Difference(None)
_kind = attrgetter("dtype", "shape", "requires_grad")


class Row(NamedTuple):
    """One row of the result table; `messages` say why it does not pass."""

    target: Item | None
    golden: Item | None
    difference: Difference
    result: str
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """One call of the target with all its rows.

    `input_error` and `output_error` are the largest relative differences before and after it, `expected` what rounding
    and the inputs' differences explain. `blamed` tells that the difference arose here and not in a call within it.
    """

    target: Call | None
    golden: Call | None
    rows: tuple[Row, ...]
    result: str
    input_error: float = 0.0
    output_error: float = 0.0
    expected: float = 0.0
    blamed: bool = False

    @property
    def key(self) -> str:
        """Name of the call, the target's where there is one."""
        call = self.target or self.golden
        return call.key if call else ""


class _Judged(NamedTuple):
    """What is known of a call before its rows are judged; a row that differs by no more than `floor` passes."""

    input_error: float
    output_error: float
    expected: float
    floor: float
    blamed: bool


class Judge:
    """Judges the calls of one pair of dumps, in the order in which they ran.

    `baseline` gives for a row's name how far two runs of the same side were apart: noise that no model knows. `safety`
    is how many times what the inputs explain still passes; 0 allows for no rounding either: equal inputs must give
    equal bits, and of unequal ones nothing can be expected.
    """

    def __init__(
        self,
        pairs: Iterable[CallPair],
        *,
        parents: Mapping[str, str],
        measure: Measure,
        baseline: Mapping[str, float] | None = None,
        safety: float = SAFETY,
    ) -> None:
        self._pairs = list(pairs)
        self._parents = parents
        self._measure = measure
        self._baseline = baseline or {}
        self._safety = safety
        self._inner = _inner_calls(parents)
        self._errors: dict[tuple[str, int, str], float] = {}
        self._gradients: dict[str, float] = {}
        self._worst_so_far = 0.0
        self._blamed_within: set[str] = set()

    def judge(self) -> list[CallResult]:
        """Return the result of every call."""
        rows = [list(pair.rows()) for pair in self._pairs]
        both = [(ours, theirs) for of_call in rows for ours, theirs in of_call if ours and theirs]
        differences = iter(self._measure(both))
        measured = [
            [(ours, theirs, next(differences) if ours and theirs else _NOTHING) for ours, theirs in of_call]
            for of_call in rows
        ]
        sizes = [_sizes(compared) for compared in measured]
        for pair, size in zip(self._pairs, sizes, strict=True):
            if pair.target and pair.golden:
                self._note(pair.target, *size)
        return [self._call(*one) for one in zip(self._pairs, measured, sizes, strict=True)]

    def _note(self, call: Call, before: float, after: float) -> None:
        place = call.name, call.number, call.direction
        self._errors[place] = _worst(
            self._errors.get(place, 0.0), before if call.direction == BACKWARD else _worst(before, after)
        )
        if call.direction == BACKWARD:
            self._gradients[call.name] = _worst(self._gradients.get(call.name, 0.0), before)

    def _call(self, pair: CallPair, compared: list[_Compared], size: tuple[float, float]) -> CallResult:
        call = pair.target
        if call is None or pair.golden is None:
            rows = tuple(Row(ours, theirs, difference, UNMATCHED) for ours, theirs, difference in compared)
            return CallResult(target=call, golden=pair.golden, rows=rows, result=UNMATCHED)
        before, after = _worst(size[0], self._earlier(call)), size[1]
        expected, floor = self._expected(pair, before, after)
        unexplained = after > expected or (math.isnan(after) and not math.isnan(before))
        judged = _Judged(
            input_error=before,
            output_error=after,
            expected=expected,
            floor=floor,
            blamed=unexplained and call.name not in _UNDEFINED and call.key not in self._blamed_within,
        )
        rows = tuple(self._row((call.key, pair.golden.key), judged, *row) for row in compared)
        self._remember(call, judged)
        return CallResult(
            target=call,
            golden=pair.golden,
            rows=rows,
            result=_most_severe(rows),
            input_error=before,
            output_error=after,
            expected=expected,
            blamed=judged.blamed,
        )

    def _earlier(self, call: Call) -> float:
        """Return the error of what a backward also depends on: the forward of the same call, and what came before it.

        The gradients of parameters are those of the module's outputs and inputs; where its backward was not dumped,
        they take the worst error that any call before them had.
        """
        if call.direction == FORWARD:
            return 0.0
        forward = self._errors.get((call.name, call.number, FORWARD), 0.0)
        if call.direction == BACKWARD:
            return forward
        return _worst(forward, self._gradients.get(call.name, self._worst_so_far))

    def _expected(self, pair: CallPair, before: float, after: float) -> tuple[float, float]:
        """Return what may be expected of a call's results, and of each row whatever its inputs."""
        call, golden = pair.target, pair.golden
        assert call is not None
        assert golden is not None
        if not self._safety:
            return math.inf if before else 0.0, 0.0
        inner = self._inner[call.key]
        floor = SAFETY * rounding(call, inner, max(roundoff(call.items), roundoff(golden.items)))
        if before <= floor and after <= floor:
            return floor, floor  # nothing to explain
        if math.isnan(before):
            return math.inf, floor  # a NaN or Inf on one side can become any number, as in tanh
        return self._safety * growth(call, inner) * before + floor + 2 * self._own_noise(call, golden), floor

    def _own_noise(self, *calls: Call) -> float:
        """Return by how much the results of a call differ between two runs of one side, whichever that is."""
        if not self._baseline:
            return 0.0
        outputs = (f"{call.key}.{item.place}" for call in calls for item in call.items if item.state == OUTPUT)
        return max((self._baseline.get(name, 0.0) for name in outputs), default=0.0)

    def _row(
        self, keys: tuple[str, str], call: _Judged, ours: Item | None, theirs: Item | None, difference: Difference
    ) -> Row:
        if ours is None or theirs is None:
            return Row(ours, theirs, difference, UNMATCHED)
        alike = _kind(ours) == _kind(theirs) and ours.is_tensor
        flaw = "" if alike else _flaw(ours, theirs)
        if flaw:
            return Row(ours, theirs, difference, ERROR, (f"error: {flaw}",))
        relative = difference.relative
        if relative is None or relative <= call.floor:
            return Row(ours, theirs, difference, PASS)
        if self._baseline:
            names = (f"{keys[0]}.{ours.place}", f"{keys[1]}.{theirs.place}")
            if relative <= 2 * max(self._baseline.get(name, 0.0) for name in names):
                return Row(ours, theirs, difference, PASS)
        result, message = _meaning(call, ours, theirs, relative)
        return Row(ours, theirs, difference, result, (f"{result}: {message}",))

    def _remember(self, call: Call, judged: _Judged) -> None:
        self._worst_so_far = _worst(self._worst_so_far, judged.output_error)
        if not judged.blamed:
            return
        parent = self._parents.get(call.key)
        while parent is not None and parent not in self._blamed_within:
            self._blamed_within.add(parent)
            parent = self._parents.get(parent)


def _meaning(call: _Judged, ours: Item, theirs: Item, relative: float) -> tuple[str, str]:
    if math.isnan(relative):
        side = "the target" if ours.nonfinite else "the golden dump"
        both = ours.nonfinite and theirs.nonfinite
        where = "in other numbers" if both else f"in {side} only"
        return (
            ERROR,
            f"NaN or Inf {where}{', as in its inputs' if ours.state == OUTPUT and not call.blamed else ''}.",
        )
    size = f"{relative:.2g}" if math.isfinite(relative) else "bits only"
    if ours.state != OUTPUT:
        what = "the parameter" if ours.state == PARAMETERS else "the input"
        return WARNING, f"{what} differs by {size} before this call."
    if call.blamed:
        inputs = f"inputs by {call.input_error:.2g}" if call.input_error else "inputs do not"
        return ERROR, f"differs by {size}, {inputs}: rounding and they explain {call.expected:.2g}."
    if call.output_error > call.expected:
        return WARNING, f"differs by {size}, because of a call within it."
    inputs = "NaN or Inf on one side" if math.isnan(call.input_error) else f"{call.input_error:.2g}"
    return WARNING, f"differs by {size}, which is explained by its inputs ({inputs})."


def _sizes(compared: Iterable[_Compared]) -> tuple[float, float]:
    """Return the largest difference of what a call was given, and of what it made."""
    before = after = 0.0
    for ours, _, difference in compared:
        if difference.relative and ours:
            if ours.state == OUTPUT:
                after = _worst(after, difference.relative)
            else:
                before = _worst(before, difference.relative)
    return before, after


def _inner_calls(parents: Mapping[str, str]) -> Counter[str]:
    """Return how many calls were dumped within each call, at any depth."""
    counts: Counter[str] = Counter()
    for key in parents:
        above: str | None = parents[key]
        while above is not None:
            counts[above] += 1
            above = parents.get(above)
    return counts


def _flaw(ours: Item, theirs: Item) -> str:
    if dtype_name(ours.dtype) != dtype_name(theirs.dtype):
        return f"dtype {ours.dtype}, but {theirs.dtype} in the golden dump."
    if ours.shape != theirs.shape:
        return f"shape {_shape(ours)}, but {_shape(theirs)} in the golden dump."
    crosses = ours.dtype != theirs.dtype  # MindSpore does not dump requires_grad
    if ours.requires_grad != theirs.requires_grad and not crosses:
        return f"requires_grad is {ours.requires_grad}, but {theirs.requires_grad} in the golden dump."
    if not ours.is_tensor and repr(ours.max) != repr(theirs.max):
        return f"argument {ours.max}, but {theirs.max} in the golden dump."
    return ""


def _shape(item: Item) -> str:
    return str(list(item.shape or ()))


def _worst(one: float, other: float) -> float:
    """Return the larger of two errors; NaN is the worst."""
    return one if one > other or math.isnan(one) else other


def _most_severe(rows: Iterable[Row]) -> str:
    found = {row.result for row in rows}
    return next((result for result in (ERROR, WARNING, PASS) if result in found), PASS)
