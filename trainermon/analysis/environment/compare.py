"""Compares two environments, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainermon.analysis.environment.differences import (
    DifferenceLevel,
    EnvironmentComparison,
    SettingDifference,
    in_order,
    worst,
)
from trainermon.analysis.environment.draws import compare_random
from trainermon.analysis.environment.inputs import compare_data
from trainermon.analysis.environment.rules import LevelRules
from trainermon.analysis.environment.settings import (
    compare_code,
    compare_hyperparameters,
    compare_packages,
    compare_values,
    compare_variables,
)
from trainermon.analysis.environment.weights import compare_weights
from trainermon.core.environment.pack import SECTIONS, EnvironmentPack
from trainermon.core.environment.variables import VariableMeaning, meaning_of

_WHEN_RUN = "default_dtype"  # what torch says only once it is loaded, as all that comes with it
NOT_COLLECTED = "not collected there"
_KEPT_OF_RUNS = (VariableMeaning.NUMBERS, VariableMeaning.SPEED)
_OF_RANKS: Mapping[str, Callable[[EnvironmentPack, EnvironmentPack, LevelRules], Iterator[SettingDifference]]] = {
    "random": compare_random,
    "data": compare_data,
    "weights": compare_weights,
}
_SPECIAL: Mapping[str, Callable[..., Iterator[SettingDifference]]] = {
    "code": compare_code,
    "variables": compare_variables,
    "packages": compare_packages,
    "hyperparameters": compare_hyperparameters,
}


def compare_packs(one: EnvironmentPack, other: EnvironmentPack, rules: LevelRules) -> EnvironmentComparison:
    """Return what differs between two environments; a section that only one side has is an error.

    Runs keep of their environment only what the allow-list names: with one of them, only that is compared.
    """
    rows: list[SettingDifference] = []
    is_of_run = "run" in (one.origin, other.origin)
    for section in SECTIONS:
        has = [_has(pack, section) for pack in (one, other)]
        if all(has):
            compare = _OF_RANKS.get(section)
            found = compare(one, other, rules) if compare else _compare(section, one, other, rules)
            rows += [row for row in found if None not in row.names] if _is_part(section, one, other) else found
        elif any(has) and not (is_of_run and section not in _has_all(one, other)):
            rows.append(_not_collected(section, has_first=has[0], rules=rules))
    ordered = in_order(rows)
    levels = {
        section: worst(tuple(row for row in ordered if row.section == section))
        for section in SECTIONS
        if _has(one, section) or _has(other, section)
    }
    notes = tuple(f"{pack.source}: {note}" for pack in (one, other) for note in pack.notes)
    return EnvironmentComparison(sources=(one.source, other.source), rows=ordered, sections=levels, notes=notes)


def _is_part(section: str, one: EnvironmentPack, other: EnvironmentPack) -> bool:
    """Return whether a run and a pack know others of these settings: what the job got, and what its scripts say."""
    return section == "hyperparameters" and (one.origin == "run") != (other.origin == "run")


def _has(pack: EnvironmentPack, section: str) -> bool:
    if section in _OF_RANKS:
        return any(shown.get(section) for shown in pack.ranks.values())
    return section in pack.sections


def _has_all(one: EnvironmentPack, other: EnvironmentPack) -> tuple[str, ...]:
    """Return the sections that a run has, of which less is kept than of a pack."""
    return tuple(section for section in SECTIONS if _has(one, section) and _has(other, section))


def _not_collected(section: str, *, has_first: bool, rules: LevelRules) -> SettingDifference:
    names = (section, None) if has_first else (None, section)
    return SettingDifference(
        section=section,
        names=names,
        values=("collected", None) if has_first else (None, "collected"),
        level=rules.level(section, section, DifferenceLevel.ERROR),
        reason=NOT_COLLECTED,
    )


def _compare(
    section: str, one: EnvironmentPack, other: EnvironmentPack, rules: LevelRules
) -> Iterator[SettingDifference]:
    first, second = (_settings(pack, section, (one, other)) for pack in (one, other))
    if section in _SPECIAL:
        return _SPECIAL[section](first, second, rules)
    return compare_values(section, first, second, rules)


def _settings(pack: EnvironmentPack, section: str, both: tuple[EnvironmentPack, EnvironmentPack]) -> Mapping[str, Any]:
    settings = pack.sections.get(section, {})
    if section == "variables" and "run" in (both[0].origin, both[1].origin):
        return {name: value for name, value in settings.items() if meaning_of(name) in _KEPT_OF_RUNS}
    if section == "packages" and "run" in (both[0].origin, both[1].origin):
        common = set.intersection(*(set(side.sections.get(section, {})) for side in both))
        return {name: value for name, value in settings.items() if name in common}
    if section == "model" and len({_num_stages(side) for side in both}) > 1:  # a stage has some of the modules
        common = set.intersection(*(set(side.sections.get(section, {})) for side in both))
        return {name: value for name, value in settings.items() if name in common}
    if section == "torch" and not all(_WHEN_RUN in side.sections.get(section, {}) for side in both):
        common = set.intersection(*(set(side.sections.get(section, {})) for side in both))
        return {name: value for name, value in settings.items() if name in common}
    return settings


def _num_stages(pack: EnvironmentPack) -> Any:
    return pack.sections.get("layout", {}).get("pp_size", 1)
