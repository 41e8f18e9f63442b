"""Arguments that commands on tensors have in common."""

from __future__ import annotations

import argparse
import math


def tolerance(text: str) -> float:
    """Return the number that `text` is, for `type` of an argument.

    Raises:
        argparse.ArgumentTypeError: It is no finite number from 0 on.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value
