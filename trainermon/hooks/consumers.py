"""Which calls take a tensor: whether the gradient that arrives at it is the sum of those of recorded calls alone.

A gradient is known for a tensor as a whole, added up over all calls that take it. Whoever judges it must know them
all, and whether anything that is not in the dump took the tensor as well: a function of the script's own, a compiled
region. That is read off the graph of autograd, while it is made.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

# Where in the graph a tensor is: thread, number of its node, number of the output of that node; or ("leaf", its id).
_Edge = tuple[Any, ...]


@dataclasses.dataclass(slots=True, eq=False)
class ConsumedTensor:
    """A tensor of the graph, and who takes it.

    Attributes:
        number: Its number in the dump, from 1: equal numbers are one tensor.
        is_leaf: It begins the graph: several backward passes may reach it.
        waiting: Places in recorded calls that take it, and whose gradient has not arrived.
        has_others: Something that was not recorded takes it, too.
        hooked: The script has a gradient hook of its own on it.
    """

    number: int
    is_leaf: bool
    waiting: int = 0
    has_others: bool = False
    hooked: bool = False
    _backward: int = -1
    _consumers: int = 0

    def consumers(self, backward: int) -> int:
        """Return how many places in recorded calls the gradient of the pass `backward` is the sum of.

        0: others take part, too.
        """
        if backward != self._backward:
            self._backward, self._consumers = backward, self.waiting
            if self.is_leaf:
                self.waiting = 0
        return 0 if self.has_others else self._consumers


class TensorConsumers:
    """Follows who takes the tensors of the calls that are recorded. Holds neither tensors nor nodes.

    Cost: about 2 µs for each tensor and node of a call.
    """

    def __init__(self) -> None:
        self._tensors: dict[_Edge, ConsumedTensor] = {}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._inner: set[_Edge] = set()
        self._walked: set[_Edge] = set()
        self._number = 0

    def of(self, tensor: Tensor) -> ConsumedTensor:
        """Return what is known of a tensor that a recorded call gives."""
        return self._found(tensor)[0]

    def taken(self, tensor: Tensor) -> ConsumedTensor:
        """Return what is known of a tensor that a recorded call takes.

        If it is not the result of a recorded call, then whatever that came from was taken by something else.
        """
        consumed, is_new = self._found(tensor)
        consumed.waiting += 1
        if is_new and tensor.grad_fn is not None:
            self._mark_others(tensor.grad_fn, (), self._walked)
        return consumed

    def given(self, tensors: Sequence[Tensor], taken: Collection[ConsumedTensor]) -> bool:
        """Follow what a recorded call that took `taken` gave; return whether one result is made of another."""
        results = {id(found): found for found in (self._found(tensor)[0] for tensor in tensors)}
        for found in results.values():
            found.waiting -= sum(one is found for one in taken)  # it gave back what it took
        visited: set[_Edge] = set()
        is_entangled = False
        for tensor in tensors:
            found, _ = self._found(tensor)
            if tensor.grad_fn is not None and not any(one is found for one in taken):
                met = self._mark_others(tensor.grad_fn, taken, visited)
                is_entangled |= any(id(one) in results for one in met)
        return is_entangled

    def _mark_others(self, node: Any, taken: Collection[ConsumedTensor], visited: set[_Edge]) -> list[ConsumedTensor]:
        """Mark every tensor that `node` and the nodes before it take, except `taken`; return those marked."""
        marked, waiting = [], [node]
        while waiting:
            for edge, before in _edges_before(waiting.pop()):
                found = self._tensors.get(edge)
                if edge[0] == "leaf" and (found is None or self._is_gone(edge)):
                    found, _ = self._found(before.variable)
                if found is not None:
                    if not any(one is found for one in taken):
                        found.has_others = True
                        marked.append(found)
                    continue
                self._inner.add(edge)
                if edge not in visited:
                    visited.add(edge)
                    waiting.append(before)
        return marked

    def _found(self, tensor: Tensor) -> tuple[ConsumedTensor, bool]:
        edge = _edge_of(tensor)
        is_leaf = edge[0] == "leaf"
        found = self._tensors.get(edge)
        if found is not None and not (is_leaf and self._is_gone(edge)):
            return found, False
        self._number += 1
        found = ConsumedTensor(self._number, is_leaf, has_others=edge in self._inner)
        if is_leaf:
            self._leaves[id(tensor)] = weakref.ref(tensor)
        self._tensors[edge] = found
        return found, True

    def _is_gone(self, edge: _Edge) -> bool:
        known = self._leaves.get(edge[1])
        return known is None or known() is None


def _edge_of(tensor: Tensor) -> _Edge:
    node = tensor.grad_fn
    if node is None:
        return ("leaf", id(tensor))
    return (threading.get_ident(), node._sequence_nr(), tensor.output_nr)


def _edges_before(node: Any) -> Iterator[tuple[_Edge, Any]]:
    """Yield where the tensors that a node takes are, each with the node that it comes from."""
    for before, number in node.next_functions:
        if before is None:
            continue
        leaf = getattr(before, "variable", None)
        if leaf is not None:
            yield ("leaf", id(leaf)), before
        else:
            yield (threading.get_ident(), before._sequence_nr(), number), before
