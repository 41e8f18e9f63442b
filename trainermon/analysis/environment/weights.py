"""Compares weights over any split: what the ranks recorded of a parameter adds up to the whole one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.environment.pack import EnvironmentPack

FEATURES = ("max", "min", "mean", "norm")
_MASK = (1 << 64) - 1


def compare_weights(one: EnvironmentPack, other: EnvironmentPack, rules: LevelRules) -> Iterator[SettingDifference]:
    """Yield a row for each parameter of either side, whole; a copy that differs from another rank's has its own row.

    Equal hashes are equal bits in the same places. Where a side has no hash, msprobe's four numbers are compared.
    """
    sides = [whole_weights(pack) for pack in (one, other)]
    for name in sorted({*sides[0], *sides[1]}):
        found = (sides[0].get(name), sides[1].get(name))
        reason = "" if None in found else _difference(*found)  # type: ignore[arg-type]  # neither is None
        names = (name if found[0] else None, name if found[1] else None)
        is_same = not reason and None not in names
        one_sided = "only the second has it" if found[0] is None else "only the first has it" if not found[1] else ""
        yield SettingDifference(
            section="weights",
            names=names,
            values=(shown(found[0]), shown(found[1])),
            level=DifferenceLevel.SAME if is_same else rules.level("weights", name),
            reason=reason or one_sided,
            details={"step": 0, "rank": _rank(found), "equal": _equal(names, reason), **relative(*found)},
        )
    for side, pack in enumerate((one, other)):
        yield from _copies(pack, side, rules)


def whole_weights(pack: EnvironmentPack) -> dict[str, dict[str, Any]]:
    """Return what the ranks recorded of each parameter, put together; copies of one part count once.

    Of packs of msprobe, where nothing says what a rank holds of a parameter, each rank's are parameters of their own.
    """
    found: dict[str, dict[str, Any]] = {}
    for rank, recorded in sorted(pack.ranks.items()):
        for name, entry in recorded.get("weights", {}).items():
            if "regions" in entry:
                _add(found.setdefault(name, {"regions": {}, "count": 0, "hash": 0, **_of_whole(entry)}), entry)
            else:
                found[f"rank{rank}.{name}" if rank else name] = {**entry, "rank": rank}
    return found


def _of_whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    shape = entry.get("shape", [])
    return {"shape": shape, "dtype": entry.get("dtype", ""), "total": math.prod(shape), "sum": 0.0, "sum_sq": 0.0,
            "min": math.inf, "max": -math.inf, "nonfinite": 0}  # fmt: skip


def _add(whole: dict[str, Any], entry: Mapping[str, Any]) -> None:
    new = {region: part for region, part in entry["regions"].items() if region not in whole["regions"]}
    whole["regions"].update(new)
    for part in new.values():
        whole["hash"] = (whole["hash"] + int(part["hash"], 16)) & _MASK
        whole["count"] += part["count"]
        whole["sum"] += part["sum"]
        whole["sum_sq"] += part["sum_sq"]
        whole["nonfinite"] += part["nonfinite"]
        whole["min"], whole["max"] = min(whole["min"], part["min"]), max(whole["max"], part["max"])


def features(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the four numbers that msprobe has of a tensor; None of those that are not known."""
    if "mean" in entry:
        return {name: entry.get(name) for name in FEATURES}
    count = entry.get("count") or 0
    if not count or entry.get("nonfinite"):
        return dict.fromkeys(FEATURES)
    return {
        "max": entry["max"],
        "min": entry["min"],
        "mean": entry["sum"] / count,
        "norm": math.sqrt(entry["sum_sq"]),
    }


def relative(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return how far the four numbers of the second are from the first's, relative to these; None where not known."""
    sides = [features(entry) if entry else dict.fromkeys(FEATURES) for entry in (one, other)]
    return {f"{name}_relative_diff": _relative(sides[0][name], sides[1][name]) for name in FEATURES}


def _relative(one: Any, other: Any) -> float | None:
    if not isinstance(one, int | float) or not isinstance(other, int | float) or not one:
        return None
    return abs(one - other) / abs(one)


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how two tensors differ; "" if they do not, as far as it is known."""
    for name in ("shape", "dtype"):
        if name in one and name in other and one[name] != other[name]:
            return f"another {name}"
    for side, entry in (("first", one), ("second", other)):
        if "total" in entry and entry["count"] != entry["total"]:
            return f"of the {side}, {entry['count']:,} of {entry['total']:,} elements were recorded"
    if "hash" in one and "hash" in other:
        return "" if one["hash"] == other["hash"] else _moments_say(one, other)
    first, second = features(one), features(other)
    return "" if all(_close(first[name], second[name]) for name in FEATURES) else "other values"


def _moments_say(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    first, second = features(one), features(other)
    same = None not in first.values() and all(_close(first[name], second[name]) for name in FEATURES)
    return "same values in another order, or nearly so" if same else "other values"


def _close(one: Any, other: Any) -> bool:
    """Return whether two numbers are equal but for the rounding of sums in float32."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=2e-6, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def shown(entry: Mapping[str, Any] | None) -> str | None:
    """Return a tensor as a short text: type, shape and norm."""
    if entry is None:
        return None
    norm = features(entry)["norm"]
    shape = "×".join(map(str, entry["shape"])) if "shape" in entry else ""
    size = f", norm {norm:.6g}" if isinstance(norm, int | float) else ""
    return f"{entry.get('dtype', '')}[{shape}]{size}" if shape or "dtype" in entry else size.removeprefix(", ")


def _rank(found: tuple[Any, Any]) -> int:
    return next((entry.get("rank", 0) for entry in found if entry), 0)


def _equal(names: tuple[str | None, str | None], reason: str) -> bool | str:
    return "only cmp have" if names[0] is None else "only bench have" if names[1] is None else not reason


def _copies(pack: EnvironmentPack, side: int, rules: LevelRules) -> Iterator[SettingDifference]:
    """Yield an error for each rank whose copy of a part has other bits than the first rank's."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, recorded in sorted(pack.ranks.items()):
        for name, entry in recorded.get("weights", {}).items():
            for region, part in entry.get("regions", {}).items():
                begun, bits = first.setdefault((name, region), (rank, part["hash"]))
                if bits != part["hash"]:
                    value = f"rank {rank} has other bits than rank {begun}"
                    yield SettingDifference(
                        section="weights",
                        names=(name, None) if side == 0 else (None, name),
                        values=(value, None) if side == 0 else (None, value),
                        level=rules.level("weights", name),
                        reason="copies of one parameter differ",
                        details={"step": 0, "rank": rank, "equal": False, **relative(None, None)},
                    )
