"""What a silent error is: what goes wrong, what names it rightly, and the training that has it."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from benchmarks.silent.loop import Loop

Build = Callable[..., Loop]


class Mechanism(str, enum.Enum):
    """The closed list of what kinds of silent errors there are."""

    STILL = "optimizer does not move"
    UNREDUCED = "gradients not reduced"
    SCALE = "wrong scale"
    DATA = "data"
    COPIES = "copies differ"
    START = "initialisation"
    SETTINGS = "settings"
    RESTART = "restart"
    RECOMPUTED = "recomputation"
    LOSS = "loss"
    LAYOUT = "layout"
    FROZEN = "frozen"


FRAMEWORKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "plain": ("plain_optimizer", "plain_data", "plain_model"),
        "ddp": ("ddp_wrapper", "ddp_reduction", "ddp_ranks"),
        "fsdp2": ("fsdp2_shards", "fsdp2_numbers"),
        "hard": ("hard_copies", "hard_losses"),
        "megatron": (
            "megatron_core.tensor",
            "megatron_core.sequence",
            "megatron_core.pipeline",
            "megatron_core.replicas",
        ),
        "deepspeed": ("deepspeed_zero.cases",),
    }
)
"""By framework, the modules with its cases."""
HALVES = ("seen", "unseen")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SilentCase:
    """A silent error; with `broken=False`, `build` returns the same training without it.

    Attributes:
        name: Of the framework and the error; unique.
        source: Where it was published.
        framework: One of `FRAMEWORKS`.
        wrong: What is wrong, in one sentence.
        mechanism: What kind of error it is; None of a hard healthy program.
        phrases: An alert or a diagnosis that contains one of these, in lower case, names the mechanism.
        first_wrong: The first step in which something is wrong.
        modules: Modules (or parts of their names) of which one is to be blamed; empty: none.
        phases: Parts of a step in which the first difference from the twin may be.
        is_visible: Whether somebody who sees all tensors of this run, and no other run, could know that it is wrong.
        ranks: How many there are.
        restart: The step before which the job ends and another process goes on from a checkpoint; 0: none does.
        build: Returns the training, with or without the error.
    """

    name: str
    source: str
    framework: str
    wrong: str
    mechanism: Mechanism | None
    phrases: tuple[str, ...]
    first_wrong: int
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    is_visible: bool
    ranks: int
    restart: int
    build: Build

    @property
    def half(self) -> str:
        """`seen`: mechanisms may be mended on it; `unseen`: only judged."""
        return HALVES[hashlib.sha256(self.name.encode()).digest()[-1] % 2]


_registered: dict[str, SilentCase] = {}


def silent(
    framework: str,
    source: str,
    wrong: str,
    mechanism: Mechanism | None,
    *,
    phrases: tuple[str, ...] = (),
    first_wrong: int = 0,
    modules: tuple[str, ...] = (),
    phases: tuple[str, ...] = (),
    visible: bool = False,
    ranks: int = 1,
    restart: int = 0,
) -> Callable[[Build], Build]:
    """Register the decorated function as the training of a case that is named after it and its framework."""

    def register(build: Build) -> Build:
        name = f"{framework}-{build.__name__.replace('_', '-')}"
        if name in _registered:
            raise ValueError(f"silent case {name}: registered twice, by {build.__module__}")
        _registered[name] = SilentCase(
            name=name,
            source=source,
            framework=framework,
            wrong=wrong,
            mechanism=mechanism,
            phrases=phrases,
            first_wrong=first_wrong,
            modules=modules,
            phases=phases,
            is_visible=visible,
            ranks=ranks,
            restart=restart,
            build=build,
        )
        return build

    return register


def cases_of(framework: str) -> Iterator[SilentCase]:
    """Yield the cases of a framework, in the order in which they are written."""
    for module in FRAMEWORKS[framework]:
        importlib.import_module(f"benchmarks.silent.{module}")
    return (case for case in _registered.values() if case.framework == framework)


def all_cases() -> Mapping[str, SilentCase]:
    """Return all cases by name."""
    return {case.name: case for framework in FRAMEWORKS for case in cases_of(framework)}
