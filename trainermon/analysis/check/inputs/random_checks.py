"""Calls with random inputs on a device: is what it gives right?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, Status, family_of_call, judge_gradient
from trainermon.accuracy.products import GradientSum, gradients_on
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.devices import result_on
from trainermon.analysis.check.inputs.options import CallInputs
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import BACKWARD, EntryRecord
from trainermon.replay.dumped_calls import DumpedCall
from trainermon.replay.inputs.random_calls import RandomTensors, rebuild_random

_ORDER = (Status.ERROR, Status.WARNING, Status.PASS, Status.SKIP)


class RandomVerdict(NamedTuple):
    """The verdict on a call with random inputs.

    Attributes:
        judgements: One for each tensor that it gave.
        slots: Of a backward what each is the gradient of.
        seed: The seed of the inputs.
    """

    judgements: tuple[Judgement, ...]
    slots: tuple[str, ...]
    seed: int


class RandomChecker:
    """Judges what a device gives for the calls of a dump with random inputs.

    Args:
        directory: The dump's folder.
        data: What dump.json has, by key.
        entries: Its forward calls.
        device: Where calls are run.
        inputs: Which seeds.
        judged: Gives the verdicts on a call whose result is known.
    """

    def __init__(  # noqa: PLR0913  # what a dump is, and how it is judged
        self,
        directory: Path,
        data: Mapping[str, Any],
        entries: Sequence[EntryRecord],
        *,
        device: str,
        inputs: CallInputs,
        judged: Callable[[DumpedCall, EntryRecord], Sequence[Judgement]],
    ) -> None:
        self._directory, self._data, self._device = directory, data, device
        self._forwards, self._inputs, self._judged = entries, inputs, judged
        self._sources: dict[int, tuple[GradientChecker, _RandomCalls]] = {}

    def worst(self, entry: EntryRecord) -> RandomVerdict:
        """Return the worst of the verdicts on a forward or backward call, each with inputs of another seed.

        Raises:
            DumpError: It cannot be called again, or not on the device.
        """
        seeds = range(self._inputs.seed, self._inputs.seed + self._inputs.samples)
        return min((self._verdict(entry, seed) for seed in seeds), key=_badness)

    def _verdict(self, entry: EntryRecord, seed: int) -> RandomVerdict:
        if entry.direction == BACKWARD:
            named = self._gradients(entry, seed)
            return RandomVerdict(tuple(named.values()), tuple(named), seed)
        dumped = self._called(entry, seed)
        return RandomVerdict(tuple(self._judged(dumped, entry)), (), seed)

    def _called(self, entry: EntryRecord, seed: int) -> DumpedCall:
        """Return the call with random inputs and what the device gives for them."""
        dumped = rebuild_random(self._directory, self._data, entry, seed)
        try:
            return dataclasses.replace(dumped, result=result_on(self._device, dumped.call, entry.autocast))
        except Exception as error:  # whatever a device raises: it has no such kernel, or the inputs do not fit
            why = (str(error).splitlines() or [""])[0][:160]
            what = f"{self._device} does not run it with random inputs"
            raise DumpError(f"{what}: {type(error).__name__}: {why}") from error

    def _gradients(self, entry: EntryRecord, seed: int) -> dict[str, Judgement]:
        checker, calls = self._source(seed)
        stem = entry.key.removesuffix(f".{BACKWARD}")
        if stem not in checker.stems:
            raise DumpError("the dump has no forward of it")
        dumped = calls.call(checker.stems[stem])
        if family_of_call(dumped.name, dumped.call) is Family.RANDOM:
            raise DumpError("random")
        product = checker.product(stem)
        gradients = gradients_on(product.backward, self._device)
        slots, numbers = checker.slots(stem), sorted(product.backward.wanted)
        return {
            slots[number]: judge_gradient(given, GradientSum([(product, number)], given), product.backward.coarsest)
            for number, given in zip(numbers, gradients, strict=True)
        }

    def _source(self, seed: int) -> tuple[GradientChecker, _RandomCalls]:
        if seed not in self._sources:
            calls = _RandomCalls(lambda entry: self._called(entry, seed), seed)
            checker = GradientChecker(self._directory, self._data, self._forwards, source=calls)
            self._sources[seed] = checker, calls
        return self._sources[seed]


class _RandomCalls:
    """Calls with random inputs and results, of which the last is kept, and random gradients of results."""

    def __init__(self, called: Callable[[EntryRecord], DumpedCall], seed: int) -> None:
        self._called, self._seed = called, seed
        self._last: tuple[str, DumpedCall] | None = None

    def call(self, entry: EntryRecord) -> DumpedCall:
        """Return a forward call with what the device gives for random inputs."""
        if self._last is None or self._last[0] != entry.key:
            self._last = entry.key, self._called(entry)
        return self._last[1]

    def gradient(self, form: Mapping[str, Any]) -> Tensor:
        """Return random numbers with the statistics of a gradient."""
        return RandomTensors(f"gradient {form.get('order')}", self._seed)(form)


def _badness(verdict: RandomVerdict) -> tuple[int, float]:
    """Return a key by which the worst verdict comes first."""
    ranks = [_ORDER.index(one.status) for one in verdict.judgements]
    worst = [one.worst for one in verdict.judgements if one.worst == one.worst]  # NaN: not judged
    return min(ranks, default=len(_ORDER)), -max(worst, default=0.0)
