"""All families, by name: `FAMILIES` are in every bench; `COMPARED` are these and those for compare alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.families.compare_only import COMPARE_ONLY
from benchmarks.families.family import Family
from benchmarks.families.images import IMAGES
from benchmarks.families.language import LANGUAGE
from benchmarks.families.sequences import SEQUENCES
from benchmarks.families.tabular import TABULAR

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (*LANGUAGE, *IMAGES, *SEQUENCES, *TABULAR)}
)
COMPARED: Mapping[str, Family] = MappingProxyType({**FAMILIES, **{family.name: family for family in COMPARE_ONLY}})
