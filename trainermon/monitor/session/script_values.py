"""Which step a value that the script records belongs to."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainermon.core.catalogue import STEP_TIME_SERIES
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.session.phases import CurrentStep, QuietSteps
from trainermon.monitor.session.recorded import StepCounter, StepRecorder
from trainermon.monitor.taps.row_collector import RowCollector

if TYPE_CHECKING:
    from torch import Tensor

DURATION = SeriesKey(Kind.STEP, STEP_TIME_SERIES)
# Steps that stay open for a loss that is recorded after them, until it is known where in the loop the script records.
STEPS_TO_LEARN = 2


class RecordPlace(enum.Enum):
    """The place in its loop where the script calls `record`: before or after `optimizer.step()`, or not known yet."""

    UNKNOWN = 0
    BEFORE = 1
    AFTER = 2


class ScriptValues:
    """Records the numbers that the script passes to `record` under the step they belong to: the open one, or the last.

    Where in its loop the script records is learnt from its first call. If forwards are not watched then, what it
    records waits for the optimizer's step: a forward before that tells that the call came after a step. What a script
    that records before its steps records between two of them alone, as an accuracy, is of the one that has ended.

    Args:
        recorder: Files values under the step that is open in the collector.
        collector: Takes the rows.
        steps: Knows whether a forward of the open step has begun.
        step: The step that is open.
        quiet: Steps that pass unseen, which a recorded value ends.

    Attributes:
        recorder: The recorder.
        exited_s: When the last step ended, by `time.perf_counter`; 0 before.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        collector: RowCollector,
        steps: StepCounter,
        step: CurrentStep,
        quiet: QuietSteps | None = None,
    ) -> None:
        self.recorder = recorder
        self._collector = collector
        self._steps = steps
        self._step = step
        self._place = RecordPlace.UNKNOWN
        self.exited_s = self._duration_s = 0.0
        self._duration = -1  # its series, once there is one
        self._quiet = quiet
        self._waiting: list[Mapping[str, Tensor | float]] = []
        self._before: set[str] = set()  # names that the script has recorded before a step

    def file(self, values: Mapping[str, Tensor | float]) -> None:
        """Record `values` under the step that runs, wherever in its loop the script records."""
        if self._quiet is not None:
            self._quiet.end()
        for name, value in values.items():
            self.recorder.file(name, value)

    def record(self, values: Mapping[str, Tensor | float]) -> None:
        """Record `values` under the step they belong to: the open one, or the one that has just ended.

        They belong to the step that has just ended if this call comes between two steps, and the script's first call
        did, too, or none of the values was ever recorded before a step. Otherwise that step is closed for good.
        """
        if self._quiet is not None:
            self._quiet.end()
        has_begun = self._steps.has_begun
        if has_begun:
            self.settle()
        has_ended_one = self._step.number > self._step.first
        is_between = has_ended_one and not has_begun
        if self._place is RecordPlace.UNKNOWN:
            if has_ended_one and self._steps.await_forward():
                self._waiting.append({name: _copied(value) for name, value in values.items()})
                return
            self._place = RecordPlace.AFTER if is_between else RecordPlace.BEFORE
        is_late = is_between and (self._place is RecordPlace.AFTER or self._are_new(values))
        if not is_late:
            self._before.update(values)
        self._file(values, is_late=is_late)

    def _are_new(self, values: Mapping[str, Any]) -> bool:
        return self._before.isdisjoint(values) and not self._steps.await_forward()

    def settle(self, *, is_over: bool = False) -> None:
        """File what waits until it is known where the script records: its optimizer step begins, or training `is_over`.

        Training that ends between two steps ends behind one.
        """
        if self._waiting:
            is_late = is_over or self._steps.has_begun
            self._place = RecordPlace.AFTER if is_late else RecordPlace.BEFORE
            waiting, self._waiting = self._waiting, []
            for values in waiting:
                self._file(values, is_late=is_late)

    def _file(self, values: Mapping[str, Tensor | float], *, is_late: bool) -> None:
        if is_late:
            with self._collector.late(self._step.number - 1):
                self.file(values)
                self.recorder.file_rate(self._duration_s)
            self.recorder.new_step()
        else:
            self._collector.seal_ended()
            self.file(values)

    def scale_found_loss(self, factor: float) -> None:
        """Multiply losses that are found in what the model returns by `factor` from now on."""
        self.recorder.found_loss_factor = factor

    def take_duration(self) -> None:
        """Record the duration of the step that ends now, and its tokens per second."""
        now_s = time.perf_counter()
        self._duration_s = now_s - self.exited_s if self.exited_s else 0.0
        self.exited_s = now_s
        if self._duration_s and not self._collector.is_empty:
            if self._duration < 0:
                self._duration = self._collector.table.id_of(DURATION)
            self._collector.put(self._duration, self._duration_s)
            if self.recorder.tokens:
                self.recorder.file_rate(self._duration_s)

    def passed(self, step: int, began_s: float, duration_s: float) -> None:
        """Go on at `step` after quiet ones; see `QuietSteps.begin` for the arguments."""
        self._collector.begin(step)
        if duration_s:
            self.exited_s, self._duration_s = began_s, duration_s

    def step_began(self) -> None:
        """Write the previous step, unless the script may still record values of it."""
        is_young = self._step.number - self._step.first <= STEPS_TO_LEARN
        is_learning = is_young and self._place is RecordPlace.UNKNOWN
        if self._place is not RecordPlace.AFTER and not is_learning:
            self._collector.seal_ended()


def _copied(value: Tensor | float) -> Tensor | float:
    """Return `value` as it is now: a script may add to a tensor, or set it to zero, before it is filed."""
    return value if isinstance(value, int | float) else value.detach().clone()
