"""What the step before made of the weights that differ in this one: other gradients, or the same and another update.

A fault in the gradients of one step is in some weights of the next. There each of them would be the beginning of a
difference, though none is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.compare.items import PARAMETERS
from trainermon.analysis.compare.merging.places import DumpLocation, PlacePair
from trainermon.analysis.compare.noise import takes_weight
from trainermon.analysis.compare.verdicts import ERROR, WARNING, CallResult
from trainermon.core.errors import DumpError
from trainermon.dump.files.records import DUMP_FILE, FORWARD

_STEP = re.compile(r"step(\d+)")


class StepBefore(NamedTuple):
    """The newest step before the one that is compared, of which both sides have a dump of the rank, too.

    Attributes:
        step: Its number.
        first: The call to blame in it, else the first that differs; "": nothing in it differs.
        gradients: Whether gradients of it differ by more than rounding.
    """

    step: int
    first: str
    gradients: bool

    @property
    def words(self) -> str:
        """What it did to the weights."""
        if self.gradients:
            return f"gradients of step {self.step} differed, where {self.first} is the first difference"
        same = f"step {self.step} differs, in {self.first}, and" if self.first else f"of step {self.step}"
        return f"{same} the gradients agree: its optimizer made that, or what wrote to weights since"


def step_before(
    pair: PlacePair, calls: Sequence[CallResult], compare: Callable[[PlacePair], Sequence[CallResult]]
) -> StepBefore | None:
    """Return what is known of the step before where weights differ; None: it was not dumped, or none does.

    `compare` returns the results of the calls of two dumps. Cost: it is called once.
    """
    before = _pair_before(pair) if any(map(_begins_with_weight, calls)) else None
    if before is None or before.target.step is None:
        return None
    try:
        found = compare(before)
    except DumpError:
        return None  # of that step itself it is said
    blamed = next((call for call in found if call.blamed), None)
    first = blamed or next((call for call in found if call.result in (ERROR, WARNING)), None)
    gradients = any(
        call.target is not None and call.target.direction != FORWARD and call.result in (ERROR, WARNING)
        for call in found
    )
    return StepBefore(before.target.step, first.key if first is not None else "", gradients)


def _begins_with_weight(call: CallResult) -> bool:
    if not call.blamed or call.target is None or not call.origin:
        return False
    return call.origin.startswith(f"{PARAMETERS}.") or takes_weight(call.target, call.origin)


def _pair_before(pair: PlacePair) -> PlacePair | None:
    """Return the dumps of the newest earlier step that both sides have, which lie in folders beside this one's."""
    ours, theirs = map(_steps_before, pair)
    both = ours.keys() & theirs.keys()
    if not both or pair.target.step is None:
        return None
    step = max(both)
    places = (side._replace(directory=found[step], step=step) for side, found in zip(pair, (ours, theirs), strict=True))
    return PlacePair(*places)


def _steps_before(place: DumpLocation) -> dict[int, Path]:
    folder = place.directory.parent
    if place.parts or place.step is None or folder.name != f"step{place.step}":
        return {}
    steps = {int(found[1]): path for path in folder.parent.iterdir() if (found := _STEP.fullmatch(path.name))}
    dumps = {step: path / place.directory.name for step, path in steps.items() if step < place.step}
    return {step: path for step, path in dumps.items() if (path / DUMP_FILE).is_file()}
