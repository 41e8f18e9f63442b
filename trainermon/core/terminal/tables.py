"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int]) -> list[str]:
    """Return a line for each row, with columns as wide as their widest cells and two spaces between them.

    The columns whose numbers are in `right` end at the same place, the others begin there. All rows have as many cells.

    >>> aligned([("state", "step"), ("interrupted", "7")], right={1})
    ['state        step', 'interrupted     7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if place in right else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
