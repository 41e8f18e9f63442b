"""Steps of whole models, sound and with one wrong call: what `trainermon check run` says of each call."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.dump_pairs.cases import WITHOUT_AUTOCAST, Fault, Variant
from benchmarks.dump_pairs.faults import broken
from benchmarks.dump_pairs.models import prepare, step
from trainermon import PrecisionDebugger
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import check_dump, dumps_below

PRECISIONS = ("fp32", "bf16", "autocast")
_SMALLEST = {"fp32": 1e-3, "bf16": 0.03, "autocast": 0.03}
"""The size of the smallest fault: some roundoffs of 16 bits, where there are any."""


class CheckedModel(NamedTuple):
    """What was said of the calls of one step.

    Attributes:
        family: The model.
        variant: How the step was run, `bf16_operation-0.6-0.1-noise`.
        kind: `operation` or `backward` is wrong; "" if nothing is.
        precision: `fp32`, `bf16` or `autocast`.
        truth: The function that is wrong; "" if none is.
        judged: Calls with a verdict, forward and backward.
        backward: Those of them that are of a backward.
        skipped: Calls without.
        warnings: Calls with a warning.
        errors: Keys of the calls that are said to be wrong, in order.
        is_noticed: Whether the wrong function has an error or warning that it does not have in a sound step.
    """

    family: str
    variant: str
    kind: str
    precision: str
    truth: str
    judged: int
    backward: int
    skipped: int
    warnings: int
    errors: tuple[str, ...]
    is_noticed: bool

    @property
    def is_right(self) -> bool:
        """Whether the wrong call, and no other of its direction, is an error.

        A wrong result of a forward is no result of its function's: its backward is wrong as well, and may be named.
        """
        forward, backward = ([key for key in self.errors if key.endswith(end)] for end in (".forward", ".backward"))
        if self.kind == "operation":
            return [_function(key) for key in forward] == [self.truth]
        return not forward and [_function(key) for key in backward] == [self.truth] * (self.kind == "backward")


def checked_models(family: str) -> Iterator[CheckedModel]:
    """Yield the result of every step of a family: in each precision a sound one, and one for each fault."""
    for precision in PRECISIONS:
        if precision == "autocast" and family in WITHOUT_AUTOCAST:
            continue
        usual: frozenset[str] = frozenset()
        for fault in (None, *_faults(_SMALLEST[precision])):
            found, blamed = _checked(family, Variant(precision=precision, fault=fault), usual)
            usual = usual or blamed
            yield found


def _faults(smallest: float) -> Iterator[Fault]:
    for place, size in ((0.3, smallest), (0.6, 0.1), (0.8, 1.0)):
        yield Fault(kind="operation", place=place, size=size, is_noise=True)
    for place, size in ((0.5, 0.1), (0.75, 1.0)):
        yield Fault(kind="backward", place=place, size=size)


def _checked(family: str, variant: Variant, usual: frozenset[str]) -> tuple[CheckedModel, frozenset[str]]:
    """Return the result of a step, and the calls with an error or warning; `usual` are those of a sound step."""
    with tempfile.TemporaryDirectory() as folder:
        truth = _dump(family, variant, Path(folder))
        [found] = [check_dump(path) for path in dumps_below(Path(folder))]
    blamed = frozenset(call.key for status in (Status.ERROR, Status.WARNING) for call in found.of(status))
    errors = tuple(call.key for call in found.of(Status.ERROR))
    result = CheckedModel(
        family,
        variant.name,
        variant.fault.kind if variant.fault else "",
        variant.precision,
        truth,
        len(found.calls) - len(found.of(Status.SKIP)),
        sum(call.is_backward and call.status is not Status.SKIP for call in found.calls),
        len(found.of(Status.SKIP)),
        len(found.of(Status.WARNING)),
        errors,
        any(_function(key) == truth for key in {*errors, *(blamed - usual)}),
    )
    return result, blamed


def _dump(family: str, variant: Variant, folder: Path) -> str:
    """Dump one step with tensors; return the name of the function that is wrong."""
    prepared = prepare(family, variant)
    debugger = PrecisionDebugger(dump_path=str(folder), level="L1", task="tensor", step=[0])
    run = partial(step, family, variant, prepared)
    with (
        contextlib.closing(debugger),
        broken(prepared, variant.fault, run, partial(debugger.start, prepared.model)) as truth,
    ):
        run()
        debugger.stop()
        debugger.step()
    return truth.name


def _function(key: str) -> str:
    return key.split(".")[1].strip("_")
