"""`advisor_*.txt`, as msprobe has it: which rows to look at first, and what to do about each.

Decides nothing about what is wrong: suspects are what the verdicts blame. Advice goes by the place of the row in its
call, and by the class of the operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from trainermon.analysis.compare.answer.arguments import given_literal
from trainermon.analysis.compare.answer.descriptions import literal_of
from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import OUTPUT, PARAMETERS
from trainermon.analysis.compare.verdicts import ERROR, PASS, WARNING, CallResult, ResultRow
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD

MAX_SUSPECTS = 8
_HEADER_LINES = 1


class SuspectRow(NamedTuple):
    """A row of the result table that is worth looking at.

    Attributes:
        line: Its line in the csv file.
        name: Its name.
        advice: Sentences on what to do.
    """

    line: int
    name: str
    advice: tuple[str, ...]


class _OperationClass(NamedTuple):
    """A class of operations: a pattern of their names, in small letters without underscores, and what is special."""

    pattern: str
    advice: str


_BY_PLACE = {
    (FORWARD, "input"): "What went in differs already. Compare the batches and the seeds of both runs; if it came from "
    "another call, that one was not recorded: dump at level mix, and without a list.",
    (
        FORWARD,
        PARAMETERS,
    ): "The parameters differ before the call. Compare the checkpoints and the seeds that both runs "
    "begin with, and the optimizer's step before this one.",
    (
        FORWARD,
        OUTPUT,
    ): "Equal inputs gave unequal results: the difference arose in this call. Compare its arguments and "
    "the versions of the libraries behind it, and run it alone on both devices with the dumped inputs (task tensor).",
    (BACKWARD, "input"): "The gradient that came back differs already. Look at the loss, at its scaling, and at what "
    "follows this call in the forward; a call between that was not recorded may have changed it.",
    (BACKWARD, OUTPUT): "An equal gradient came in and an unequal one went out: the difference arose in this backward. "
    "Compare the forward of the same call first; if that agrees, its backward kernel is to be looked at.",
    (PARAMETERS_GRAD, OUTPUT): "The gradient of a parameter differs though its module's forward agrees. Compare the "
    "backward of the module, how often it is called in a step, and hooks on the parameter.",
}

_CLASSES = (
    _OperationClass(
        r"(allreduce|allgather|reducescatter|alltoall|broadcast|gather|reduce|i?send|i?recv).*",
        "A collective: compare the same call on the other ranks, which shows whose part differs. Sums over ranks "
        "depend on their order and on the type that is sent; HCCL_DETERMINISTIC and NCCL_ALGO fix the order.",
    ),
    _OperationClass(
        r".*batchnorm.*",
        "Batch normalisation: besides the input it depends on the running mean and variance, and on whether the module "
        "trains. Compare both buffers, momentum and eps, and the batch that each rank saw.",
    ),
    _OperationClass(
        r".*dropout.*|bernoulli|multinomial|rand.*|normal|uniform",
        "It draws random numbers: call seed_all in both runs, with rm_dropout=True between two kinds of device, or "
        "find the first draw that differs by random_save.",
    ),
    _OperationClass(
        r".*attention.*|.*sdpa.*",
        "Fused attention: which kernel runs depends on device, type and shape. Choose one on both sides by "
        "torch.nn.attention.sdpa_kernel, and compare mask, scale and dropout.",
    ),
    _OperationClass(
        r"conv.*d|.*matmul|.*linear|b?mm|addmm|baddbmm|einsum|nllloss|crossentropy.*|.*(layer|rms|group)norm|lstm.*|gru.*|"
        r"embedding.*|index(add|put).*|scatter.*|cumsum|interpolate|upsample.*",
        "Its sums are taken in an order that the kernel chooses: run both sides with seed_all(mode=True), and in "
        "float32 or with TF32 off; what is left then is no matter of order.",
    ),
    _OperationClass(
        r"(log)?softmax|exp|expm1|log|log1p|gelu|silu|(log)?sigmoid|tanh|erf|pow|r?sqrt|div|truediv|rtruediv|reciprocal",
        "An elementary function: near its edges (large arguments, zero, cancellation) devices and types differ most. "
        "Look at the extremes of its input by `trainermon tensor show`, and repeat the call in float64.",
    ),
)

_LITERAL = (
    "Compare that line on both sides, and the settings that it reads: no tensor that differed before explains another "
    "argument."
)
_GAVE = (
    "The code around this call gave it something else, though it had been given the same itself. Compare that code on "
    "both sides, and the settings that it passes on (an epsilon, a mode, a scale)."
)
_NONFINITE = (
    "A value is NaN or Inf on one side only. `trainermon diagnose` on that side's dump names the call that made it, "
    "and with dumped tensors says whether range, precision or a kernel is the cause."
)
_NOTHING = (
    "No row differs by more than rounding. If the runs part all the same, dump a later step, tensors instead of "
    "statistics, or what was left out by scope and list."
)


def suspects(comparison: Comparison) -> tuple[SuspectRow, ...]:
    """Return the rows to look at, in the order in which they ran: those of blamed calls, else the first bad one."""
    chosen = comparison.blamed[:MAX_SUSPECTS] or tuple(_first_different(comparison))
    return tuple(suspect for call in chosen for suspect in (_suspect(comparison, call) or _given(comparison, call)))


def advisor_text(comparison: Comparison) -> str:
    """Return the text of advisor_*.txt: msprobe's words, each suspect row, then the calls that only one side has."""
    found = suspects(comparison)
    if not found:
        return f"Line: None\nSuspect Nodes: None\nExpert Advice: {_NOTHING}\n"
    blocks = [
        f"Line: {suspect.line}\nSuspect Nodes: {suspect.name}\nExpert Advice: {' '.join(suspect.advice)}\n"
        for suspect in found
    ]
    more = len(comparison.blamed) - MAX_SUSPECTS
    return "\n".join([*blocks, *([f"and {more} more calls to blame, in the table\n"] if more > 0 else [])])


def _first_different(comparison: Comparison) -> Iterator[CallResult]:
    found = next((call for call in comparison.calls if call.result in (ERROR, WARNING)), None)
    if found is not None:
        yield found


def _suspect(comparison: Comparison, call: CallResult) -> list[SuspectRow]:
    """Return the worst row of a call, [] if all pass."""
    before = 0
    for one in comparison.calls:
        if one is call:
            break
        before += len(one.rows)
    failing = [index for index, row in enumerate(call.rows) if row.result != PASS and row.target]
    worst = next((index for index in failing if call.rows[index].result == ERROR), None)
    index = worst if worst is not None else next(iter(failing), None)
    if index is None:
        return []
    literal = literal_of(call)
    index = index if literal is None else call.rows.index(literal)
    row = call.rows[index]
    assert row.target is not None
    line = before + index + 1 + _HEADER_LINES
    advice = _advice(call, row) if literal is None else _of_literal(comparison, call, literal)
    return [SuspectRow(line, f"{call.key}.{row.target.place}", tuple(advice))]


def _of_literal(comparison: Comparison, call: CallResult, row: ResultRow) -> Iterator[str]:
    yield f"This call {given_literal(comparison, call, row)}."
    yield _LITERAL


def _given(comparison: Comparison, call: CallResult) -> list[SuspectRow]:
    """Return the worst row of the call to which this one gave something else, [] if there is none."""
    inner = next((one for one in comparison.calls if one.key == call.given_to), None)
    found = _suspect(comparison, inner) if inner is not None else []
    return [suspect._replace(advice=(_GAVE,)) for suspect in found]


def _advice(call: CallResult, row: ResultRow) -> Iterator[str]:
    assert row.target is not None
    direction = call.target.direction if call.target else FORWARD
    state = row.target.state if row.target.state in (PARAMETERS, OUTPUT) else "input"
    relative = row.difference.relative
    if relative is not None and math.isnan(relative):
        yield _NONFINITE
    else:
        yield _BY_PLACE.get((direction, state), _BY_PLACE[FORWARD, OUTPUT])
    module, class_name, _, _ = split_key(call.key)
    words = class_name if call.key.startswith("Module.") else module
    name = words.replace("_", "").lower()
    special = next((one.advice for one in _CLASSES if re.fullmatch(one.pattern, name)), None)
    if special is not None and state == OUTPUT:
        yield special
