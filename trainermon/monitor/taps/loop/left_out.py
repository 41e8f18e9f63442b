"""Parameters of the model that its optimizer does not step, although they get gradients."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from trainermon.core.catalogue import NOT_HELD, NOT_STEPPED
from trainermon.core.values import Kind
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.loop.loop_taps import LoopTap
from trainermon.monitor.taps.training import Training, groups_of

_ASKED_AFTER = 10  # steps: by then another optimizer has made one


class LeftOut(LoopTap):
    """Tells which trainable parameters are in no group of the optimizer, and are stepped by nothing else.

    There are two findings, rows of each watched parameter, 0 where nothing is to be said:

    * `not_held`, at once: the optimizer holds tensors that the model does not, and that get no gradient; a module was
      replaced, and what is in its place now is stepped by nobody.
    * `not_stepped`: for how many steps it has had a gradient, while nobody wrote to it.

    Nothing is known where the optimizer holds none of the model's tensors, or others that get gradients: main copies,
    or those of another model. 1 µs a step where all are stepped, and no tensor is read. Where some are not, other
    optimizers are looked for once, 50 ms for a million objects, and these parameters are read twice, ten steps apart,
    on their device, as torch does not count what is written through `.data`: nothing waits for it.

    Args:
        training: What is watched.
        collector: Takes the rows.
    """

    looks_for = "parameters that no optimizer steps"

    def __init__(self, training: Training, collector: Collector) -> None:
        self._training = training
        self._collector = collector
        self._seen: tuple[object, Mapping[int, Tensor | None]] = ((), {})
        self._stepped: set[int] = set()  # ids of what has been in a group
        self._not_held: frozenset[int] = frozenset()
        self._missing: dict[int, int] = {}  # how often each was written to, when that was found
        self._num_still: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}
        self._are_still: dict[int, Tensor] = {}  # 1 where the sum was the same again, else 0, on the device
        self._told: set[str] = set()

    def step_ended(self) -> None:
        """Look at what the optimizer holds; call it at the exit of its step, where gradients still are there."""
        groups, successors = groups_of(self._training.optimizer), self._training.successors
        if groups != self._seen[0] or successors is not self._seen[1]:
            is_first, self._seen = not self._seen[0], (groups, successors)
            before = [*self._missing]
            self._find()
            if not is_first and NOT_STEPPED in self._told:  # they may take turns: what is left out is counted anew
                self._put(NOT_STEPPED, dict.fromkeys((*before, *self._missing), 0))
                return
        if self._missing:
            self._follow()

    def _find(self) -> None:
        """Find out anew which are left out."""
        stepped = {id(p): p for group in self._training.optimizer.param_groups for p in group["params"]}
        trained = {i: p for i, p in self._held().items() if p.requires_grad}
        missing = {i: p for i, p in trained.items() if id(p) not in stepped}
        own = {id(p) for root in self._training.roots for p in root.parameters()}
        foreign = [p for number, p in stepped.items() if number not in own]
        self._stepped |= {*stepped}
        if not foreign:  # what was in a group, and was taken out, has its turn at other times
            missing = {i: p for i, p in missing.items() if id(p) not in self._stepped}
        watched = {id(p.tensor) for p in self._training.parameters}  # what was replaced may keep its last gradient
        if len(missing) == len(trained) or any(p.grad is not None and id(p) not in watched for p in foreign):
            missing = {}
        at_once = {i: p for i, p in missing.items() if p.grad is not None} if foreign else {}
        not_held = frozenset(at_once) - _of_others(self._training, at_once)
        if not_held != self._not_held:
            self._put(NOT_HELD, dict.fromkeys(self._not_held, 0) | dict.fromkeys(not_held, 1))
            self._not_held = not_held
        self._missing = {i: p._version for i, p in missing.items() if i not in not_held}
        self._num_still = dict.fromkeys(self._missing, 0)
        self._sums, self._are_still = {i: _sum_of(missing[i]) for i in self._missing}, {}

    def _follow(self) -> None:
        """Count the steps on which what is left out had a gradient, until somebody writes to it."""
        found, held = {}, self._held()
        for i, num_writes in [*self._missing.items()]:
            if (p := held[i])._version != num_writes:
                found[i] = 0
            elif p.grad is not None:
                found[i] = self._num_still[i] = self._num_still[i] + 1
        if _ASKED_AFTER in found.values():
            found |= dict.fromkeys(_of_others(self._training, {i: held[i] for i in found}, has_stepped=True), 0)
            self._are_still |= {i: self._sums[i] == _sum_of(held[i]) for i, number in found.items() if number}
        self._missing = {i: number for i, number in self._missing.items() if found.get(i, 1)}
        if found:
            self._put(NOT_STEPPED, found)

    def _held(self) -> Mapping[int, Tensor]:
        """Return by position what the model holds in the place of each watched parameter."""
        successors = self._training.successors
        held = {i: successors.get(i, p.tensor) for i, p in enumerate(self._training.parameters)}
        return {i: p for i, p in held.items() if p is not None}

    def _put(self, slot: str, found: Mapping[int, int]) -> None:
        """File what was found of some, and the first time 0 for all others, so that they are counted."""
        others = {} if slot in self._told else dict.fromkeys(range(len(self._training.parameters)), 0)
        self._told.add(slot)
        for i, value in {**others, **found}.items():
            held = self._training.parameters[i]
            series = self._collector.table.id_of(held.key(Kind.STATE, slot), held.placement)
            if value and slot == NOT_STEPPED and i in self._are_still:
                self._collector.take((series,), (self._are_still[i] * float(value),))
            else:
                self._collector.put(series, float(value))


@torch.no_grad()
def _sum_of(parameter: Tensor) -> Tensor:
    """Return the sum of this rank's part, on its device."""
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return (torch.view_as_real(own) if own.is_complex() else own).float().sum()


def other_optimizers(training: Training, tensors: Collection[Tensor]) -> list[torch.optim.Optimizer]:
    """Return the other optimizers of this process that step one of `tensors`.

    All objects are looked through, which takes 50 ms for a million; once in a training.
    """
    watched = {*map(id, tensors)}
    # not isinstance, which asks each object for its class
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        other
        for other in found
        if other is not training.optimizer
        and any(id(tensor) in watched for group in other.param_groups for tensor in group["params"])
    ]


def _of_others(training: Training, tensors: Mapping[int, Tensor], *, has_stepped: bool = False) -> frozenset[int]:
    """Return which of `tensors` other optimizers hold; with `has_stepped`, have state of."""
    others = other_optimizers(training, tensors.values()) if tensors else []
    held = {id(p) for other in others for group in other.param_groups for p in group["params"]}
    if has_stepped:
        held = {id(p) for other in others for p in other.state}
    return frozenset(i for i, tensor in tensors.items() if id(tensor) in held)
