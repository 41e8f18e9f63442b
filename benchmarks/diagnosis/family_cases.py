"""Which faults are injected into which family: drawn, for every family and split, from all places that there are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from benchmarks.diagnosis.cases import FINITE, MORE_SITES, SITES, SPLITS, Case, Site
from benchmarks.diagnosis.family_jobs import Places, places_of
from benchmarks.families.catalogue import FAMILIES

FAMILY_SPLITS = ("plain", "ddp", "fsdp2", "zero2", "zero3")
NUM_NONFINITE, NUM_FINITE = 6, 3
"""Faults per family and split."""

TUNED, HELD_OUT = tuple(FAMILIES)[0::2], tuple(FAMILIES)[1::2]
"""Mechanisms are tuned on the first; what is reported is said of the others, which nobody looks at meanwhile."""

_WITHOUT_UNREDUCED = ("zero2", "zero3")
_ELSEWHERE: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "reduction": ("plain", "fsdp2", *_WITHOUT_UNREDUCED),  # DistributedDataParallel alone lets a script reduce
        "between": _WITHOUT_UNREDUCED,  # the engine clips and steps in one call
    }
)
"""Splits in which a place does not exist."""

_NONFINITE = {name: site for name, site in (SITES | MORE_SITES).items() if name != "output-once"}
_FINITE = {**FINITE, "reduction": Site(direction="reduction", num=1, effects=("wrong-scale",))}


def family_cases(families: Sequence[str], splits: Sequence[str] = FAMILY_SPLITS, seed: int = 0) -> list[Case]:
    """Return the faults and the healthy run of every family in every split."""
    drawn = {split: itertools.cycle(_shuffled(split, _NONFINITE)) for split in splits}
    finite = {split: itertools.cycle(_shuffled(split, _FINITE)) for split in splits}
    return [
        case
        for split, name in itertools.product(splits, families)
        for case in _cases_of(split, name, seed, (drawn[split], finite[split]))
    ]


def _shuffled(split: str, sites: Mapping[str, Site]) -> list[str]:
    names = [name for name in sites if split not in _ELSEWHERE.get(name, ())]
    random.Random(f"{split} {len(sites)}").shuffle(names)
    return names


def _cases_of(split: str, family: str, seed: int, sites: tuple[Iterator[str], Iterator[str]]) -> Iterator[Case]:
    chance, number = random.Random(f"{split} {family} {seed}"), itertools.count()
    places = places_of(family)
    lacking = () if places.takes_numbers else ("batch",)
    lacking += () if places.operations else ("own-operation", "own-gradient")
    possible = (site for site in sites[0] if site not in lacking)
    for site in itertools.islice(possible, NUM_NONFINITE):
        case = Case(split=split, seed=seed, number=next(number), site=site, family=family)
        yield _placed(case, _NONFINITE[site], places, chance)
    healthy = Case(split=split, seed=seed, number=next(number), site="healthy", effect="healthy", family=family)
    yield healthy
    for site in itertools.islice(sites[1], NUM_FINITE):
        case = Case(split=split, seed=seed, number=next(number), site=site, family=family, against=healthy.run_id)
        yield _placed(case, _FINITE[site], places, chance)


def _placed(case: Case, site: Site, places: Places, chance: random.Random) -> Case:
    """Return `case` with everything that is drawn: effect, module, rank, step."""
    if case.site in ("batch", "loss", "loss-gradient"):
        module = "(input)" if case.site == "batch" else "(loss)"
    elif case.site in ("own-operation", "own-gradient"):
        module = chance.choice(list(places.operations)) or "(model)"
    else:
        module = chance.choice(list(places.holders))
    effects = [effect for effect in site.effects if effect != "bit-flip"]
    return dataclasses.replace(
        case,
        effect=chance.choice(effects),
        module=module,
        twins=tuple(places.holders.get(module, ())),
        rank=chance.randrange(SPLITS[case.split]),
        step=chance.randint(1, 3),
    )
