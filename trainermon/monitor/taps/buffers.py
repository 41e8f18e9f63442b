"""Statistics of the buffers that are saved with the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from trainermon.core.schedule import DueSteps
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.hooks.names import plain_name
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.training import Training

_BY_DESIGN = "expert"  # part of the names of modules whose ranks count tokens of their own
_MAX_ELEMENTS = 1 << 20


class BufferTaps:
    """Reads buffers when the first forward of a step begins, behind what a wrapper has broadcast for it.

    Only what is saved with the model: what a module makes anew, as a cache or a mask, may differ. Of floating point,
    whole, up to a million elements each. Those that ranks should hold copies of are marked as such.

    Args:
        training: Whose model.
        collector: Where the rows go.
        due: On which steps.
    """

    def __init__(self, training: Training, collector: Collector, due: DueSteps) -> None:
        is_copied = any("dp" in parameter.placement.replicated_over for parameter in training.parameters)
        self._replicated_over = ("dp",) if is_copied and training.holds_replicas else ()
        self._roots = training.roots[:1]  # a wrapper of another virtual stage has broadcast nothing yet
        self._collector = collector
        self._due = due
        self._last = -1
        self._are_any = True

    def forward_begins(self, step: int) -> None:
        """Read the buffers, if they are due on `step` and this is its first forward."""
        if not self._are_any or step == self._last or not self._due.include(step):
            return
        self._last = step
        series: list[int] = []
        tensors: list[Tensor] = []
        for name, buffer in _saved_buffers(self._roots):
            placement = Placement(
                dtype=str(buffer.dtype).removeprefix("torch."),
                shape=tuple(buffer.shape),
                replicated_over=() if _BY_DESIGN in name.rpartition(".")[0] else self._replicated_over,
            )
            series.append(self._collector.table.id_of(SeriesKey(Kind.BUFFER, name), placement))
            tensors.append(buffer.detach())
        if series:
            self._collector.take(series, tensors)
        else:
            self._are_any = False  # not looked for again


def _saved_buffers(roots: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for path, module in ((path, module) for root in roots for path, module in root.named_modules()):
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set and _is_readable(buffer):
                yield plain_name(f"{path}.{name}" if path else name), buffer


def _is_readable(buffer: Tensor | None) -> bool:
    if buffer is None or hasattr(buffer, "placements") or buffer.is_meta:
        return False
    is_plain = buffer.is_floating_point() and buffer.is_contiguous() and buffer.element_size() > 1
    return is_plain and 0 < buffer.numel() <= _MAX_ELEMENTS
