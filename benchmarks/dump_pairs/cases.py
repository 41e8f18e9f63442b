"""Which pairs of dumps there are: what the two sides differ by, and what is wrong on the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.families.catalogue import COMPARED, FAMILIES

MENDED_ON = (*FAMILIES, "deepseek_v3", "gpt_neox")
"""Families on which the comparison was mended, or that were looked into; the others are judged when that is done."""

HELD_OUT = tuple(name for name in COMPARED if name not in MENDED_ON)
LEVELS = ("L0", "L1", "mix")
WITH_ATTENTION = ("llama", "gpt2", "bert", "t5", "mixtral", "vit", "gpt_neox", "deepseek_v3", "whisper", "swin")
"""Families whose attention can be computed in two ways."""

WITHOUT_DOUBLE = ("mixtral", "deepseek_v3")
"""Families that torch cannot compute in float64."""

WITHOUT_AUTOCAST = ("lstm",)
"""Families whose autocast cannot run everywhere: oneDNN's LSTM has no bfloat16 on processors without AVX-512."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong: `kind` is `weight`, `operation`, `backward` or `input`.

    `place` says which of the candidates of the model it is, from 0 to 1 in the order in which they run. `size` is
    relative; `is_noise`: each element is off by another amount, else all by the same factor.
    """

    kind: str
    place: float = 0.5
    size: float = 0.0
    is_noise: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a step is run.

    `precision` is `fp32`, `fp64`, `bf16` or `autocast`; `kernels` whether oneDNN's are used; `attention` `""` for the
    model's own; `extra` adds `+ 0.0` behind a module; `wrapped` and `renamed` give modules other names.
    """

    precision: str = "fp32"
    kernels: bool = True
    attention: str = ""
    extra: bool = False
    wrapped: bool = False
    renamed: bool = False
    fault: Fault | None = None

    @property
    def name(self) -> str:
        """A name for a folder."""
        words = [self.precision, *(["plain-kernels"] if not self.kernels else []), self.attention]
        words += [word for word in ("extra", "wrapped", "renamed") if getattr(self, word)]
        if self.fault:
            fault = self.fault
            words.append(f"{fault.kind}-{fault.place:g}-{fault.size:g}{'-noise' if fault.is_noise else ''}")
        return "_".join(word for word in words if word)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two ways to run the same step; the target's fault is what a comparison has to find."""

    what: str
    target: Variant
    golden: Variant = Variant()


def _operation(size: float, place: float, *, is_noise: bool = True) -> Fault:
    return Fault(kind="operation", place=place, size=size, is_noise=is_noise)


def _weight(size: float, place: float) -> Fault:
    return Fault(kind="weight", place=place, size=size, is_noise=True)


_BF16 = Variant(precision="bf16")

CASES: tuple[Case, ...] = (
    Case(what="another weight, 1e-3", target=Variant(fault=_weight(1e-3, 0.3))),
    Case(what="another weight, 3e-2", target=Variant(fault=_weight(3e-2, 0.8))),
    Case(what="operation, 1e-4", target=Variant(fault=_operation(1e-4, 0.25, is_noise=False))),
    Case(what="operation, 1e-3", target=Variant(fault=_operation(1e-3, 0.6))),
    Case(what="operation, 0.1", target=Variant(fault=_operation(0.1, 0.8))),
    Case(what="operation, twice as much", target=Variant(fault=_operation(1.0, 0.4, is_noise=False))),
    Case(what="backward alone, 1e-3", target=Variant(fault=Fault(kind="backward", place=0.5, size=1e-3))),
    Case(what="backward alone, 0.1", target=Variant(fault=Fault(kind="backward", place=0.75, size=0.1))),
    Case(what="another input", target=Variant(fault=Fault(kind="input"))),
    Case(what="other kernels: clean", target=Variant(kernels=False)),
    Case(what="other kernels, operation 1e-3", target=Variant(kernels=False, fault=_operation(1e-3, 0.35))),
    Case(what="fp64: clean", target=Variant(precision="fp64")),
    Case(what="fp64, operation 1e-3", target=Variant(precision="fp64", fault=_operation(1e-3, 0.5))),
    Case(what="bf16: clean", target=_BF16),
    Case(what="bf16, operation 0.16", target=Variant(precision="bf16", fault=_operation(0.16, 0.3))),
    Case(what="bf16, another weight, 0.1", target=Variant(precision="bf16", fault=_weight(0.1, 0.6))),
    Case(what="bf16 on both sides, 0.04", target=Variant(precision="bf16", fault=_operation(0.04, 0.7)), golden=_BF16),
    Case(what="autocast: clean", target=Variant(precision="autocast")),
    Case(what="autocast, operation 0.16", target=Variant(precision="autocast", fault=_operation(0.16, 0.55))),
    Case(what="autocast, another weight, 0.1", target=Variant(precision="autocast", fault=_weight(0.1, 0.4))),
    Case(what="extra calls: clean", target=Variant(extra=True)),
    Case(what="extra calls, operation 1e-3", target=Variant(extra=True, fault=_operation(1e-3, 0.7))),
    Case(what="wrapped, operation 1e-3", target=Variant(wrapped=True, fault=_operation(1e-3, 0.45))),
    Case(what="renamed, operation 1e-3", target=Variant(renamed=True, fault=_operation(1e-3, 0.65))),
    Case(what="eager against sdpa: clean", target=Variant(attention="eager")),
    Case(what="eager against sdpa, 1e-3", target=Variant(attention="eager", fault=_operation(1e-3, 0.9))),
)


def cases_of(family: str) -> Iterator[Case]:
    """Yield the cases that a family has."""
    for case in CASES:
        if case.target.attention and family not in WITH_ATTENTION:
            continue
        if case.target.precision == "fp64" and family in WITHOUT_DOUBLE:
            continue
        if case.target.precision == "autocast" and family in WITHOUT_AUTOCAST:
            continue
        yield case
