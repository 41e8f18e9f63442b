"""Numbers of the step that the script records, and the loss that is found where it records none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trainermon.core.catalogue import LOSS_SERIES, TOKENS_PER_SECOND_SERIES, TOKENS_SERIES
from trainermon.core.values import Kind, SeriesKey
from trainermon.monitor.taps.row_collector import RowCollector

if TYPE_CHECKING:
    from torch import Tensor


class LossFinder(Protocol):
    """Interface of a training whose model may return the loss."""

    @property
    def roots(self) -> Sequence[object]:
        """One module per virtual pipeline stage."""

    def loss_of(self, output: Any) -> Any:
        """Return the loss in what the last root returned; None if there is none."""


class StepCounter(Protocol):
    """Interface of what counts the micro steps of the step that runs."""

    @property
    def has_begun(self) -> bool:
        """Whether a forward of the step has begun."""

    def await_forward(self) -> bool:
        """Have `has_begun` tell of the next forward if it does not, as the step is not watched; return whether so."""

    def micro_step(self, stage: int) -> int:
        """Return the number of the micro step whose forward runs."""


class StepRecorder:
    """Records the script's numbers, as the loss, as rows of the step that is open in the collector.

    With several micro steps per optimizer step the calls of one step are told apart by number, if there are several.

    Attributes:
        filed: The series of the open step that the script has recorded.
        tokens: The tokens of the open step that the script has recorded.
        found_loss_factor: What a loss that is found is multiplied by, for models that return a share of the step's.
    """

    def __init__(
        self, training: LossFinder, collector: RowCollector, steps: StepCounter, *, num_micro_steps: int
    ) -> None:
        self._training = training
        self._collector = collector
        self._steps = steps
        self._num_micro_steps = num_micro_steps
        self._times: dict[str, int] = {}
        self._records_loss = False
        self._losses_found: set[int] = set()
        self.tokens = 0.0
        self.filed: set[int] = set()
        self.found_loss_factor = 1.0

    def new_step(self) -> None:
        """Begin to count the calls of a new step from zero."""
        self._times.clear()
        self.filed.clear()
        self.tokens = 0.0

    def file(self, name: str, value: Tensor | float) -> None:
        """Record a number, or the statistics of a tensor, as the series `name` of the open step."""
        if name == LOSS_SERIES and not self._records_loss:
            self._records_loss = True
            for series in self._losses_found:
                self._collector.move(series, None)
        number = self._times.get(name, 0) if self._num_micro_steps > 1 else 0
        self._times[name] = number + 1
        if number == 1:
            self._collector.move(self._series_of(name, None), self._series_of(name, 0))
            self.filed.add(self._series_of(name, 0))
        series = self._series_of(name, number if number else None)
        self.filed.add(series)
        if not isinstance(value, float):
            self._collector.take((series,), (value,))
            return
        self._collector.put(series, value)
        if name == TOKENS_SERIES:
            self.tokens = self.tokens * (self._num_micro_steps > 1) + value

    def file_rate(self, duration_s: float) -> None:
        """Record tokens per second of a step that took `duration_s` seconds, if the script records `tokens`."""
        if self.tokens and duration_s > 0:
            self._collector.put(self._series_of(TOKENS_PER_SECOND_SERIES, None), self.tokens / duration_s)

    def find_loss(self, stage: int, output: Any) -> None:
        """Record the loss found in what the last stage returned, as long as the script records none."""
        if self._records_loss or stage != len(self._training.roots) - 1:
            return
        loss = self._training.loss_of(output)
        if loss is not None:
            series = self._series_of(LOSS_SERIES, self._steps.micro_step(stage) if self._num_micro_steps > 1 else None)
            self._losses_found.add(series)
            factor = self.found_loss_factor
            self._collector.take((series,), (loss if factor == 1.0 else loss.detach() * factor,))

    def _series_of(self, name: str, micro_step: int | None) -> int:
        kind = Kind.LOSS if name == LOSS_SERIES else Kind.STEP
        return self._collector.table.id_of(SeriesKey(kind, name, micro_step=micro_step))
