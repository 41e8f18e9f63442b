"""Compares what went into the model: equal, the same samples in another order, on other ranks, or others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.rules import LevelRules
from trainermon.analysis.environment.weights import FEATURES, features, relative, shown
from trainermon.core.environment.pack import EnvironmentPack

OTHER_ORDER = "same samples in another order"
OTHER_RANKS = "same samples on other ranks"
OTHER = "other samples"
_MASK = (1 << 64) - 1

StepInputs = dict[tuple[int, str], Mapping[str, Any]]  # by rank and name


def compare_data(one: EnvironmentPack, other: EnvironmentPack, rules: LevelRules) -> Iterator[SettingDifference]:
    """Yield a row for each input tensor of each step and rank of either side."""
    sides = [_by_step(pack) for pack in (one, other)]
    for step in sorted({*sides[0], *sides[1]}):
        first, second = (side.get(step, {}) for side in sides)
        moved = _are_on_other_ranks(first, second)
        for rank, name in sorted({*first, *second}):
            yield _row(step, rank, name, (first.get((rank, name)), second.get((rank, name))), rules, is_moved=moved)


def _row(  # noqa: PLR0913  # where it is, and what is there
    step: int,
    rank: int,
    name: str,
    found: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    rules: LevelRules,
    *,
    is_moved: bool,
) -> SettingDifference:
    label = f"step {step}, rank {rank}, {name}"
    if found[0] is None or found[1] is None:
        reason = OTHER_RANKS if is_moved else f"only the {'second' if found[0] is None else 'first'} has it"
    else:
        reason = _difference(found[0], found[1], is_moved=is_moved)
    usual = DifferenceLevel.WARNING if reason in (OTHER_ORDER, OTHER_RANKS) else DifferenceLevel.ERROR
    return SettingDifference(
        section="data",
        names=(label if found[0] is not None else None, label if found[1] is not None else None),
        values=(shown(found[0]), shown(found[1])),
        level=rules.level("data", name, usual) if reason else DifferenceLevel.SAME,
        reason=reason,
        details={"step": step, "rank": rank, "tag": name, "equal": not reason, **relative(*found)},
    )


def _by_step(pack: EnvironmentPack) -> dict[int, StepInputs]:
    found: dict[int, StepInputs] = {}
    for rank, recorded in pack.ranks.items():
        for step, tensors in recorded.get("data", {}).items():
            for name, entry in tensors.items():
                found.setdefault(int(step), {})[(rank, name)] = entry
    return found


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], *, is_moved: bool) -> str:
    if "hash" in one and "hash" in other:
        if one["hash"] == other["hash"] and one.get("shape") == other.get("shape"):
            return ""
        if one.get("samples") == other.get("samples") and one.get("samples"):
            return OTHER_ORDER
        return OTHER_RANKS if is_moved else OTHER
    first, second = features(one), features(other)
    return "" if all(first[name] == second[name] for name in FEATURES) else OTHER


def _are_on_other_ranks(one: StepInputs, other: StepInputs) -> bool:
    """Return whether the ranks of both sides together have the same samples of every tensor, each rank others."""
    return bool(one) and _multisets(one) == _multisets(other) is not None


def _multisets(inputs: StepInputs) -> dict[str, int] | None:
    """Return by tensor the sum of what stands for its samples over ranks; None where that was not recorded."""
    found: dict[str, int] = {}
    for (_, name), entry in inputs.items():
        if not entry.get("samples"):
            return None
        found[name] = (found.get(name, 0) + int(entry["samples"], 16)) & _MASK
    return found
