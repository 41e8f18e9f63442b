"""Which calls take a tensor: whether the gradient that arrives at it is the sum of those of recorded calls alone.

A gradient is known for a tensor as a whole, added up over all calls that take it. Whoever judges it must know them
all, and whether anything that is not in the dump took the tensor as well: a function of the script's own, a compiled
region. That is read off the graph of autograd, while it is made.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

# Where in the graph the result of a node is: thread, number of the node, number of its output.
_Edge = tuple[int, int, int]
# The class of the nodes that stand for the beginnings of the graph, whose tensor is their `variable`.
_OF_LEAF = "AccumulateGrad"


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
        self._leaves: dict[int, tuple[weakref.ref[Tensor], ConsumedTensor]] = {}
        self._inner: set[_Edge] = set()
        self._walked: set[_Edge] = set()
        self._number = 0

    def taken(self, tensor: Tensor) -> ConsumedTensor:
        """Return what is known of a tensor that a recorded call takes.

        If it is not the result of a recorded call, then whatever that came from was taken by something else.
        """
        node = tensor.grad_fn
        consumed, is_new = self._found(tensor, node)
        consumed.waiting += 1
        if is_new and node is not None:
            self._mark_others(node, (), self._walked)
        return consumed

    def given(self, tensors: Sequence[Tensor], taken: Collection[ConsumedTensor]) -> tuple[list[ConsumedTensor], bool]:
        """Return what is known of the tensors that a recorded call which took `taken` gave.

        And whether one of them is made of another.
        """
        nodes = [tensor.grad_fn for tensor in tensors]
        given = [self._found(tensor, node)[0] for tensor, node in zip(tensors, nodes, strict=True)]
        results = {id(found): found for found in given}
        before = {id(one) for one in taken}
        for number in results.keys() & before:
            results[number].waiting -= sum(id(one) == number for one in taken)  # it gave back what it took
        visited: set[_Edge] = set()
        is_entangled = False
        for found, node in zip(given, nodes, strict=True):
            if node is not None and id(found) not in before:
                met = self._mark_others(node, before, visited)
                is_entangled |= any(id(one) in results for one in met)
        return given, is_entangled

    def _mark_others(self, node: Any, taken: Collection[int], visited: set[_Edge]) -> list[ConsumedTensor]:
        """Mark every tensor that `node` and the nodes before it take, except `taken` (by id); return those marked."""
        marked: list[ConsumedTensor] = []
        waiting, thread = [node], threading.get_ident()
        while waiting:
            for before, number in waiting.pop().next_functions:
                if before is None:
                    continue
                found: ConsumedTensor | None
                if type(before).__name__ == _OF_LEAF:
                    found, _ = self._found(before.variable, None)
                else:
                    edge = thread, before._sequence_nr(), number
                    found = self._tensors.get(edge)
                if found is not None:
                    if id(found) not in taken:
                        found.has_others = True
                        marked.append(found)
                    continue
                self._inner.add(edge)
                if edge not in visited:
                    visited.add(edge)
                    waiting.append(before)
        return marked

    def _found(self, tensor: Tensor, node: Any) -> tuple[ConsumedTensor, bool]:
        """Return what is known of a tensor, and whether it is new; `node` is its `grad_fn`."""
        if node is None:
            return self._found_leaf(tensor)
        edge = threading.get_ident(), node._sequence_nr(), tensor.output_nr
        found = self._tensors.get(edge)
        if found is not None:
            return found, False
        self._number += 1
        found = self._tensors[edge] = ConsumedTensor(self._number, is_leaf=False, has_others=edge in self._inner)
        return found, True

    def _found_leaf(self, tensor: Tensor) -> tuple[ConsumedTensor, bool]:
        known = self._leaves.get(id(tensor))
        if known is not None and known[0]() is not None:
            return known[1], False
        self._number += 1
        found = ConsumedTensor(self._number, is_leaf=True)
        self._leaves[id(tensor)] = weakref.ref(tensor), found
        return found, True
