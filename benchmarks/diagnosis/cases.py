"""Which faults are injected where, in every parallel split; what a diagnosis has to say of each is the case itself."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

SPLITS: Mapping[str, int] = MappingProxyType(
    {
        "plain": 1,
        "ddp": 2,
        "fsdp2": 2,
        "zero1": 2,
        "zero2": 2,
        "zero3": 2,
        "tp2": 2,
        "pp2": 2,
        "dp2": 2,
        "tp2dp2": 4,
    }
)
"""How a training is spread, and on how many ranks; the last four are Megatron-Core's, `zero*` DeepSpeed's."""
MEGATRON = ("tp2", "pp2", "dp2", "tp2dp2")

VALUES = ("nan", "inf", "float16-overflow", "division-by-zero", "stale-memory")
ROLES = ("embedding", "attention", "mlp", "norm", "head", "router")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in a step at which something can break.

    Attributes:
        direction: The phase that a diagnosis must name.
        num: Cases per split and seed.
        roles: Kinds of module.
        effects: What may happen to a value there.
        megatron_roles: The same for Megatron's model, if it is different.
    """

    direction: str
    num: int
    roles: tuple[str, ...] = ROLES
    effects: tuple[str, ...] = VALUES
    megatron_roles: tuple[str, ...] | None = None

    def roles_in(self, split: str) -> tuple[str, ...]:
        """Return the roles that there are in a split."""
        return self.roles if split not in MEGATRON or self.megatron_roles is None else self.megatron_roles


SITES: Mapping[str, Site] = MappingProxyType(
    {
        "weight": Site(direction="parameter", num=3, effects=("nan", "inf", "bit-flip")),
        "output": Site(direction="forward", num=4),
        "own-operation": Site(direction="forward", num=1, roles=("attention-code", "block"), megatron_roles=("block",)),
        "output-once": Site(direction="forward", num=1),
        "batch": Site(direction="forward", num=1, roles=("input",), effects=("nan", "inf"), megatron_roles=()),
        "loss": Site(direction="forward", num=1, roles=("loss",)),
        "gradient": Site(direction="backward", num=3),
        "own-gradient": Site(direction="backward", num=1, roles=("attention-code", "block"), megatron_roles=("block",)),
        "weight-gradient": Site(direction="backward", num=1, roles=("attention", "mlp")),
        "loss-gradient": Site(direction="backward", num=1, roles=("loss",)),
        "moment": Site(direction="optimizer", num=1, effects=("nan", "inf", "sign-flip")),
    }
)
"""Where values can go wrong: in a weight between two steps; in what a module returns, always or in one forward only;
in an operation of a module's own code between its parts; in the batch; in the loss; in the gradients on their way back
through each of these; in the gradient of a weight alone; in the moments of the optimizer."""

MORE_SITES: Mapping[str, Site] = MappingProxyType(
    {
        "huge": Site(direction="parameter", num=1, effects=("huge",)),
        "reduction": Site(direction="reduction", num=1),
        "between": Site(direction="before_step", num=1),
    }
)
"""Places in the families alone: a weight that is finite and far too large; what a reduction gives one rank; a gradient
between the backward and the optimizer's step."""

FINITE: Mapping[str, Site] = MappingProxyType(
    {
        "weight": Site(direction="parameter", num=1, effects=("wrong-scale", "zeroed", "one-bit")),
        "output": Site(direction="forward", num=2, effects=("wrong-scale", "zeroed", "one-bit", "stale-buffer")),
        "gradient": Site(direction="backward", num=1, effects=("wrong-scale", "zeroed", "one-bit", "stale-buffer")),
        "moment": Site(direction="optimizer", num=1, effects=("wrong-scale", "zeroed", "one-bit")),
    }
)
"""Faults that stay finite, which only a comparison with a healthy run shows; its model has no router in Megatron."""

CLEAN = MappingProxyType({"healthy": "", "dead-end": "probe", "large-values": "head"})
"""Clean runs, and the module of what is no fault: a bad value that nothing is made of, large values."""

SEEDS = (0, 1, 2, 3)
"""Mechanisms are tuned on even seeds; what is reported is said of odd ones."""
UNSEEN_SEED = 5
"""Of Megatron, whose table of the others was looked at: draws that nothing was tuned on."""
LEAN_SEEDS = (2, 3)
"""Runs that recompute their activations, and whose monitor is not configured: it stores gradients and the loss only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: `effect` happens at `site` in `module` of `rank` on `step`. In a clean run `site` is one of `CLEAN`.

    A fault that stays finite is held `against` the run with that id. Of a fault in the optimizer `module` is decided by
    the worker: a shard of its moments must be on `rank`. `family` is "" of the GPT and of Megatron; `twins` are modules
    that share the module's weight. `harmless` is what the worker found: everything stayed finite, though it should not.
    """

    split: str
    seed: int
    number: int
    site: str
    role: str = ""
    effect: str = ""
    module: str = ""
    rank: int = 0
    step: int = 2
    against: str = ""
    family: str = ""
    twins: Sequence[str] = ()
    harmless: bool = False

    @property
    def run_id(self) -> str:
        """Name of the run."""
        place = [self.split, self.family, str(self.seed), f"{self.number:02d}", self.site, self.role, self.effect]
        return "-".join(filter(None, place))

    @property
    def direction(self) -> str:
        """The phase that a diagnosis must name, "" in a clean run."""
        if self.site == "moment" and self.is_lean:
            return "parameter"
        site = SITES.get(self.site) or MORE_SITES.get(self.site)
        return site.direction if site is not None else ""

    @property
    def is_lean(self) -> bool:
        """Whether the monitor stores gradients and the loss only."""
        return self.seed in LEAN_SEEDS

    @property
    def shown_on(self) -> int:
        """The step that a diagnosis must name: nobody looks at what the optimizer made before the next one, if lean."""
        return self.step + (self.site == "moment" and self.is_lean)


def all_cases(splits: Sequence[str] = tuple(SPLITS), seeds: Sequence[int] = SEEDS) -> list[Case]:
    """Return every fault and every clean run of the splits."""
    return [case for split, seed in itertools.product(splits, seeds) for case in _cases_of(split, seed)]


def _cases_of(split: str, seed: int) -> Iterator[Case]:
    chance = random.Random(f"{split} {seed}")
    number = itertools.count()
    for name, site in SITES.items():
        roles = list(site.roles_in(split))
        chance.shuffle(roles)
        for role in itertools.islice(itertools.cycle(roles), site.num):
            case = Case(split=split, seed=seed, number=next(number), site=name, role=role)
            yield _placed(case, chance)
    clean = []
    for name, module in CLEAN.items():
        if not module or split not in MEGATRON:
            clean.append(Case(split=split, seed=seed, number=next(number), site=name, effect=name, module=module))
    yield from clean
    if seed in LEAN_SEEDS:
        return
    for name, site in FINITE.items():
        roles = [role for role in site.roles if role != "router" or split not in MEGATRON]
        for role in chance.sample(roles, site.num):
            case = Case(split=split, seed=seed, number=next(number), site=name, role=role, against=clean[0].run_id)
            yield _placed(case, chance)


def _placed(case: Case, chance: random.Random) -> Case:
    """Return `case` with everything that is drawn: effect, module, rank, step."""
    effects = list((FINITE if case.against else SITES)[case.site].effects)
    if "bit-flip" in effects and case.role != "norm":  # one bit makes only a value from 1 to 2 infinite
        effects.remove("bit-flip")
    module = chance.choice(modules_of(case.split, case.role))
    if case.site == "weight" and case.role == "embedding" and case.is_lean:  # a word that does not occur does no harm
        module = "embedding.position_embeddings" if case.split in MEGATRON else "positions"
    rank = case.number % SPLITS[case.split]
    if case.split == "pp2":
        rank = _stage_of(module)
    return dataclasses.replace(case, effect=chance.choice(effects), module=module, rank=rank, step=chance.randint(1, 3))


def _stage_of(module: str) -> int:
    return 0 if module.startswith(("embedding", "decoder.layers.0")) else 1


def modules_of(split: str, role: str) -> list[str]:
    """Return the names of all modules of a kind."""
    if role in ("input", "loss"):
        return [f"({role})"]
    return list(_MEGATRON[role] if split in MEGATRON else _GPT[role])


_LAYERS = (0, 1)
_GPT = {
    "embedding": ["tokens", "positions"],
    "attention": [f"h.{i}.attention.{part}" for i in _LAYERS for part in ("qkv", "projection")],
    "mlp": ["h.0.mlp.up", "h.0.mlp.down", "h.1.mlp.experts.1.up", "h.1.mlp.experts.0.down"],
    "norm": ["h.0.norm1", "h.1.norm1", "h.0.norm2", "h.1.norm2", "norm"],
    "head": ["head"],
    "router": ["h.1.mlp.router"],
    "block": ["h.0", "h.1"],
    "attention-code": ["h.0.attention", "h.1.attention"],
}
_LAYER = "decoder.layers"
_MEGATRON = {
    "embedding": ["embedding.word_embeddings"],
    "attention": [f"{_LAYER}.{i}.self_attention.{part}" for i in _LAYERS for part in ("linear_qkv", "linear_proj")],
    "mlp": [f"{_LAYER}.{i}.mlp.{part}" for i in _LAYERS for part in ("linear_fc1", "linear_fc2")],
    "norm": [
        *(f"{_LAYER}.{i}.{part}" for i in _LAYERS for part in ("input_layernorm", "pre_mlp_layernorm")),
        "decoder.final_layernorm",
    ],
    "head": ["output_layer"],
    "router": [f"{_LAYER}.{i}.mlp.router" for i in _LAYERS],
    "block": [f"{_LAYER}.{i}" for i in _LAYERS],
}
