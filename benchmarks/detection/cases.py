"""Which runs there are: faults with what must be said of each, and healthy ways to train."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Mapping
from types import MappingProxyType

FAULT_STEPS, CLEAN_STEPS, RANKS_STEPS = 230, 300, 120
FIRST_FAULT, FIRST_FAULT_ON_RANKS = (150, 170), (70, 80)
"""The fault begins on a step between these; usual ranges are known by then. A comparison of ranks does without."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and what finds it.

    Attributes:
        rules: Patterns of rules, any one of which finds it.
        within: Steps in which it should be found.
        ranks: Ranks of the job.
        blames: An alert counts only for the rank that has the fault.
    """

    rules: tuple[str, ...]
    within: int
    ranks: int = 1
    blames: bool = False


NONFINITE = ("*-nonfinite*",)
FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "weight-nan": Fault(rules=NONFINITE, within=2),
        "gradient-inf": Fault(rules=NONFINITE, within=2),
        "activation-nan": Fault(rules=NONFINITE, within=2),
        "float16-overflow": Fault(rules=("near-overflow", "activation-nonfinite", "activation-spike"), within=20),
        "learning-rate-x100": Fault(rules=("*-spike", "*-jump", "update-ratio-high"), within=5),
        "gradient-spike": Fault(rules=("gradient-spike", "gradient-jump"), within=5),
        "gradient-spike-once": Fault(rules=("gradient-jump", "gradient-spike"), within=5),
        "bad-batches": Fault(rules=("loss-spike", "loss-jump"), within=5),
        "bad-batch-once": Fault(rules=("loss-jump", "loss-spike", "gradient-jump"), within=5),
        "second-moment-lost": Fault(rules=("update-spike", "update-ratio-high"), within=5),
        "vanishing-gradients": Fault(rules=("gradient-vanishing", "gradient-spike"), within=40),
        "massive-activations": Fault(rules=("activation-spike",), within=5),
        "dead-relu": Fault(rules=("activation-dead", "gradient-dead"), within=25),
        "frozen-layer": Fault(rules=("gradient-dead",), within=25),
        "expert-collapse": Fault(rules=("expert-*",), within=30),
        "loss-scale-collapse": Fault(rules=("loss-scale-collapse", "steps-skipped*"), within=20),
        "padding-only": Fault(rules=("loss-*", "gradient-*"), within=20),
        "nothing-learned": Fault(rules=("loss-flat",), within=60),
        "throughput-drop": Fault(rules=("throughput-low", "step-time-slow"), within=20),
        "bit-flip": Fault(rules=("replica-divergence",), within=2, ranks=4, blames=True),
        "all-reduce-skipped": Fault(rules=("replica-divergence",), within=2, ranks=4),
        "rank-learning-rate": Fault(rules=("replica-divergence",), within=2, ranks=4, blames=True),
        "rank-nan": Fault(rules=("gradient-nonfinite-local",), within=2, ranks=4, blames=True),
        "rank-bad-data": Fault(rules=("*-outlier-rank",), within=10, ranks=4, blames=True),
        "straggler": Fault(rules=("straggler",), within=20, ranks=4, blames=True),
    }
)

CLEAN: Mapping[str, int] = MappingProxyType(
    {
        "plain": 1,
        "dropout": 1,
        "learning-rate-restarts": 1,
        "float16-scaler": 1,
        "evaluation": 1,
        "accumulation": 1,
        "resume": 1,
        "outlier-batches": 1,
        "experts": 1,
        "ranks": 4,
        "ranks-explicit": 4,
    }
)
"""Healthy ways to train, with the ranks of each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One labelled run.

    Attributes:
        name: Of the fault, or of the healthy way to train.
        size: Of the GPT; or the name of a family.
        seed: Of everything random in it.
        ranks: How many there are.
        steps: How many are trained.
        first_bad: The step on which the fault begins, -1 in a clean one.
        split: How a family's model is split over the ranks.
    """

    name: str
    size: str
    seed: int
    ranks: int
    steps: int
    first_bad: int = -1
    split: str = "plain"

    @property
    def run_id(self) -> str:
        """Name of the run."""
        split = "" if self.split == "plain" else f"-{self.split}"
        return f"{self.name}-{self.size}-{self.seed}{split}"

    @property
    def number(self) -> int:
        """A number that is different for every run, for its random generators."""
        return zlib.crc32(self.run_id.encode())


SEEDS: Mapping[str, int] = MappingProxyType({"small": 4, "large": 2})
"""Seeds of each kind of run by size of the model; rules were tuned on the even ones."""


def all_cases() -> list[Case]:
    """Return every fault and every clean way to train, for both sizes and all seeds."""
    return [
        make_case(name, size, seed) for size, num in SEEDS.items() for seed in range(num) for name in (*FAULTS, *CLEAN)
    ]


def make_case(name: str, size: str, seed: int) -> Case:
    """Return one run; its fault begins on a step that depends on all three."""
    fault = FAULTS.get(name)
    ranks = fault.ranks if fault else CLEAN[name]
    if fault is None:
        return Case(name=name, size=size, seed=seed, ranks=ranks, steps=CLEAN_STEPS if ranks == 1 else RANKS_STEPS)
    steps, between = (FAULT_STEPS, FIRST_FAULT) if ranks == 1 else (RANKS_STEPS, FIRST_FAULT_ON_RANKS)
    case = Case(name=name, size=size, seed=seed, ranks=ranks, steps=steps)
    return dataclasses.replace(case, first_bad=random.Random(case.number).randint(*between))
