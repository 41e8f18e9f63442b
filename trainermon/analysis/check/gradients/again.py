"""The backward of a recorded call once more on a device: is a wrong gradient the kernel's doing?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trainermon.accuracy.judge import Judgement, judge_gradient
from trainermon.accuracy.products import GradientSum, gradients_on
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.devices import CallRerun, rerun
from trainermon.core.errors import DumpError


def gradients_again(checker: GradientChecker, stem: str, recorded: Mapping[str, Judgement], device: str) -> CallRerun:
    """Return what the backward of the call `stem` gives on `device` for the recorded gradients of its results.

    `recorded` are the verdicts on the gradients in the dump, by the place of the tensor. They may be sums over several
    calls; what the device gives is this call's alone. Both judge the same places, in the same order.
    """
    try:
        product, backward = checker.product(stem), checker.backward_call(stem)
    except DumpError as error:
        return CallRerun((), f"not run again on {device}: {error}")
    slots, numbers = checker.slots(stem), sorted(backward.wanted)
    kept = {slots[number]: number for number in numbers if slots[number] in recorded}

    def judged(found: Sequence[Tensor]) -> list[Judgement]:
        given = dict(zip(numbers, found, strict=True))
        return [
            judge_gradient(given[number], GradientSum([(product, number)], given[number]), backward.coarsest)
            for number in (kept[slot] for slot in recorded if slot in kept)
        ]

    return rerun(device, list(recorded.values()), lambda: gradients_on(backward, device), judged)
