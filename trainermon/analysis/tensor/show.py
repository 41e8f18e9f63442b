"""`trainermon tensor show` and `top`: one tensor in full, or a line for each of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainermon.analysis.tensor.extremes import ExtremeElement
from trainermon.analysis.tensor.files import StoredTensor, UnreadTensor
from trainermon.analysis.tensor.index import IndexPart, parse_index
from trainermon.analysis.tensor.profile import ElementPlace, IndexSpread, TensorProfile
from trainermon.analysis.tensor.screen import corner, line, number, position, size, table, window
from trainermon.analysis.tensor.selection import called_in
from trainermon.core.terminal.escapes import printable
from trainermon.dump.files.records import TensorRecord

_NAME = 72
_HEAD = ("tensor", "dtype", "shape", "NaN", "Inf", "min", "max", "rms")


def render_profile(
    tensor: StoredTensor, found: TensorProfile, part: IndexPart | None, *, colour: bool = False
) -> Iterator[str]:
    """Yield the lines of `trainermon tensor show`: statistics, positions of NaN and Inf, and the values around them.

    `part` is the part that `found` is about; None: the whole tensor.
    """
    yield printable(found.label)
    stored = size(found.count * tensor.raw.dtype.itemsize)
    chosen = f", the part {part.text} of {list(tensor.shape)}" if part is not None else ""
    yield line("", f"{found.dtype}{list(found.shape)}, {found.count:,} elements, {stored}{chosen}")
    line_of_code = called_in(tensor.path)
    if line_of_code:
        yield line("called in", printable(line_of_code))
    bad = [f"{count:,} {name}" for count, name in _bad_counts(found) if count]
    yield line("elements", ", ".join([f"{found.finite:,} finite", *bad, f"{found.zeros:,} zero"]))
    if found.min is not None and found.max is not None:
        yield line("range", f"{_place_text(found.min)} … {_place_text(found.max)}")
        moments = (("mean", found.mean), ("std", found.std), ("rms", found.rms), ("norm", found.norm))
        yield line("moments", ", ".join(f"{name} {number(value)}" for name, value in moments))
    if found.bad:
        yield line("not finite", _bad_text(found))
    yield from (line("within", _spread_text(spread)) for spread in found.spread)
    yield from _values(tensor, found, part, colour=colour)


def _values(tensor: StoredTensor, found: TensorProfile, part: IndexPart | None, *, colour: bool) -> Iterator[str]:
    if not found.count:
        return
    if part is None and found.bad:
        part = window(tensor.shape, found.bad[0].position)
    yield from corner(tensor, part or parse_index("", tensor.shape), colour=colour)


def _bad_counts(found: TensorProfile) -> tuple[tuple[int, str], ...]:
    return (found.nans, "NaN"), (found.positive_infs, "Inf"), (found.negative_infs, "-Inf")


def _bad_text(found: TensorProfile) -> str:
    texts = [number(place.value) for place in found.bad]
    named = [
        f"{text if not index or text != texts[index - 1] else ''} {position(place.position)}".strip()
        for index, (text, place) in enumerate(zip(texts, found.bad, strict=True))
    ]
    rest = found.nans + found.infs - len(named)
    return ", ".join(named) + (f" and {rest:,} more" if rest > 0 else "")


def _place_text(place: ElementPlace) -> str:
    return f"{number(place.value)} at {position(place.position)}"


def _spread_text(spread: IndexSpread) -> str:
    share = f"dim {spread.dim}: {spread.indices:,} of {spread.size:,} indices"
    if spread.indices == spread.size:
        return f"{share}, all of them"
    more = ", …" if spread.indices > len(spread.first) else ""
    return f"{share}: {', '.join(map(str, spread.first))}{more}"


def profile_row(found: TensorProfile) -> tuple[str, ...]:
    """Return the cells for one tensor in a table of many: name, type, shape, statistics."""
    low, high = (None if place is None else place.value for place in (found.min, found.max))
    numbers = (low, high, found.rms)
    return (
        _short(found.label),
        found.dtype,
        str(list(found.shape)),
        *(f"{count:,}" for count in (found.nans, found.infs)),
        *map(number, numbers),
    )


def unread_row(tensor: UnreadTensor) -> tuple[str, ...]:
    """Return the cells for a tensor that is not read, with the reason in the place of its type."""
    return (_short(tensor.label), f"not read: {printable(tensor.reason)}", *["–"] * 6)


def record_row(name: str, record: TensorRecord) -> tuple[str, ...]:
    """Return the same cells as `profile_row`, from the statistics in a dump that has no tensor files."""
    counts = ("–" if count is None else f"{count:,}" for count in (record.nans, record.infs))
    rms = None if record.norm is None or not record.count else record.norm / record.count**0.5
    dtype = record.dtype.removeprefix("torch.")
    return (_short(name), dtype, str(list(record.shape)), *counts, *map(number, (record.min, record.max, rms)))


def render_rows(rows: Sequence[tuple[str, ...]], *, colour: bool = False) -> Iterator[str]:
    """Yield the lines of a table of many tensors, from the cells of `profile_row` and `record_row`.

    `colour` marks NaN and Inf.
    """
    lines = list(table(_HEAD, rows, left=3))
    yield lines[0]
    for row, text in zip(rows, lines[1:], strict=True):
        is_bad = any(cell not in ("0", "–") for cell in row[3:5])
        yield f"\033[1;31m{text}\033[0m" if colour and is_bad else text


def render_extremes(found: Sequence[ExtremeElement], *, against: bool) -> Iterator[str]:
    """Yield the lines of a table of a tensor's largest elements, or with `against` of two tensors' differences."""
    head = ("position", "value", "other", "difference") if against else ("position", "value")
    rows = [
        (position(extreme.position), *(number(value) for value in extreme.values[: len(head) - 1])) for extreme in found
    ]
    yield from table(head, rows)


def _short(name: str) -> str:
    """Return the end of a long name, in which dumps differ."""
    text = printable(name)
    return text if len(text) <= _NAME else "…" + text[1 - _NAME :]
