"""Compares random numbers: seeds, states of generators, and the first draw in which two runs part."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainermon.analysis.environment.differences import DifferenceLevel, SettingDifference
from trainermon.analysis.environment.rules import LevelRules
from trainermon.core.environment.pack import EnvironmentPack

NO_MATCH = "no match stack"  # msprobe's words
_FRAME = re.compile(r"File (\S*?),? line \d+, in (\S+?),?\s(.*)", re.DOTALL)
_NEAR = 0.8


def compare_random(one: EnvironmentPack, other: EnvironmentPack, rules: LevelRules) -> Iterator[SettingDifference]:
    """Yield rows for states of generators, for draws, and for how often each place drew, for ranks of both sides."""
    for rank in sorted(one.ranks.keys() & other.ranks.keys()):
        sides = [pack.ranks.get(rank, {}).get("random", {}) for pack in (one, other)]
        yield from _states(rank, sides[0].get("states", {}), sides[1].get("states", {}), rules)
        yield from _first_draw(rank, sides[0].get("draws"), sides[1].get("draws"), rules)
        calls = [calls_of(side) for side in sides]
        if calls[0] is not None and calls[1] is not None:
            yield from _places(rank, calls[0], calls[1], rules)


def _states(
    rank: int, one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    for name in sorted({*one, *other}):
        values = (one.get(name), other.get(name))
        label = f"rank {rank}, {name}"
        yield SettingDifference(
            section="random",
            names=(label if name in one else None, label if name in other else None),
            values=values,
            level=DifferenceLevel.SAME if values[0] == values[1] else rules.level("random", name),
            reason="" if values[0] == values[1] else "another state at the first forward",
        )


def _first_draw(rank: int, one: Any, other: Any, rules: LevelRules) -> Iterator[SettingDifference]:
    if not isinstance(one, list) or not isinstance(other, list):
        return
    for number, (first, second) in enumerate(itertools.zip_longest(one, other)):
        keys = [(draw["name"], draw["crc32"]) if draw else None for draw in (first, second)]
        if keys[0] == keys[1]:
            continue
        label = f"rank {rank}, draw {number}"
        yield SettingDifference(
            section="random",
            names=(label if first else None, label if second else None),
            values=tuple(_shown(draw) for draw in (first, second)),  # type: ignore[arg-type]  # two of them
            level=rules.level("random", "draws"),
            reason="the first draw that differs",
        )
        return
    label = f"rank {rank}, draws"
    values = (f"{len(one):,} equal draws", f"{len(other):,} equal draws")
    yield SettingDifference(section="random", names=(label, label), values=values, level=DifferenceLevel.SAME)


def _shown(draw: Mapping[str, Any] | None) -> str | None:
    if draw is None:
        return None
    frames = _frames(str(draw.get("stack", "")))
    return f"{draw['name']} {draw['crc32']}{f' in {frames[0].strip()}' if frames else ''}"


def calls_of(recorded: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]] | None:
    """Return how often each place drew, by function, as msprobe's files have it; None if it is not known."""
    if "calls" in recorded:
        return {name: list(places) for name, places in recorded["calls"].items()}
    if "draws" not in recorded:
        return None
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for draw in recorded["draws"]:
        function = draw["name"].rpartition(".")[0] or draw["name"]
        stack = str(draw.get("stack", ""))
        place = found.setdefault(function, {}).setdefault(stack, {"count": 0, "stack": _frames(stack)})
        place["count"] += 1
    return {function: list(places.values()) for function, places in found.items()}


def _frames(stack: str) -> list[str]:
    """Return the frames of a stack, each as one line, as msprobe has them."""
    return [" ".join(frame.split()) for frame in re.split(r"\n(?=File )", stack) if frame.strip()]


def _places(
    rank: int, one: Mapping[str, Any], other: Mapping[str, Any], rules: LevelRules
) -> Iterator[SettingDifference]:
    for function in sorted({*one, *other}):
        left = list(other.get(function, []))
        for place in one.get(function, []):
            match = next((entry for entry in left if same_stack(place["stack"], entry["stack"])), None)
            if match is not None:
                left.remove(match)
            yield _place_row(rank, function, (place, match), rules)
        for place in left:
            yield _place_row(rank, function, (None, place), rules)


def _place_row(
    rank: int, function: str, places: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None], rules: LevelRules
) -> SettingDifference:
    counts = [place["count"] if place else 0 for place in places]
    stacks = ["\n".join(place["stack"]) if place else NO_MATCH for place in places]
    label = f"rank {rank}, {function}"
    is_same = counts[0] == counts[1]
    return SettingDifference(
        section="random",
        names=(label if places[0] else None, label if places[1] else None),
        values=(f"drawn {counts[0]:,} times", f"drawn {counts[1]:,} times"),
        level=DifferenceLevel.SAME if is_same else rules.level("random", function),
        reason="" if is_same else "drawn another number of times from one place",
        details={
            "op": function,
            "rank": rank,
            "bench_stack": stacks[0],
            "cmp_stack": stacks[1],
            "bench_count": counts[0],
            "cmp_count": counts[1],
            "check_result": is_same,
        },
    )


def same_stack(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two stacks are of the same place: as deep, and each frame near enough in file, function, code."""
    return len(one) == len(other) and all(map(_same_frame, one, other))


def _same_frame(one: str, other: str) -> bool:
    if one == other:
        return True
    parts = [_FRAME.search(frame) for frame in (one, other)]
    if parts[0] is None or parts[1] is None:
        return False
    files = [part[1].rpartition("/")[2] for part in parts if part]
    code = difflib.SequenceMatcher(None, parts[0][3], parts[1][3]).ratio()
    return ((files[0] == files[1]) + (parts[0][2] == parts[1][2]) + code) / 3 >= _NEAR
