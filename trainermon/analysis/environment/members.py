"""What a rank showed of itself, as members of a pack: ours, and those that msprobe reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainermon.analysis.environment.draws import calls_of
from trainermon.core.environment.pack import RANK_FILE, encoded


def members_of_rank(rank: int, shown: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the members of a pack that hold what a rank showed: ours, and those that msprobe reads."""
    members = {RANK_FILE.format(rank): encoded({"rank": rank, **shown})}
    weights = {
        name: _features_of(next(iter(entry["regions"].values()))) for name, entry in shown.get("weights", {}).items()
    }
    if weights:
        members[f"weights/step0/rank{rank}/weight.json"] = encoded(weights)
    for step, tensors in shown.get("data", {}).items():
        content: dict[str, Any] = {"args": {}, "kwargs": {}}
        for name, entry in tensors.items():
            part, _, rest = name.rpartition("args.")
            content["kwargs" if part.endswith("kw") else "args"][rest] = _features_of(entry)
        members[f"dataset/step{step}/rank{rank}/dataset.json"] = encoded(content)
    calls = calls_of(shown.get("random", {}))
    if calls is not None:
        members[f"random/rank{rank}.json"] = encoded(calls)
    return members


def _features_of(part: dict[str, Any]) -> dict[str, float]:
    """Return the four numbers that msprobe keeps of a tensor."""
    count = max(1, part["count"])
    norm = max(0.0, part["sum_sq"]) ** 0.5
    return {"max": part["max"], "min": part["min"], "mean": part["sum"] / count, "norm": norm}
