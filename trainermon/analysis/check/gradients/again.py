"""The backward of a recorded call once more on a device: is a wrong gradient the kernel's doing?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trainermon.accuracy.families import Family
from trainermon.accuracy.judge import Judgement, family_of_call, judge_gradient
from trainermon.accuracy.products import BackwardCall, GradientSum, VectorProduct, both_on
from trainermon.accuracy.randomness import determined
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.devices import CallRerun, rerun
from trainermon.core.errors import DumpError


def gradients_again(checker: GradientChecker, stem: str, recorded: Mapping[str, Judgement], device: str) -> CallRerun:
    """Return what the backward of the call `stem` gives on `device` for the recorded gradients of its results.

    `recorded` are the verdicts on the gradients in the dump, by the place of the tensor. They may be sums over several
    calls; what the device gives is this call's alone. Both judge the same places, in the same order. A dropout drops
    what its generator's state then makes it drop, and its backward is judged by what this forward kept.
    """
    try:
        product, backward = checker.product(stem), checker.backward_call(stem)
        dumped = checker.recorded(stem)
    except DumpError as error:
        return CallRerun((), f"not run again on {device}: {error}")
    slots, numbers = checker.slots(stem), sorted(backward.wanted)
    kept = {slots[number]: number for number in numbers if slots[number] in recorded}
    is_random = family_of_call(dumped.name, dumped.call) is Family.RANDOM

    def judged(found: tuple[Sequence[Tensor], Sequence[Tensor]]) -> list[Judgement]:
        made, gradients = found
        given = dict(zip(numbers, gradients, strict=True))
        exact = _as_drawn(backward, dumped.name, made[0], gradients[0]) if is_random else product
        return [
            judge_gradient(given[number], GradientSum([(exact, number)], given[number]), backward.coarsest)
            for number in (kept[slot] for slot in recorded if slot in kept)
        ]

    return rerun(device, list(recorded.values()), lambda: both_on(backward, device), judged, dumped.generator)


def _as_drawn(backward: BackwardCall, name: str, made: Tensor, gradient: Tensor) -> VectorProduct:
    """Return in float64 what the backward of a dropout gives back that kept what `made` shows.

    Raises:
        DumpError: That does not show.
    """
    call = determined(name, backward.call, made, gradient)
    if call is None:
        raise DumpError("what it drew does not show")
    return VectorProduct(backward._replace(call=call, family=Family.ROUNDED))
