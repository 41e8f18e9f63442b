"""What the page shows of a wrong result: how far off its elements are, where, and among what values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import OperationCall, plain
from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Status, family_of_call
from trainermon.accuracy.reference import Reference, unit_roundoff
from trainermon.analysis.check.checking import CallsCheck, CheckedCall
from trainermon.analysis.check.readings import narrow_result, rounded
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import FORWARD, EntryRecord
from trainermon.replay.dumped_calls import DumpedCall, rebuild

MAX_CALLS = 24
"""So many calls are looked into: each costs up to six runs in float64."""
MAX_ELEMENTS = 1 << 26
EDGES = tuple(10 ** (step / 2) for step in range(-6, 7))
"""Limits of the bins of a histogram, in allowances."""
_CELLS = 64
_AROUND = 3


class ResultView(NamedTuple):
    """What the page shows of one result.

    Attributes:
        number: Which of the call's results it is.
        judgement: The verdict on it.
        counts: Elements that are equal, those up to each of `EDGES`, those beyond, and those with no distance.
        heat: The largest error in allowances of each cell of a map of at most 64 by 64, row by row.
        rows: Which rows of the result, seen as a matrix, stand around the worst element.
        columns: Which columns.
        recorded: What was recorded there, row by row.
        golden: What float64 gives there.
        ratios: The errors there, in allowances.
    """

    number: int
    judgement: Judgement
    counts: tuple[int, ...]
    heat: tuple[tuple[float, ...], ...]
    rows: range
    columns: range
    recorded: tuple[tuple[complex | float, ...], ...]
    golden: tuple[tuple[complex | float, ...], ...]
    ratios: tuple[tuple[float, ...], ...]


class CallView(NamedTuple):
    """What the page shows of one call.

    Attributes:
        stack: The lines of the script that made it, innermost first.
        results: Those of its results that did not pass; () if they cannot be shown.
    """

    stack: tuple[str, ...]
    results: tuple[ResultView, ...]


def views_of(check: CallsCheck) -> dict[str, CallView]:
    """Return what is shown of the first wrong calls, by key; nothing of calls that come from no dump."""
    wanted = {call.key: call for call in (check.of(Status.ERROR) + check.of(Status.WARNING))[:MAX_CALLS]}
    directory = Path(check.source)
    try:
        raw = load_raw(directory)
        entries = [entry for entry in parse_dump(directory, raw, {}).entries if entry.key in wanted]
    except DumpError:
        return {}
    found = {}
    for entry in entries:
        results: tuple[ResultView, ...] = ()
        if entry.direction == FORWARD and sum(tensor.count for tensor in entry.outputs) <= MAX_ELEMENTS:
            results = _results_of(directory, raw.data, entry, wanted[entry.key])
        found[entry.key] = CallView(entry.stack, results)
    return found


def _results_of(
    directory: Path, data: dict[str, object], entry: EntryRecord, call: CheckedCall
) -> tuple[ResultView, ...]:
    try:
        dumped = rebuild(directory, data, entry)
        return tuple(_views(dumped, _as_run(dumped, entry), call))
    except Exception:  # noqa: BLE001  # whatever a kernel raises: the page has less then
        return ()


def _as_run(dumped: DumpedCall, entry: EntryRecord) -> OperationCall:
    narrow = narrow_result(dumped)
    return rounded(dumped.call, narrow) if narrow is not None and entry.autocast == str(narrow) else dumped.call


def _views(dumped: DumpedCall, call: OperationCall, checked: CheckedCall) -> Iterator[ResultView]:
    family = family_of_call(dumped.name, call)
    if family in (Family.RANDOM, Family.UNDEFINED, Family.GAUGE):
        return
    reference = Reference(call, family, dumped.name)
    recorded = [plain(leaf) for leaf in pytree.tree_leaves(dumped.result) if isinstance(leaf, Tensor)]
    for number, (given, judgement) in enumerate(zip(recorded, checked.judgements, strict=True)):
        exact = reference.results[number]
        if judgement.status in (Status.ERROR, Status.WARNING) and given.numel() and given.shape == exact.shape:
            yield _view(number, judgement, given, exact, _ratios(given, reference, number, family))


def _ratios(given: Tensor, reference: Reference, number: int, family: Family) -> Tensor:
    """Return the error of each element in allowances; infinite where it has no distance."""
    exact = reference.results[number]
    if not (given.is_floating_point() or given.is_complex()):
        return torch.where(given.to(exact.dtype) == exact, 0.0, math.inf).double()
    golden, wide = exact.to(given.dtype).to(exact.dtype), given.to(exact.dtype)
    same = (wide == golden) | (given.isnan() & golden.isnan())
    if family is Family.EXACT:
        return torch.where(same, 0.0, math.inf).double()
    ratio = (wide - golden).abs() / reference.allowed(number, given.dtype, unit_roundoff(torch.float32))
    return torch.where(same, 0.0, torch.where(ratio.isnan(), math.inf, ratio)).double()


def _view(number: int, judgement: Judgement, given: Tensor, exact: Tensor, ratios: Tensor) -> ResultView:
    width = given.shape[-1] if given.dim() else 1
    matrix = ratios.reshape(-1, width)
    row, column = divmod(int(matrix.flatten().argmax()), width)
    rows, columns = _around(row, matrix.shape[0]), _around(column, width)

    def part(tensor: Tensor) -> tuple[tuple[float, ...], ...]:
        found = tensor.reshape(-1, width)[rows.start : rows.stop, columns.start : columns.stop]
        return tuple(tuple(one) for one in found.tolist())

    return ResultView(
        number, judgement, _counts(ratios), _heat(matrix), rows, columns, part(given), part(exact), part(ratios)
    )


def _around(index: int, size: int) -> range:
    first = max(0, min(index - _AROUND, size - 2 * _AROUND - 1))
    return range(first, min(size, first + 2 * _AROUND + 1))


def _counts(ratios: Tensor) -> tuple[int, ...]:
    off = ratios[ratios > 0]
    finite = off[off.isfinite()]
    bins = torch.bucketize(finite, torch.tensor(EDGES, dtype=torch.float64))
    counts = torch.bincount(bins, minlength=len(EDGES) + 1).tolist()
    return ratios.numel() - off.numel(), *counts, off.numel() - finite.numel()


def _heat(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    size = [min(_CELLS, extent) for extent in matrix.shape]
    cells = torch.nn.functional.adaptive_max_pool2d(
        matrix.nan_to_num(posinf=torch.finfo(torch.float64).max)[None], size
    )
    return tuple(tuple(row) for row in cells[0].tolist())
