"""Which plain arguments that differ were written so in the script, and which are only consequences of tensors.

A dump does not tell `x * 1.001` from `x * y.item()`. Where nothing differed before, either is where a difference began.
Where something did, a short number (`1.001`), the root of a whole number (`math.sqrt(head_dim)`) or a word is what
somebody wrote; a length, a choice or another number with all the digits of its type may have been computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from trainermon.analysis.compare.flow import CallFacts, CallFlow, are_plain
from trainermon.analysis.compare.items import DumpCall
from trainermon.analysis.compare.noise import PLAIN
from trainermon.analysis.compare.verdicts import TensorError
from trainermon.dump.files.records import FORWARD

_MAX_DIGITS = 4
"""Significant digits that a number in a script has; a share of a few dozen elements has more."""
_ROOT = (
    1e-15  # relative: what float64 keeps of the square of a root, which a number read off float32 has by chance only
)
_MAX_SQUARE = 1 << 20
DEVICE = re.compile(r"(cpu|cuda|npu|xpu|hpu|mps|meta|ascend|gpu)(:\d+)?", re.IGNORECASE)


class LiteralFinder:
    """Finds the plain arguments with which differences begin, while calls are judged in the order in which they ran.

    Args:
        flow: How the calls nest, and what differs in each.
    """

    def __init__(self, flow: CallFlow) -> None:
        self._flow = flow
        self._any_bits = False
        self._more_than_rounding = False
        self._handed_on: set[tuple[str, str]] = set()
        self._seen: set[tuple[str, ...]] = set()

    def note(self, facts: CallFacts, *, is_sound: bool) -> None:
        """Record that a call has been judged; `is_sound`: it differs by no more than rounding."""
        self._any_bits |= bool(facts.given or facts.made or facts.is_mispaired)
        self._more_than_rounding |= not is_sound

    def literals(self, call: DumpCall, facts: CallFacts, floor: float) -> list[TensorError]:
        """Return what the script gave `call` otherwise than on the other side, and what differs beyond `floor` by it.

        Not what a call around it was given alike, where the difference began.
        """
        if call.direction != FORWARD or facts.is_mispaired or facts.after <= floor:
            return []
        plain = [error for error in facts.given if are_plain(*error[:2])]
        written = [
            error for error in plain if _values(error) in self._handed_on or self._is_written(call, error, floor)
        ]
        outer = {_values(error) for error in self._given_around(call)}
        self._handed_on.update(outer.intersection(map(_values, written)))
        return [error for error in written if _values(error) not in outer]

    def is_first(self, call: DumpCall, error: TensorError) -> bool:
        """Return whether no call of that name had these values before: a line may run once for every layer."""
        literal = call.name, error.item.place, *_values(error)
        is_first = literal not in self._seen
        self._seen.add(literal)
        return is_first

    def _given_around(self, call: DumpCall) -> Iterator[TensorError]:
        for key in self._flow.above(call.key):
            if key in self._flow.facts:
                yield from (error for error in self._flow.facts[key].given if are_plain(*error[:2]))

    def _is_written(self, call: DumpCall, error: TensorError, floor: float) -> bool:
        """Return whether it cannot be a consequence of tensors; names of devices are, of where a run is."""
        values = error.item.max, error.golden.max
        if any(isinstance(value, str) for value in values):
            return is_written(*values)
        around = self._flow.around[call.key]
        given = [*self._flow.facts[call.key].given, *(self._flow.facts[around].given if around is not None else ())]
        sizes = [each.size for each in given if each.item.is_tensor]
        if error.item.dtype == error.golden.dtype == PLAIN:
            return not (self._any_bits or sizes) or is_written(*values)
        return not self._more_than_rounding and all(size <= floor for size in sizes)


def is_written(*values: object) -> bool:
    """Return whether no tensor can have made plain values: words that name no device, short numbers, and roots."""
    if any(isinstance(value, str) for value in values):
        return not any(isinstance(value, str) and DEVICE.fullmatch(value) for value in values)
    return all(_is_short(value) or _is_root(value) for value in values)


def _values(error: TensorError) -> tuple[str, str]:
    return repr(error.item.max), repr(error.golden.max)


def _is_short(value: object) -> bool:
    """Return whether a number has as few digits as one that somebody writes."""
    return isinstance(value, float) and math.isfinite(value) and float(f"{value:.{_MAX_DIGITS}g}") == value


def _is_root(value: object) -> bool:
    """Return whether a number is the root of a whole number, or 1 over it, as scripts scale by a width."""
    if not isinstance(value, float) or not value or not math.isfinite(value) or math.isinf(1 / value):
        return False
    squares = (size * size for size in (value, 1 / value))
    return any(1 <= square <= _MAX_SQUARE and math.isclose(square, round(square), rel_tol=_ROOT) for square in squares)
