"""All families, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.families.family import Family
from benchmarks.families.images import IMAGES
from benchmarks.families.language import LANGUAGE
from benchmarks.families.sequences import SEQUENCES
from benchmarks.families.tabular import TABULAR

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (*LANGUAGE, *IMAGES, *SEQUENCES, *TABULAR)}
)
