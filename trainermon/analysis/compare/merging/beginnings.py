"""When the first difference of a comparison began, to tell which of several ranks had it before it reached the others.

A fault reaches other ranks through what they exchange, and these have findings of their own then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.comparison import Comparison
from trainermon.analysis.compare.items import MODULE, DumpCall
from trainermon.analysis.compare.merging.layouts import layout_at
from trainermon.analysis.compare.verdicts import CallResult
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import FORWARD, RankLayout


class Beginning(NamedTuple):
    """When the first difference, or the first value that is not finite, of a dump could be seen; sorts as they ran.

    Attributes:
        step: Its step; 0: not known.
        micro_step: Its place among the micro steps.
        is_backward: Whether it ran in the backward.
        stage: Its pipeline stage; negative in a backward, which runs the other way round.
        place: Its place among the calls. What was wrong before a call is there when it begins, what it made when it has
            ended: so a weight of one rank comes before the module around it on another.
        is_made: Whether the call made it.
    """

    step: int
    micro_step: int
    is_backward: bool
    stage: int
    place: int
    is_made: bool = False


def first_of(beginnings: Sequence[Beginning | None], whole: Sequence[bool] = ()) -> int:
    """Return the place of the dump whose first difference began first.

    Where none has one (None), that of the first that was not read as a `whole`; else of the first.

    Forwards come before backwards, and run from the first pipeline stage to the last; on one stage ranks run the same
    calls.
    """
    wrong = [(beginning, place) for place, beginning in enumerate(beginnings) if beginning is not None]
    if wrong:
        return min(wrong)[1]
    return whole.index(False) if False in whole else 0


def axes_at(*folders: Path) -> dict[str, tuple[int, int]]:
    """Return where ranks stand, whose dumps are `folders`, and how many places there are, where all stand alike.

    Axes with one place are left out.
    """
    layouts = [layout_at(folder) or RankLayout() for folder in folders if folder.is_dir()]
    return {
        axis: where
        for axis, where in (layouts[0].axes.items() if layouts else ())
        if where[1] > 1 and all(one.axes.get(axis) == where for one in layouts)
    }


def beginning_of(comparison: Comparison, call: CallResult, *, is_made: bool) -> Beginning:
    """Return when the first difference of `comparison` could be seen: it is at `call`, which made it if `is_made`."""
    keys = [one.target.key for one in comparison.calls if one.target is not None]  # in the order in which they ended
    shown = call.given_to or call.key
    at = keys.index(shown) if shown in keys else 0
    is_made = is_made and not call.given_to
    while not is_made and at and shown in _above(keys[at - 1], comparison.parents):
        at -= 1
    micro_step, is_backward = _phase(call, comparison)
    place = comparison.place
    stage = axes_at(*([part.directory for part in place.parts] or [place.directory])).get("pp", (0, 1))[0]
    return Beginning(place.step or 0, micro_step, is_backward, -stage if is_backward else stage, at, is_made)


def _phase(call: CallResult, comparison: Comparison) -> tuple[int, bool]:
    """Return in which micro step a call ran, and whether in its backward.

    A function that no module is around, as a collective, runs in what the calls before it do.
    """
    micro_step, is_backward = 0, False
    for one in comparison.calls:
        if one.target is not None:
            top = _outermost(one.target, comparison.parents)
            is_module = top.startswith(f"{MODULE}.")
            micro_step = split_key(top)[3] if is_module else micro_step
            is_backward = one.target.direction != FORWARD or (is_backward and not is_module)
        if one is call:
            break
    return micro_step, is_backward


def _outermost(call: DumpCall, parents: Mapping[str, str]) -> str:
    top = call.key
    for top in _above(call.key, parents):  # noqa: B007  # the last
        pass
    return top


def _above(key: str, parents: Mapping[str, str]) -> Iterator[str]:
    above = parents.get(key)
    while above is not None:
        yield above
        above = parents.get(above)
