"""Looks at the autograd graph behind tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def has_reentrant_checkpoint(tensors: Sequence[Tensor]) -> bool:
    """Return whether the graph behind `tensors` has a reentrant activation checkpoint, whose backward runs another one.

    Torch's, Megatron's and DeepSpeed's are known.
    """
    return any("CheckpointFunction" in node.name() for node in nodes_behind(tensors))


def nodes_behind(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield every node of the autograd graph behind `tensors`."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
