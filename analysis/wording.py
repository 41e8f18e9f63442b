"""Words for numbers of things and for ranks, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_RANKS = 8


def counted(number: int, noun: str) -> str:
    """Return `number` and `noun`, which is given in the singular: `1 gradient`, `2 gradients`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5`; of many, the first eight and how many more. Expects at least one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return f"ranks {shown}{f' and {len(ranks) - _MAX_RANKS} more' if len(ranks) > _MAX_RANKS else ''}"
