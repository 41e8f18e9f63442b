"""The formats that `-f` of a command takes: one or several, with commas, and `-f` may be given again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def formats_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what makes a list of the text behind `-f`, with `action="extend"`; others than the `known` are refused.

    >>> formats_of(["csv", "md"])("csv,md")
    ['csv', 'md']
    """

    def formats(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"found {unknown[0]!r}, expected some of {', '.join(known)}")
        return names

    return formats
