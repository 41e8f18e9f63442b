"""What captures for one step: cells (L0), functions (L1), or both (mix)."""

from __future__ import annotations

from collections.abc import Mapping

from mindspore import nn

from trainermon.dump.mindspore.capture import CellCapture
from trainermon.dump.mindspore.function_calls import OperationCapture
from trainermon.dump.mindspore.writer import CellWriter

OF_CELLS, OF_FUNCTIONS = ("L0", "mix"), ("L1", "mix")


class StepCapture:
    """Captures the calls of a step that a level asks for, from `attach` to `detach`.

    Args:
        models: By the first part of their cells' names, "" for the only one.
        writer: Where entries go.
        level: `L0`, `L1` or `mix`.
    """

    def __init__(self, models: Mapping[str, nn.Cell], writer: CellWriter, level: str) -> None:
        self._cells = CellCapture(models, writer) if level in OF_CELLS else None
        self._functions = OperationCapture(models, writer, self._cells) if level in OF_FUNCTIONS else None

    @property
    def num_calls(self) -> int:
        """How many calls were seen."""
        return sum(capture.num_calls for capture in self._all())

    def go_on_from(self, earlier: StepCapture) -> None:
        """Continue the numbers of calls from where `earlier` ended, which wrote into the same dump."""
        if self._cells is not None and earlier._cells is not None:
            self._cells.go_on_from(earlier._cells)
        if self._functions is not None and earlier._functions is not None:
            self._functions.go_on_from(earlier._functions)

    def attach(self) -> None:
        """Start to record."""
        for capture in self._all():
            capture.attach()

    def detach(self) -> None:
        """Stop recording, and write the entries whose gradients did not all arrive."""
        for capture in reversed(self._all()):
            capture.detach()

    def stop_in_child(self) -> None:
        """Stop recording in a forked child process, and write nothing there: the files belong to the parent."""
        for capture in self._all():
            capture.stop_in_child()

    def _all(self) -> list[CellCapture | OperationCapture]:
        return [capture for capture in (self._cells, self._functions) if capture is not None]
