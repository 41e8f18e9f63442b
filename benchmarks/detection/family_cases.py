"""Which runs of the families there are, and which families no figure of a rule was chosen on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from benchmarks.detection.cases import NONFINITE, Case, Fault
from benchmarks.families.catalogue import FAMILIES

TUNING = ("llama", "t5", "resnet", "gan", "lstm", "tabular")
HELD_OUT = tuple(name for name in FAMILIES if name not in TUNING)
"""No figure was fitted to these; what was changed after a look at them is told in docs/detection.md."""

_ANY = ("*-spike", "*-jump", "*-drift", "loss-*", "gradient-*", "update-ratio-high")

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "weight-nan": Fault(rules=NONFINITE, within=2),
        "gradient-inf": Fault(rules=NONFINITE, within=2),
        "activation-nan": Fault(rules=NONFINITE, within=2),
        "learning-rate-x100": Fault(rules=("learning-rate-*", *_ANY), within=5),
        "learning-rate-zero": Fault(rules=("learning-rate-*", "loss-flat"), within=20),
        "gradients-x50": Fault(rules=("gradient-*", "loss-*"), within=10),
        "gradient-once-x100": Fault(rules=("gradient-jump", "gradient-spike"), within=5),
        "bad-batches": Fault(rules=("loss-*", "gradient-*"), within=5),
        "bad-batch-once": Fault(rules=("loss-*", "gradient-jump"), within=5),
        "noisy-labels": Fault(rules=("loss-*", "gradient-*"), within=60),
        "second-moment-lost": Fault(rules=("update-*", "loss-*"), within=5),
        "weight-decay-x3000": Fault(rules=(*_ANY, "parameter-*"), within=80),
        "growing-activations": Fault(rules=("activation-*", "loss-*", "gradient-*"), within=80),
        "massive-activations": Fault(rules=("activation-*", "loss-*"), within=5),
        "vanishing-gradients": Fault(rules=("gradient-*",), within=40),
        "frozen-layer": Fault(rules=("gradient-dead", "gradient-spike"), within=25),
        "dead-module": Fault(rules=("activation-dead", "gradient-dead", "activation-spike"), within=25),
        "same-batch": Fault(rules=("batch-*", "loss-*"), within=60),
        "eval-mode": Fault(rules=("eval-mode",), within=20),
        "bit-flip": Fault(rules=("replica-divergence",), within=2, ranks=2),
        "all-reduce-skipped": Fault(rules=("replica-divergence",), within=2, ranks=2),
        "rank-learning-rate": Fault(rules=("replica-divergence",), within=2, ranks=2),
        "rank-nan": Fault(rules=("gradient-nonfinite-local",), within=2, ranks=2, blames=True),
        "rank-bad-labels": Fault(rules=("loss-*", "*-outlier-rank"), within=20, ranks=2, blames=True),
    }
)
BAD_RANK = 1

CLEAN_STEPS: Mapping[str, int] = MappingProxyType({"decayed": 4000, "constant": 800, "restarts": 900})
"""Healthy ways to train on one process: from the warm-up to the end of a cosine, at one rate, with warm restarts."""

CLEAN_SEEDS = 2
"""So many of each; with those of the first seed alone there would be half as many clean steps."""

SLOW, SLOW_STEPS = ("t5", "bert", "mamba", "mixtral"), 2000
"""The longest runs of these are that short."""

SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ddp": ("llama", "resnet", "gpt2", "mixtral", "vit"),
        "fsdp2": ("llama", "lstm", "gpt2", "bert", "unet"),
        "zero2": ("tabular", "mamba"),
        "zero3": ("t5", "gpt2"),
    }
)
"""By way to split a model over two ranks, the families."""

FAULTY = "faults"
"""Name of a training that is broken in one way after the other, each time from the same healthy step on."""

BEGINS, BEGINS_ON_RANKS, ENGINE_STEPS = (130, 220), (110,), 200
OF_SHARDS = ("activation-nan", "learning-rate-x100", "bad-batches", "frozen-layer", "rank-bad-labels")
UNLABELLED = ("gan",)
OF_LABELS = ("noisy-labels", "bad-batches", "bad-batch-once", "rank-bad-labels")
"""What has no labels has no wrong ones."""


def family_cases() -> Iterator[Case]:
    """Yield every training of every family, those with faults first."""
    for family in FAMILIES:
        yield Case(name=FAULTY, size=family, seed=0, ranks=1, steps=BEGINS[-1])
    for split, families in SPLITS.items():
        for family in families:
            # an engine of DeepSpeed cannot be put back to where it was: there is no fault
            name, steps = ("constant", ENGINE_STEPS) if split.startswith("zero") else (FAULTY, BEGINS_ON_RANKS[-1])
            yield Case(name=name, size=family, seed=0, ranks=2, steps=steps, split=split)
    for seed, (name, steps), family in itertools.product(range(CLEAN_SEEDS), CLEAN_STEPS.items(), FAMILIES):
        num_steps = min(steps, SLOW_STEPS) if family in SLOW else steps
        yield Case(name=name, size=family, seed=seed, ranks=1, steps=num_steps)


def faults_of(case: Case) -> dict[int, list[str]]:
    """Return the faults of a training by the step on which they begin."""
    if case.split == "fsdp2":
        names = list(OF_SHARDS)
    else:
        names = [name for name, fault in FAULTS.items() if fault.ranks == case.ranks]
    names = [name for name in names if case.size not in UNLABELLED or name not in OF_LABELS]
    begins = BEGINS if case.ranks == 1 else BEGINS_ON_RANKS
    turn = case.number % len(begins)
    return {step: names[(at + turn) % len(begins) :: len(begins)] for at, step in enumerate(begins)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a recorded training: `steps` steps, recorded from number `first` on, that are its steps from `at` on.

    Those of a fault follow, by the training's own count, what was healthy before `at`.
    """

    name: str
    at: int
    first: int
    steps: int
