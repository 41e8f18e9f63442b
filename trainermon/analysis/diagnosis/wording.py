"""Words for numbers of things and for ranks, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainermon.core.values import Kind

_MAX_RANKS = 8
_MAX_NAMES = 3


class SeriesName(Protocol):
    """The fields of a series from which its name in a sentence is made."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def slot(self) -> str: ...  # noqa: D102
    @property
    def micro_step(self) -> int | None: ...  # noqa: D102


def series_name(row: SeriesName) -> str:
    """Return what a series is called in a sentence: `grad_reduced h.0.weight`, `the loss of micro step 1`."""
    micro = "" if row.micro_step is None else f" micro step {row.micro_step}"
    if row.kind == Kind.LOSS:
        return f"the {row.name}{' of' if micro else ''}{micro}"
    return f"{row.kind} {row.name}{f' {row.slot}' if row.slot else ''}{micro}"


def phase_name(phase: str) -> str:
    """Return what a phase of the step is called in a sentence: `before step` for `before_step`."""
    return str(phase).replace("_", " ")


def counted(number: int, noun: str) -> str:
    """Return `number` and `noun`, which is given in the singular: `1 gradient`, `2 gradients`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5`; of many, the first eight and how many more. Expects at least one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return f"ranks {shown}{f' and {len(ranks) - _MAX_RANKS} more' if len(ranks) > _MAX_RANKS else ''}"


def named(names: Sequence[str]) -> str:
    """Return the first names, and how many there are more: `a, b, c and 2 more`."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def sentence(text: str) -> str:
    """Return `text` with a capital letter, unless it begins with a module's name and a colon."""
    return text if ":" in text.split(" ")[0] else text[:1].upper() + text[1:]
