"""Trainings of the families, and where in each of them something can break."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.diagnosis import own_operations
from benchmarks.diagnosis.jobs import Job, Recipe, Script, rank_of_job, trained, watch_reduction, weight_of
from benchmarks.diagnosis.model import Change
from benchmarks.families.catalogue import FAMILIES
from benchmarks.families.family import Family

GIVEN = ("images", "numbers")
"""What of a batch a model is given that is no whole number."""
MIN_ELEMENTS, MIN_ROWS = 8, 2
"""A weight that is smaller is not on every rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a family can break.

    Attributes:
        holders: Modules with a weight that has a gradient, and each one's twins, which share it.
        operations: How many operations of its own each module has that holds others; those that have any.
        takes_numbers: Whether the model is given more than whole numbers.
    """

    holders: Mapping[str, Sequence[str]]
    operations: Mapping[str, int]
    takes_numbers: bool


@functools.cache
def places_of(name: str) -> Places:
    """Return the places of a family, found by running it once; random numbers of the caller stay what they are."""
    with torch.random.fork_rng(devices=()):
        return _found_places(FAMILIES[name])


def _found_places(family: Family) -> Places:
    torch.manual_seed(0)
    model, batch = family.build(), family.draw(Generator().manual_seed(0))
    family.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for path, module in modules.items():
        if path and next(module.parameters(recurse=False), None) is not None:
            owners.setdefault(id(weight_of(module)), []).append(path)
    holders = {
        path: [other for other in owners[id(weight_of(modules[path]))] if other != path]
        for paths in owners.values()
        for path in paths
        if _counts(weight_of(modules[path]))
    }
    numbers = {
        path: own_operations.count(module, lambda: family.loss(model, batch))
        for path, module in modules.items()
        if next(module.children(), None) is not None
    }
    operations = {path: number for path, number in numbers.items() if number}
    return Places(holders=holders, operations=operations, takes_numbers=any(key in batch for key in GIVEN))


def _counts(weight: nn.Parameter) -> bool:
    gradient = weight.grad
    is_large = weight.numel() >= MIN_ELEMENTS and weight.shape[0] >= MIN_ROWS and weight.numel() % 2 == 0
    return is_large and gradient is not None and bool(gradient.any())


def build(split: str, name: str, seed: int, *, hooks_reduction: bool) -> Job:
    """Return a fresh training of a family; `hooks_reduction` has DDP reduce in a hook of the script's."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    net = family.build()
    batches = _Batches(family, 1000 * seed + rank_of_job())
    job = trained(split, net, Recipe(loss_of=batches.loss_of, rate=family.rate, micro_steps=1, after=batches.after))
    if hooks_reduction:
        watch_reduction(job)
    torch.manual_seed(1000 * seed + rank_of_job())
    return dataclasses.replace(job, own=functools.partial(_changed_own, name, net))


class _Batches:
    """Draws one batch per step; `loss_of` and `after` are what a recipe asks for."""

    def __init__(self, family: Family, seed: int) -> None:
        self._family = family
        self._drawn = Generator().manual_seed(seed)
        self._last: dict[str, Tensor] = {}

    def loss_of(self, model: Callable[..., Any], script: Script) -> Tensor:
        self._last = self._family.draw(self._drawn)
        given = {key: script.batch(value) if key in GIVEN else value for key, value in self._last.items()}
        return script.loss(self._family.loss(model, given))

    def after(self, model: Any) -> None:
        self._family.after_step(model, self._last)


@contextlib.contextmanager
def _changed_own(name: str, net: nn.Module, module: nn.Module, change: Change) -> Iterator[None]:
    path = next(path for path, found in net.named_modules() if found is module)
    number = places_of(name).operations[path]
    with own_operations.changed(module, change, (7 * len(path) + number) % number):
        yield
