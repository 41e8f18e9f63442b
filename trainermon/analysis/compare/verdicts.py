"""What a difference means: pass, warning or error, and why.

What differs but is explained is a warning and says so. A value that is finite on one side alone is always an error.
Who is to blame is found in `judge`; this says what that means for each row. Decides nothing about files and tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from trainermon.analysis.compare.frameworks import dtype_name
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS, DumpCall, DumpRow
from trainermon.analysis.compare.metrics import DumpRowDifference, ItemPair, differ_below_normal
from trainermon.analysis.compare.noise import PLAIN, is_coarse, is_limit
from trainermon.dump.files.records import BUFFERS

PASS = "pass"  # noqa: S105
WARNING = "warning"
ERROR = "error"
UNMATCHED = "unmatched"
NOT_COMPARED = "not compared"
Measure = Callable[[Sequence[ItemPair]], Iterable[DumpRowDifference]]
"""Returns how far the rows of each pair are apart, in their order."""

TypePairs = frozenset[tuple[str | None, str | None]]
"""Pairs of types: the target's, and that of the golden dump."""

Compared = tuple[DumpRow | None, DumpRow | None, DumpRowDifference]
_kind = attrgetter("dtype", "shape", "requires_grad")


class ResultRow(NamedTuple):
    """One row of the result table: a tensor or argument of a call, on both sides.

    Attributes:
        target: The target's; None: only the golden dump has it.
        golden: The golden one; None: only the target has it.
        difference: How far they are apart.
        result: `pass`, `warning`, `error`, `unmatched` or `not compared`
        messages: Why it does not pass.
    """

    target: DumpRow | None
    golden: DumpRow | None
    difference: DumpRowDifference
    result: str
    messages: tuple[str, ...] = ()


class TensorError(NamedTuple):
    """How far one tensor of a call is from the golden dump's.

    Attributes:
        item: The target's row.
        golden: The golden row.
        size: The difference relative to the tensor's size; NaN: one side alone is not finite.
        norm: The larger norm of both, of their elements; 0 where these were not read.
    """

    item: DumpRow
    golden: DumpRow
    size: float
    norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of comparing one call: its rows, how far they are apart, and whether it is to blame.

    Attributes:
        target: The call in the target; None: only the golden dump has it.
        golden: The call in the golden dump; None: only the target has it.
        rows: What was compared of it.
        result: The worst result of its rows: `pass`, `warning`, `error`, `unmatched` or `not compared`.
        input_error: Largest relative difference of what it was given.
        output_error: Largest relative difference of its results.
        expected: What rounding and the inputs' differences explain.
        blamed: Whether the difference arose here, and not in a call within it: in what it was given before it ran, if
            `origin` is set; in what it gave to a call within it, if `given_to` is set; else in its results.
        origin: The place (a parameter, an input that no call made) where the difference began; "".
        given_to: Key of the call within it that it gave something wrong; "".
    """

    target: DumpCall | None
    golden: DumpCall | None
    rows: tuple[ResultRow, ...]
    result: str
    input_error: float = 0.0
    output_error: float = 0.0
    expected: float = 0.0
    blamed: bool = False
    origin: str = ""
    given_to: str = ""

    @property
    def key(self) -> str:
        """Key of the call in the target; in the golden dump where the target has none."""
        call = self.target or self.golden
        return call.key if call else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCall:
    """What is known of a call before its rows are judged.

    Attributes:
        input_error: Largest relative difference of its inputs.
        output_error: Largest relative difference of its results.
        expected: What rounding and the inputs' differences explain.
        floor: A row of a call that is to blame passes up to this relative difference.
        tolerance: A row of any other call passes up to this.
        is_unexplained: Whether the results differ by more than is expected.
        blamed: Whether the difference arose here.
        encloses_blame: Whether it arose in a call within this one.
        given_to: Key of the call within, to which it gave something wrong; "".
        origins: Places that differ before the call and where the difference began.
        apart: Places that hold something else on either side and so are not compared, each with why.
        chance: Places of memory that the call fills: what stood in it before says nothing.
        conditions: Places whose sum cancels, each with how many times the tolerance its rounding may be.
    """

    input_error: float = 0.0
    output_error: float = 0.0
    expected: float = 0.0
    floor: float = 0.0
    tolerance: float = 0.0
    is_unexplained: bool = False
    blamed: bool = False
    encloses_blame: bool = False
    given_to: str = ""
    origins: tuple[str, ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    chance: frozenset[str] = frozenset()
    conditions: Mapping[str, float] = field(default_factory=dict)


def row_of(
    call: JudgedCall, noise: float, row: Compared, types: TypePairs = frozenset(), *, is_forward: bool = False
) -> ResultRow:
    """Judge one row of `call`: compare its difference with what is allowed, and return the row with its result.

    `noise` is by how much it differs between two runs of one side; `types` are those that the runs as a whole have on
    either side, and are no error of a row. A tensor that a forward took or gave on one side alone, a mask that another
    kernel does without, is none either if the results agree or their inputs explain them.
    """
    ours, theirs, difference = row
    if ours is None or theirs is None:
        return ResultRow(ours, theirs, difference, UNMATCHED)
    alike = _kind(ours) == _kind(theirs) and ours.is_tensor
    flaw = "" if alike else _flaw(ours, theirs, types)
    if flaw:
        is_harmless = is_forward and not (call.blamed or call.is_unexplained or call.encloses_blame)
        result = UNMATCHED if is_harmless and is_lone_tensor(ours, theirs) else ERROR
        return ResultRow(ours, theirs, difference, result, (f"{result}: {flaw}",))
    relative = difference.relative
    is_strict = ours.place in call.origins or (call.blamed and ours.state == OUTPUT)
    limit = (call.floor if is_strict else call.tolerance) * call.conditions.get(ours.place, 1.0)
    passes = relative is not None and (relative <= limit or relative <= 2 * noise or ours.place in call.chance)
    why = f"{difference.unread}." if difference.unread else _unseen(ours, theirs)
    if relative is None or (passes and (why or _is_hidden(ours, theirs, difference))):
        why = why or _untold(ours, theirs, relative)
        return ResultRow(ours, theirs, difference, NOT_COMPARED, (f"not compared: {why}",))
    if passes:
        return ResultRow(ours, theirs, difference, PASS)
    if ours.place in call.apart:
        return ResultRow(ours, theirs, difference, UNMATCHED, (f"unmatched: {call.apart[ours.place]}",))
    result, message = _meaning(call, ours, theirs, relative)
    return ResultRow(ours, theirs, difference, result, (f"{result}: {message}",))


def word_of(row: DumpRow) -> str:
    """Return what a row that is no result is called in sentences."""
    return {PARAMETERS: "the parameter", BUFFERS: "the buffer"}.get(row.state, "the input")


def is_lone_tensor(ours: DumpRow, theirs: DumpRow) -> bool:
    """Return whether a place has a tensor on one side, and None on the other."""
    return ours.is_tensor != theirs.is_tensor and None in (ours.dtype, theirs.dtype)


def all_compared(rows: Mapping[str, int]) -> bool:
    """Return whether there were rows, and all were compared, by their numbers of each result."""
    return any(rows.values()) and not rows.get(UNMATCHED) and not rows.get(NOT_COMPARED)


def differs(rows: Mapping[str, int]) -> bool:
    """Return whether a row is more than rounding apart, by their numbers of each result."""
    return bool(rows[ERROR] or rows[WARNING])


def most_severe(rows: Iterable[ResultRow]) -> str:
    """Return the worst of the rows' results: what was not compared is worse than what passes."""
    found = {row.result for row in rows}
    return next((result for result in (ERROR, WARNING, NOT_COMPARED) if result in found), PASS)


def worst(one: float, other: float) -> float:
    """Return the larger of two relative differences; NaN counts as the largest."""
    return one if one > other or math.isnan(one) else other


def _meaning(call: JudgedCall, ours: DumpRow, theirs: DumpRow, relative: float) -> tuple[str, str]:
    if math.isnan(relative):
        side = "the target" if ours.nonfinite else "the golden dump"
        both = ours.nonfinite and theirs.nonfinite
        where = "in other numbers" if both else f"in {side} only"
        return (
            ERROR,
            f"NaN or Inf {where}{', as in its inputs' if ours.state == OUTPUT and not call.blamed else ''}.",
        )
    size = f"{relative:.2g} of its size" if math.isfinite(relative) else "bits only"
    if ours.state != OUTPUT:
        what = word_of(ours)
        if ours.place in call.origins:
            return ERROR, f"{what} differs by {size} before this call, and no call before it made that."
        return WARNING, f"{what} differs by {size} before this call."
    return _of_result(call, size)


def _of_result(call: JudgedCall, size: str) -> tuple[str, str]:
    if call.given_to and call.blamed:
        by = f", by {call.output_error:.2g}" if math.isfinite(call.output_error) else ""
        return ERROR, f"differs by {size}: so does what it gave to {call.given_to}{by}."
    if call.blamed and call.is_unexplained:
        inputs = f"inputs by {call.input_error:.2g}" if call.input_error else "inputs do not"
        return ERROR, f"differs by {size}, {inputs}: rounding and they explain {call.expected:.2g}."
    if call.is_unexplained or call.encloses_blame:
        return WARNING, f"differs by {size}, because of a call within it."
    inputs = "NaN or Inf on one side" if math.isnan(call.input_error) else f"{call.input_error:.2g}"
    return WARNING, f"differs by {size}, which is explained by its inputs ({inputs})."


def _flaw(ours: DumpRow, theirs: DumpRow, types: TypePairs) -> str:
    names = dtype_name(ours.dtype), dtype_name(theirs.dtype)
    if is_lone_tensor(ours, theirs):
        return f"{_named(ours)}, but {_named(theirs)} in the golden dump."
    if names[0] != names[1] and names not in types:
        return f"dtype {ours.dtype}, but {theirs.dtype} in the golden dump."
    if ours.shape != theirs.shape:
        return f"shape {_shape(ours)}, but {_shape(theirs)} in the golden dump."
    crosses = ours.dtype != theirs.dtype  # MindSpore does not dump requires_grad
    if ours.state != PARAMETERS and (ours.merged or theirs.merged):
        crosses = True  # another split has other autograd functions
    if ours.requires_grad != theirs.requires_grad and not crosses:
        return f"requires_grad is {ours.requires_grad}, but {theirs.requires_grad} in the golden dump."
    if not ours.is_tensor and repr(ours.max) != repr(theirs.max) and not _are_limits(ours.max, theirs.max):
        return f"argument {ours.max}, but {theirs.max} in the golden dump."
    return ""


def _unseen(ours: DumpRow, theirs: DumpRow) -> str:
    """Return why a gradient may have been changed after it was seen; "" if it was not."""
    sides = [side for row, side in ((ours, "the target"), (theirs, "the golden dump")) if row.is_hooked]
    return (
        f"a hook registered since the dump began may have changed it in {' and '.join(sides)}: begin the dump after it."
        if sides
        else ""
    )


def _is_hidden(ours: DumpRow, theirs: DumpRow, difference: DumpRowDifference) -> bool:
    """Return whether statistics of a coarse type, or below normal numbers, differ: by rounding, or by other values."""
    if any(number is not None for number in difference.columns):  # by elements
        return False
    return is_coarse(ours, theirs) if difference.relative else differ_below_normal(ours, theirs)


def _untold(ours: DumpRow, theirs: DumpRow, relative: float | None) -> str:
    """Return why two rows tell nothing of one another."""
    if relative == 0:
        return "the statistics differ below the least normal number, as flushing to zero does, and other values, too."
    if relative is not None:
        return (
            f"the statistics of {dtype_name(ours.dtype)} differ by {relative:.2g}, as they do by rounding, and by "
            "other values, too: dump the tensors."
        )
    if ours.checksum and theirs.checksum:
        return f"{ours.checksum[0]} here, {theirs.checksum[0]} in the golden dump: different checksums."
    sides = [side for row, side in ((ours, "the target"), (theirs, "the golden dump")) if not row.has_values]
    return f"no statistics of {dtype_name(ours.dtype)} in {' and '.join(sides) or 'common'}."


def _are_limits(ours: object, theirs: object) -> bool:
    """Return whether two plain numbers are the largest of their types, as what masks are made of."""
    numbers = [value for value in (ours, theirs) if isinstance(value, float)]
    return len(numbers) == 2 and all(is_limit(value, PLAIN) for value in numbers)  # two sides


def _named(item: DumpRow) -> str:
    return f"a tensor of {item.dtype}" if item.is_tensor else "nothing"


def _shape(item: DumpRow) -> str:
    return str(list(item.shape or ()))
