"""Tensors as text for a terminal: numbers, positions, tables and a corner of values. Foreign names are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainermon.analysis.tensor.dtypes import numbers
from trainermon.analysis.tensor.files import StoredTensor
from trainermon.analysis.tensor.index import IndexPart
from trainermon.core.terminal.tables import aligned

LABEL = 11
ROWS, COLUMNS = 8, 8
_BAD, _END = "\033[1;31m", "\033[0m"


def number(value: Any) -> str:
    """Return a number as text of about eleven characters at most: whole ones in full, others with five digits."""
    if value is None:
        return "–"
    if isinstance(value, complex | np.complexfloating):
        return f"{number(value.real)}{'' if str(number(value.imag)).startswith('-') else '+'}{number(value.imag)}j"
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return str(value)
    if math.isfinite(value):
        return f"{float(value):.5g}"
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def position(place: Sequence[int]) -> str:
    """Return a position as it would be written in Python: `[3, 17]`; `[]` of a scalar."""
    return f"[{', '.join(map(str, place))}]"


def size(count_bytes: int) -> str:
    """Return a number of bytes as text in a suitable unit, as `1.2 MiB`."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def line(label: str, text: str) -> str:
    """Return one line of output: `label` in a column of fixed width, then `text`."""
    return f"  {label:<{LABEL}}{text}".rstrip()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Yield the lines of a text table with head.

    The first `left` columns are left-aligned, the others right-aligned.
    """
    for text in aligned((head, *rows), right=range(left, len(head))):
        yield f"  {text}"


def corner(tensor: StoredTensor, part: IndexPart, *, colour: bool = False) -> Iterator[str]:
    """Yield lines with the elements in the first rows and columns of a part, with positions.

    Of more than two dimensions the first matrix is shown. `colour` marks NaN and Inf by escape codes.
    """
    kept = [place for place, dim in enumerate(part.dims) if isinstance(dim, range)]
    dims = list(part.dims)
    for outer in kept[:-2]:
        dims[outer] = _range_of(dims[outer])[0]
    rows = kept[-2] if len(kept) > 1 else None
    columns = kept[-1] if kept else None
    for place, limit in ((rows, ROWS), (columns, COLUMNS)):
        if place is not None:
            dims[place] = _range_of(dims[place])[:limit]
    shown = IndexPart(part.shape, tuple(dims))
    values = np.asarray(numbers(np.asarray(tensor.raw[shown.index]), tensor.dtype))
    values = values.reshape(1 if rows is None else len(_range_of(dims[rows])), -1)
    yield from _matrix(values, shown, rows, columns, colour=colour)


def window(shape: Sequence[int], place: Sequence[int]) -> IndexPart:
    """Return the part of a tensor around the element at `place`: a few rows and columns, else one index."""
    dims: list[int | range] = list(place)
    for dim, limit in ((len(shape) - 2, ROWS), (len(shape) - 1, COLUMNS)):
        if dim >= 0:
            first = max(0, min(place[dim] - limit // 2, shape[dim] - limit))
            dims[dim] = range(first, min(first + limit, shape[dim]))
    return IndexPart(tuple(shape), tuple(dims))


def _range_of(dim: int | range) -> range:
    assert isinstance(dim, range)
    return dim


def _matrix(values: Any, shown: IndexPart, rows: int | None, columns: int | None, *, colour: bool) -> Iterator[str]:
    dims = shown.dims
    names = [""] if rows is None else [str(index) for index in _range_of(dims[rows])]
    heads = [] if columns is None else [str(index) for index in _range_of(dims[columns])]
    yield line("values", f"at {shown.text}" if dims else "")
    texts = [[number(value) for value in row.tolist()] for row in values]
    width = max((len(text) for row in (*texts, heads) for text in row), default=0)
    margin = " " * (LABEL + 2)
    name_width = max(len(name) for name in names)
    if heads:
        yield margin + " " * name_width + "".join(f"  {head:>{width}}" for head in heads)
    for name, row in zip(names, texts, strict=True):
        cells = (f"  {_marked(text, width, colour=colour)}" for text in row)
        yield margin + f"{name:>{name_width}}" + "".join(cells)


def _marked(text: str, width: int, *, colour: bool) -> str:
    padded = f"{text:>{width}}"
    return f"{_BAD}{padded}{_END}" if colour and ("NaN" in text or "Inf" in text) else padded
