"""The life of one rule's alert on one rank: for how long the condition must hold and be over, and what is one alert.

Every series counts for itself on how many of its values in a row the condition held. The alert belongs to the group:
it begins when the first series fires and ends when the last one is over. A series that a step does not show is left as
it is. Nothing here knows what the condition is, or how an alert is worded.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.condition import ConditionVerdict, Mask
from trainermon.alerts.rules import AlertRule
from trainermon.core.derived import COUNT, INFS, NANS, Array

_NEVER = -1


@dataclasses.dataclass(frozen=True, slots=True)
class SeriesPeaks:
    """The worst value that each series of a rule has shown since its condition began; NaN before.

    Attributes:
        score: How bad it was.
        value: The value.
        baseline: What it was compared with.
        count: Number of the tensor's elements.
        nans: Number of NaNs.
        infs: Number of infinities.
    """

    score: Array
    value: Array
    baseline: Array
    count: Array
    nans: Array
    infs: Array

    @classmethod
    def empty(cls, size: int) -> SeriesPeaks:
        """Return peaks for `size` series that have shown nothing yet: NaN everywhere."""
        return cls(*(np.full(size, np.nan) for _ in dataclasses.fields(cls)))

    def grown(self, size: int) -> SeriesPeaks:
        """Return the same peaks with room for `size` series; the new ones are NaN."""
        grown = SeriesPeaks.empty(size)
        for field in dataclasses.fields(self):
            known: Array = getattr(self, field.name)
            getattr(grown, field.name)[: len(known)] = known
        return grown


class RuleState:
    """Tracks one rule on one rank: for how many values its condition has held on each series, whether it fires.

    Attributes:
        first_step: The step on which the condition of the alert began; -1 without an alert.
        firing: Whether an alert is on.
        members: The series that have fired since the alert began; they stay known until the next one begins.
        peaks: The worst value of each series.
    """

    def __init__(self, rule: AlertRule) -> None:
        self._rule = rule
        self.peaks = SeriesPeaks.empty(0)
        self.members: Mask = np.zeros(0, np.bool_)
        self._bad_run = np.zeros(0, np.int32)  # values in a row
        self._clear_run = np.zeros(0, np.int32)
        self._fired: Mask = np.zeros(0, np.bool_)
        self._restless: Mask = np.zeros(0, np.bool_)
        self._began: NDArray[np.int64] = np.zeros(0, np.int64)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the number of series: a new attempt begins."""
        self.first_step = _NEVER
        self._last_end = _NEVER
        self._active = False
        for array in (self._bad_run, self._clear_run, self._fired, self._restless, self._began, self.members):
            array[:] = 0

    def grow(self, size: int) -> None:
        """Make room for `size` series; the state of the present ones stays."""
        for name in ("_bad_run", "_clear_run", "_fired", "_restless", "_began", "members"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros(size - len(array), array.dtype))))
        self.peaks = self.peaks.grown(size)

    @property
    def firing(self) -> bool:
        """Whether the rule's alert fires on this rank."""
        return self.first_step != _NEVER

    @property
    def restless(self) -> Mask | None:
        """A mask of the series whose condition holds, be it long enough (firing) or not yet (pending).

        None if there are none.
        """
        return self._restless if self._active else None

    def pending_since(self) -> int | None:
        """Return the step on which the oldest pending condition began; None if an alert is on or nothing is pending."""
        waiting = self.pending()
        if self.firing or not waiting.any():
            return None
        return int(self._began[waiting].min())

    def pending(self) -> Mask:
        """Return a mask of the series whose condition holds, but not for long enough to fire."""
        return (self._bad_run > 0) & ~self._fired

    def worst_first(self, series: Mask) -> NDArray[np.intp]:
        """Return the positions of the series marked in the mask, worst peak first.

        Equal ones in the order of the model.
        """
        slots = np.flatnonzero(series)
        return slots[np.argsort(-self.peaks.score[slots], kind="stable")]

    def advance(self, indices: NDArray[np.intp], verdict: ConditionVerdict, step: int) -> None:
        """Count, by the verdict of one step, how long the condition has held on each series; begin or end the alert.

        `indices` are the positions of the series judged. Series that are neither bad nor restless may be left out, as
        nothing changes for them.
        """
        self._count(indices, verdict, step)
        fired = self._fired
        if self.firing:
            self.members |= fired
        any_fired = bool(np.count_nonzero(fired))
        if not self.firing and any_fired:
            # An alert's first step must be its own, as its id is made of it: a series that was pending or out of
            # sight during an earlier alert may have begun before that one's end.
            self.first_step = max(int(self._began[fired].min()), self._last_end + 1)
            self.members = fired.copy()
        elif self.firing and not any_fired:
            self._last_end = step
            self.first_step = _NEVER
        self._active = bool(np.count_nonzero(self._restless))

    def record(self, indices: NDArray[np.intp], verdict: ConditionVerdict, moments: Array, baseline: Array) -> None:
        """Keep values that are worse than any other since the condition of their series began."""
        peaks = self.peaks
        worse = verdict.bad & ~(verdict.score <= peaks.score[indices])
        found = {
            "score": verdict.score,
            "value": verdict.value,
            "baseline": baseline,
            "count": moments[COUNT],
            "nans": moments[NANS],
            "infs": moments[INFS],
        }
        for name, values in found.items():
            peak: Array = getattr(peaks, name)
            peak[indices[worse]] = values[worse]

    def _count(self, indices: NDArray[np.intp], verdict: ConditionVerdict, step: int) -> None:
        bad, fired, bad_run = verdict.bad, self._fired[indices], self._bad_run[indices]
        blind = np.zeros_like(bad) if verdict.blind is None else verdict.blind
        begins = bad & (bad_run == 0) & ~fired
        self._began[indices[begins]] = step
        anew = begins & ~self.members[indices] if self.firing else begins
        self.peaks.score[indices[anew]] = np.nan
        bad_run = np.where(bad, bad_run + 1, np.where(blind | fired, bad_run, 0))
        clear_run = np.where(blind, self._clear_run[indices], np.where(verdict.clear, self._clear_run[indices] + 1, 0))
        if self.firing or self._last_end == _NEVER or step > self._last_end + self._rule.cooldown_steps:
            fired = fired | (bad & (bad_run >= self._rule.for_steps))
        over = fired & ~bad & (clear_run >= self._rule.keep_steps)
        bad_run[over] = 0
        fired = fired & ~over
        self._fired[indices], self._bad_run[indices], self._clear_run[indices] = fired, bad_run, clear_run
        self._restless[indices] = fired | (bad_run > 0)


def alert_id(rule: str, *, rank: int, attempt: int, first_step: int) -> str:
    """Return the id of an alert: 16 hexadecimal digits, the same whenever the same records are evaluated again."""
    text = f"{rule}\0{rank}\0{attempt}\0{first_step}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
