"""Draws again what a recorded call drew, from the state of the generator that it drew from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import call_on, plain
from trainermon.replay.dumped_calls import DumpedCall


def drawn_again(dumped: DumpedCall) -> Any:
    """Return what a call gives on the CPU with the generator as it was, where the dump says how that was.

    The generator of this process is as before afterwards.

    Raises:
        Exception: Whatever the operation raises.
    """
    with torch.random.fork_rng(devices=[]):
        if dumped.generator is not None:
            torch.set_rng_state(dumped.generator)
        return call_on(dumped.call, "cpu")


def draws_the_same(dumped: DumpedCall) -> bool:
    """Return whether a call with a known generator draws the recorded bits again."""
    return dumped.generator is not None and gives_the_same(dumped)


def gives_the_same(dumped: DumpedCall) -> bool:
    """Return whether a call gives the recorded bits again: then the dump comes from such a machine, and so it was.

    Raises:
        Exception: Whatever the operation raises.
    """
    given, again = (
        [plain(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        for value in (dumped.result, drawn_again(dumped))
    )
    return len(given) == len(again) and all(map(_are_same, given, again))


def _are_same(one: Tensor, other: Tensor) -> bool:
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
