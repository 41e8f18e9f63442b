"""What ranks have in common in a parallel job: their places in data, tensor, pipeline, context, expert parallelism."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from trainermon.analysis.diagnosis.wording import rank_list

AXES = ("pp", "tp", "cp", "ep", "dp")
Places = Mapping[int, Mapping[str, int]]
"""By rank, its place on each axis that has more than one."""


def read_places(run_dir: Path) -> dict[int, dict[str, int]]:
    """Return, by rank, its position on each axis of parallelism that is split (`{3: {"tp": 1, "pp": 0}}`).

    It is what each rank has written into the run directory; ranks that wrote nothing are left out.
    """
    found = {}
    for path in sorted(run_dir.glob("ranks/rank*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            told = json.loads(path.read_bytes())["coordinates"]
            axes = {axis: int(told[axis]) for axis in AXES if told.get(f"{axis}_size", 1) > 1}
            found[int(told["rank"])] = axes
    return found


def in_pipelines(places: Places, stages: Mapping[int, tuple[int, int | None]]) -> Places:
    """Return `places` with those in pipelines that only the dumps tell of.

    `stages` has by rank its stage, and a number that the ranks of its pipeline have in common. What files took for the
    data-parallel place of such a rank is the place of its pipeline among the others.

    >>> in_pipelines({0: {"dp": 0}, 1: {"dp": 1}}, {0: (0, 0), 1: (1, 0)})
    {0: {'pp': 0}, 1: {'pp': 1}}
    """
    pipelines = sorted({number for _, number in stages.values() if number is not None})
    found = dict(places)
    for rank, (stage, number) in stages.items():
        place = places.get(rank, {})
        if "pp" not in place:
            copy = {"dp": pipelines.index(number)} if number in pipelines and len(pipelines) > 1 else {}
            found[rank] = {axis: at for axis, at in place.items() if axis != "dp"} | {"pp": stage} | copy
    return found


def describe_domain(ranks: Collection[int], places: Places) -> tuple[str, str]:
    """Return which part of the job `ranks` are, and why that can be said; "" if the run does not tell.

    >>> describe_domain([2, 3], {0: {"pp": 0}, 1: {"pp": 0}, 2: {"pp": 1}, 3: {"pp": 1}})
    ('pp 1', 'ranks 2, 3 and no others')
    """
    known = [rank for rank in ranks if rank in places]
    if not known or len(places) < 2:
        return "", ""
    chosen = sorted(known)
    if len(chosen) == len(places):
        return "all ranks", f"all {len(places)} ranks alike"
    common = {axis: places[chosen[0]][axis] for axis in AXES if _same_place(axis, chosen, places)}
    inside = [rank for rank, place in places.items() if all(place.get(axis) == common[axis] for axis in common)]
    answer = ", ".join(f"{axis} {place}" for axis, place in common.items())
    if not common:
        return "several", f"{rank_list(chosen)}, which share no place on any axis"
    if len(inside) > len(chosen):
        return answer, f"{rank_list(chosen)} of the {len(inside)} ranks there"
    return answer, f"{rank_list(chosen)} and no {'others' if len(chosen) > 1 else 'other'}"


def _same_place(axis: str, ranks: list[int], places: Places) -> bool:
    return len({places[rank].get(axis) for rank in ranks}) == 1 and axis in places[ranks[0]]
