"""What a call that is to blame did, in a few words: by how much its results differ, or with what it differs."""

from __future__ import annotations

import math

from trainermon.analysis.compare.answer.arguments import both_values, given_literal, unlike_input
from trainermon.analysis.compare.answer.settings import argument_of_script, setting_of
from trainermon.analysis.compare.answer.structure import is_replaced
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.verdicts import CallResult, ResultRow, word_of


def described(comparison: Comparison, call: CallResult) -> str:
    """Return a few words on how much the results of a call are apart, and how much its inputs were."""
    if (row := literal_of(call)) is not None:
        return given_literal(comparison, call, row)
    if call.origin:
        return _came_in(call)
    if is_replaced(comparison, call):
        return f"stands where the golden dump has {call.golden.key if call.golden else 'none'}"
    return _gave(comparison, call) if call.given_to else f"{_made(call)}{_set_so(comparison, call)}"


def _made(call: CallResult) -> str:
    if math.isnan(call.output_error):
        return "a value is NaN or Inf on one side only"
    if not math.isfinite(call.output_error):
        return "its results differ in their bits, its inputs do not"
    return f"its results differ by {call.output_error:.2g} of their size, its inputs {_by(call.input_error)}"


def _by(error: float) -> str:
    """Return by how much something differs, as it follows on `differs` or what differs."""
    if math.isnan(error):
        return "in NaN or Inf"
    if not math.isfinite(error):
        return "in their bits"
    return f"by {error:.2g}" if error else "not at all"


def _set_so(comparison: Comparison, call: CallResult) -> str:
    """Return which setting of a call that is to blame for its results differs, behind a sentence on these."""
    setting = setting_of(comparison, call, may_be_made=not call.input_error)
    return f"; it {setting.words}" if setting is not None else ""


def _gave(comparison: Comparison, call: CallResult) -> str:
    inner = next((each for each in comparison.calls if each.key == call.given_to), None)
    argument = argument_of_script(inner, may_be_made=not call.input_error) if inner is not None else None
    if inner is not None and argument is not None:
        return f"it gave {inner.key} {both_values(argument)}"
    given = f"its own inputs {_by(call.input_error)}"
    if math.isfinite(call.output_error):
        return f"what it gave to {call.given_to} differs by {call.output_error:.2g} of its size, {given}"
    if math.isnan(call.output_error):
        return f"what it gave to {call.given_to} is NaN or Inf on one side only"
    own = f"its own inputs differ {_by(call.input_error)}" if call.input_error else "its own inputs do not differ"
    return f"what it gave to {call.given_to} is not the same{unlike_input(inner)}; {own}"


def literal_of(call: CallResult) -> ResultRow | None:
    """Return the row of the plain argument (a number, a text) with which a difference began; None if it did not."""
    row = next((row for row in call.rows if call.origin and row.target and row.target.place == call.origin), None)
    return row if row is not None and row.target is not None and not row.target.is_tensor else None


def _came_in(call: CallResult) -> str:
    row = next(row for row in call.rows if row.target and row.target.place == call.origin)
    what = word_of(row.target) if row.target else "the input"
    size = row.difference.relative
    if size is not None and math.isnan(size):
        return f"{what} is NaN or Inf on one side only before that call, and no call before it made that"
    by = "" if size is None or math.isinf(size) else f" by {size:.2g} of its size"
    return f"{what} differs{by} before that call, and no call before it made that"
