"""The result table as lines of text, for files of any kind: a syntax says how cells look.

What is most of a large table, rows of finite statistics on both sides, is computed and written by blocks; any other
row cell by cell. Both give the same cells.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trainermon.analysis.compare.comparison import Comparison, Mode
from trainermon.analysis.compare.metrics import Array, finite_statistics, norm_ratios, shares
from trainermon.analysis.compare.output.tables import (
    NamedRow,
    cells_of,
    kind_of,
    named_rows,
    nonfinite_counts,
    plain,
    stack_text,
)

try:
    import orjson
except ImportError:  # it writes numbers 15 times as fast; the extra `compare` brings it

    def _dumps(numbers: Array) -> str:
        return json.dumps(numbers.tolist(), separators=(",", ":"))
else:

    def _dumps(numbers: Array) -> str:
        return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY).decode()


BLOCK = 8192
"""Rows that are written together."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CellSyntax:
    """How the cells of a result table are written in one file format.

    Attributes:
        text: What stands before and after a text.
        number: What stands before and after a number.
        between: What separates cells.
        escape: Makes a text safe for the format.
    """

    text: tuple[str, str]
    number: tuple[str, str]
    between: str
    escape: Callable[[str], str]

    def cell(self, value: object) -> str:
        """Return the text of one cell for `value`, with what stands around it; texts are escaped."""
        if isinstance(value, str):
            return f"{self.text[0]}{self.escape(value)}{self.text[1]}"
        return f"{self.number[0]}{value!r}{self.number[1]}"

    def rows(self, numbers: Array, *, per_cent: bool = False) -> list[str]:
        """Return, for each row of a matrix of finite numbers, the text of its cells.

        With `per_cent` the numbers are written as texts with a per cent sign, as in msprobe.
        """
        if not len(numbers):
            return []
        before, after = (self.text[0], f"%{self.text[1]}") if per_cent else self.number
        lines = _dumps(np.ascontiguousarray(numbers))[2:-2].replace("],[", "\n")
        return [f"{before}{line}{after}" for line in lines.replace(",", f"{after}{self.between}{before}").split("\n")]


def lines(comparison: Comparison, syntax: CellSyntax) -> Iterator[tuple[str, str]]:
    """Yield, for every row of the result table, its result and the text of its line.

    The result is `pass`, `warning`, `error` or `unmatched`.
    """
    rows = named_rows(comparison)
    while block := list(itertools.islice(rows, BLOCK)):
        quick = _quick_lines(block, syntax) if comparison.mode is Mode.STATISTICS else {}
        for index, named in enumerate(block):
            line = quick.get(index)
            yield named.row.result, line or syntax.between.join(map(syntax.cell, cells_of(comparison.mode, named)))


def _quick_lines(block: Sequence[NamedRow], syntax: CellSyntax) -> dict[int, str]:
    """Return the lines of those rows whose statistics are finite numbers, by their position."""
    both = [index for index, (_, row, _) in enumerate(block) if row.target and row.golden]
    chosen, values = finite_statistics([(block[index].row.target, block[index].row.golden) for index in both])  # type: ignore[misc]  # not None, see above
    in_per_cent, ratios = shares(values), norm_ratios(values)
    finite = np.flatnonzero(np.isfinite(np.column_stack([in_per_cent, ratios])).all(axis=1))
    indices = [both[chosen[index]] for index in finite.tolist()]
    values = values[finite]
    relative = np.array([block[index].row.difference.relative for index in indices], dtype=np.float64)
    columns = (
        syntax.rows(values[:, :4] - values[:, 4:]),
        syntax.rows(in_per_cent[finite], per_cent=True),
        syntax.rows(values),
        syntax.rows(ratios[finite, np.newaxis]),
        syntax.rows(relative[:, np.newaxis]),
    )
    return {index: _line(block[index], syntax, *numbers) for index, *numbers in zip(indices, *columns, strict=True)}


def _line(named: NamedRow, syntax: CellSyntax, *numbers: str) -> str:
    (key, their_key), row, stack = named
    ours, theirs = row.target, row.golden
    assert ours is not None
    assert theirs is not None
    name = syntax.cell(f"{key}.{ours.place}")
    their_name = name if key == their_key and ours.place == theirs.place else syntax.cell(f"{their_key}.{theirs.place}")
    same = str(ours.requires_grad == theirs.requires_grad)
    messages = str(list(row.messages)) if row.messages else "[]"
    differences, in_per_cent, statistics, ratio, relative = numbers
    parts = (
        name,
        their_name,
        _texts(syntax, *kind_of(ours, theirs)),
        differences,
        in_per_cent,
        statistics,
        _texts(syntax, same, row.result, messages, stack_text(stack)),
        ratio,
        _texts(syntax, *map(plain, nonfinite_counts(ours, theirs))),
        relative,
    )
    return syntax.between.join(parts)


@lru_cache(maxsize=4096)
def _texts(syntax: CellSyntax, *cells: object) -> str:
    return syntax.between.join(map(syntax.cell, cells))
