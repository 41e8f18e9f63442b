"""Whose rules give the verdict on a result: ours, msprobe's, its vendor's for new kernels, or torch's own tests'."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.testing import assert_close

from trainermon.accuracy.judge import Judgement, Status
from trainermon.accuracy.legacy_metrics import LegacyCall, LegacyVerdict, legacy_verdict
from trainermon.accuracy.legacy_standards import FLOAT8, Edition, operation_of

# The vendor's limits for new kernels: the mean of relative differences; the largest may be ten times that.
CANN_LIMITS = {
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float32": 2**-13,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
}
CANN_LARGEST = 10
_CANN_FLOOR = 1e-7


class Rules(enum.Enum):
    """Whose rules.

    Attributes:
        TRAINERMON: The allowance of each element.
        MSPROBE: The first verdict of msprobe 26.
        MSPROBE8: The first verdict of msprobe 8.
        CANN: The vendor's standard for new kernels: mean and largest relative difference.
        TORCH: `torch.testing.assert_close` with its defaults.
    """

    TRAINERMON = "trainermon"
    MSPROBE = "msprobe"
    MSPROBE8 = "msprobe8"
    CANN = "cann"
    TORCH = "torch"

    @property
    def edition(self) -> Edition:
        """Whose columns a file of details has under these rules."""
        return Edition.V8 if self is Rules.MSPROBE8 else Edition.V26


@dataclasses.dataclass(frozen=True, slots=True)
class RuledVerdict:
    """Adds msprobe's verdict to a judgement, and lets the chosen rules have the last word.

    Attributes:
        rules: Whose rules.
        operation: The operation as msprobe calls it, `linear`.
        has_float8_inputs: An argument has a floating type of 8 bits.
        quantised: Operations whose integer results may differ by one.
    """

    rules: Rules
    operation: str
    has_float8_inputs: bool = False
    quantised: Collection[str] = ()

    def __call__(self, judgement: Judgement, given: Tensor, exact: Tensor) -> Judgement:
        """Return `judgement` on `given`, where float64 gives `exact`, with msprobe's verdict, by the chosen rules."""
        legacy = legacy_verdict(given, exact, self._call)
        status, reason = self._verdict(judgement, legacy, given, exact)
        return dataclasses.replace(judgement, status=status, reason=reason, legacy=legacy)

    @property
    def is_literal(self) -> bool:
        """Whether the golden result is of the arguments as recorded, whatever the kernel may have made of them."""
        return self.rules in (Rules.MSPROBE, Rules.MSPROBE8)

    @property
    def _call(self) -> LegacyCall:
        return LegacyCall(
            self.operation, self.rules.edition, self.has_float8_inputs, is_quantised=self.operation in self.quantised
        )

    def _verdict(self, judgement: Judgement, legacy: LegacyVerdict, given: Tensor, exact: Tensor) -> tuple[Status, str]:
        is_quantised = self._call.is_quantised and not given.is_floating_point()
        if self.is_literal or (is_quantised and given.shape == exact.shape):
            return Status(legacy.status), legacy.message
        match self.rules:
            case Rules.CANN:
                return _by_cann(given, exact)
            case Rules.TORCH:
                return _by_torch(given, exact)
            case _:
                return judgement.status, judgement.reason


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenRules:
    """The rules for a whole dump.

    Attributes:
        rules: Whose rules.
        quantised: Operations whose integer results may differ by one.
    """

    rules: Rules = Rules.TRAINERMON
    quantised: Collection[str] = ()

    def of_call(self, key: str, tensors: Iterable[Tensor]) -> RuledVerdict:
        """Return the review of the call with this key in a dump, `Functional.linear.0.forward`, of these arguments."""
        operation = operation_of(key.removesuffix(".forward").removesuffix(".backward"))
        has_float8 = any(str(tensor.dtype).removeprefix("torch.") in FLOAT8 for tensor in tensors)
        return RuledVerdict(self.rules, operation, has_float8, self.quantised)


def _by_cann(given: Tensor, exact: Tensor) -> tuple[Status, str]:
    if given.shape != exact.shape:
        return Status.ERROR, f"its shape is {tuple(given.shape)}, not {tuple(exact.shape)}"
    if not given.is_floating_point() and not given.is_complex():
        return (Status.PASS, "") if torch.equal(given, exact.to(given.dtype)) else (Status.ERROR, "it is not equal")
    limit = CANN_LIMITS.get(str(given.dtype).removeprefix("torch."))
    if limit is None:
        return Status.SKIP, f"the rules cann have no limit for {given.dtype}"
    if not given.numel():
        return Status.PASS, ""
    wide, rounded = given.double(), exact.to(given.dtype).double()
    same = (wide == rounded) | (wide.isnan() & rounded.isnan())
    relative = torch.where(same, 0.0, (wide - exact).abs() / (exact.abs() + _CANN_FLOOR))
    mean, largest = float(relative.mean()), float(relative.max())
    if mean < limit and largest < CANN_LARGEST * limit:
        return Status.PASS, ""
    return (
        Status.ERROR,
        f"relative differences: mean {mean:.3g}, limit {limit:.3g}; largest {largest:.3g}, ten times it",
    )


def _by_torch(given: Tensor, exact: Tensor) -> tuple[Status, str]:
    expected = exact.to(given.dtype)
    if str(given.dtype).removeprefix("torch.") in FLOAT8:
        given, expected = given.float(), expected.float()
    try:
        assert_close(given, expected, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return Status.ERROR, " ".join(str(error).split())[:200]
    return Status.PASS, ""
