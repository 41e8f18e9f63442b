"""Checkpoints and their comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trainermon.analysis.checkpoint.inspection import CheckedTensor
from trainermon.analysis.checkpoint.pieces import Checkpoint
from trainermon.analysis.checkpoint.verdicts import (
    WEIGHTS,
    CheckpointComparison,
    CheckpointSide,
    WeightComparison,
    WeightVerdict,
)
from trainermon.analysis.tensor.screen import line, number, position, size, table
from trainermon.core.terminal.escapes import printable

MAX_ROWS = 30
_MAX_ALONE = 6
_HEAD = ("tensor", "verdict", "ΔW/W", "cosine", "largest", "unequal")
_COLOURS = {WeightVerdict.IDENTICAL: "32", WeightVerdict.ROUNDING: "32", WeightVerdict.CLOSE: "33"}


def render_comparison(found: CheckpointComparison, *, colour: bool = False, rows: int = MAX_ROWS) -> Iterator[str]:
    """Yield the lines of a comparison: what it comes to, then the tensors that differ."""
    same = not found.differing() and not any(value.is_array for value in found.changed_values())
    yield _marked(printable(found.headline), "1;32" if same else "1;31", colour=colour)
    for label, side in (("first", found.ours), ("second", found.theirs)):
        yield line(label, printable(describe_side(side)))
    for label, counts in found.counts_by_group().items():
        yield line(label, ", ".join(f"{counts[v]:,} {v.value}" for v in reversed(WeightVerdict) if counts[v]))
    for note in found.all_notes():
        yield line("note", printable(note))
    odd = found.ranked()
    if odd:
        yield from table(_HEAD, [_row(tensor) for tensor in odd[:rows]], left=2)
    if len(odd) > rows:
        yield f"  and {len(odd) - rows:,} more: write them with -o DIR"
    yield from _said((tensor.name, (*tensor.hints, *tensor.notes)) for tensor in odd[:rows])
    yield from _values(found, rows)


def _said(tensors: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """Yield what is said of tensors, each text once, with the first tensor and how many more it holds for."""
    names: dict[str, list[str]] = {}
    for name, texts in tensors:
        for text in texts:
            names.setdefault(text, []).append(name)
    for text, of in names.items():
        more = f" and {len(of) - 1:,} more" if len(of) > 1 else ""
        yield line("", printable(f"{of[0]}{more}: {text}"))


def describe_side(side: CheckpointSide) -> str:
    """Return what one side is: its path, format, step and split."""
    step = f", step {side.step:,}" if side.step is not None else ""
    split = " ".join(f"{key}={value}" for key, value in side.layout.items())
    return f"{side.path} ({side.format}{step}{f', {split}' if split else ''})"


def _row(tensor: WeightComparison) -> tuple[str, ...]:
    name = tensor.name if tensor.kind == WEIGHTS else f"{tensor.kind}: {tensor.name}"
    said = said_of(tensor)
    if tensor.unequal is None:
        return printable(name), said, "", "", "", ""
    numbers = [number(value) if value is not None else "" for value in (tensor.relative, tensor.cosine, tensor.largest)]
    return printable(name), said, *numbers, f"{tensor.unequal:,}"


def said_of(tensor: WeightComparison) -> str:
    """Return the verdict on a tensor with what it needs to be understood: the dtype, both shapes, the side."""
    match tensor.verdict:
        case WeightVerdict.ROUNDING:
            return f"rounding to {tensor.rounded_to}"
        case WeightVerdict.UNMATCHED:
            return f"unmatched: only in the {'first' if tensor.is_ours else 'second'}"
        case WeightVerdict.SHAPE:
            return f"shape: {position(tensor.shapes[0] or ())} and {position(tensor.shapes[1] or ())}"
        case WeightVerdict.NONFINITE:
            return f"nonfinite: {tensor.nonfinite[0]:,} and {tensor.nonfinite[1]:,}"
        case _:
            return str(tensor.verdict.value)


def _values(found: CheckpointComparison, rows: int) -> Iterator[str]:
    both = found.changed_values()
    if both:
        yield f"  {len(both):,} other {'value differs' if len(both) == 1 else 'values differ'}"
        cells = [(value.label, _short(value.ours), _short(value.theirs)) for value in both[:rows]]
        yield from table(("value", "first", "second"), [tuple(map(printable, row)) for row in cells], left=3)
        if len(both) > rows:
            yield f"  and {len(both) - rows:,} more"
    for side, alone in (
        ("first", [value.key for value in found.values if value.theirs is None]),
        ("second", [value.key for value in found.values if value.ours is None]),
    ):
        if alone:
            more = ", …" if len(alone) > _MAX_ALONE else ""
            names = ", ".join(alone[:_MAX_ALONE])
            yield line("values", printable(f"{len(alone):,} in the {side} alone: {names}{more}"))


def _short(text: str | None) -> str:
    return "–" if text is None else text if len(text) <= 50 else f"{text[:35]}…{text[-14:]}"  # a digest at the end


def _marked(text: str, code: str, *, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text


def render_checkpoint(checkpoint: Checkpoint, checked: Mapping[str, list[CheckedTensor]]) -> Iterator[str]:
    """Yield the lines of what a checkpoint holds: format, step, split, then its tensors by kind."""
    side = CheckpointSide(
        path=str(checkpoint.path), format=checkpoint.format, step=checkpoint.step, layout=checkpoint.layout
    )
    yield printable(describe_side(side))
    for kind, tensors in checked.items():
        total = sum(tensor.num_elements for tensor in tensors)
        dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors))
        stored = sum(tensor.size_bytes for tensor in tensors)
        yield line(kind, f"{len(tensors):,} tensors, {total:,} elements, {dtypes}, {size(stored)}")
    for note in checkpoint.all_notes():
        yield line("note", printable(note))
    names = sorted(checkpoint.values)
    if names:
        yield line("values", printable(", ".join(names[:20])))
    yield from render_tensors([tensor for tensors in checked.values() for tensor in tensors])


def render_tensors(tensors: list[CheckedTensor]) -> Iterator[str]:
    """Yield a table of tensors, a line each."""
    head = ("tensor", "type", "pieces", "norm", "NaN", "Inf")
    rows = [
        (
            printable(tensor.label),
            f"{tensor.dtype}{list(tensor.shape)}",
            f"{tensor.num_pieces:,}",
            number(tensor.norm),
            f"{tensor.nans:,}" if tensor.nans else "",
            f"{tensor.infs:,}" if tensor.infs else "",
        )
        for tensor in tensors
    ]
    yield from table(head, rows, left=2)
    yield from _said((tensor.label, (*tensor.notes, *tensor.faults)) for tensor in tensors)
