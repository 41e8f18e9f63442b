"""Dumps of steps of MindSpore that a command orders: where they go, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.core.errors import DumpError
from trainermon.core.outbox import Outbox
from trainermon.core.values import Command, Coordinates, SourceMode
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.mindspore.capture import CellCapture
from trainermon.dump.mindspore.debugger import NO_CALLS_NOTE
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.hooks.names import chosen
from trainermon.monitor.mindspore.training import CellTraining
from trainermon.monitor.session.ordered_dumps import StartedDump, begin_writer

NOTHING_SEEN = (
    "no call of a cell was seen: training ended before the step's first one, or MindSpore compiles them (graph mode, "
    "ms.jit); dump in PyNative mode"
)
_AXES = ("tp", "cp", "dp", "pp", "ep")


class CellDump(StartedDump):
    """A dump of the step that runs; one without a call is none."""

    capture: CellCapture

    def close(self) -> DumpInfo:
        """Write what was captured; see `StartedDump`."""
        if self.capture.num_calls:
            return super().close()
        try:
            self.writer.close()
        finally:
            self.parcel.delete()
        raise DumpError(NOTHING_SEEN)


class CellDumps:
    """Makes the dumps of this rank's cells; see `DumpMaker`.

    Args:
        training: Whose cells they show.
        coordinates: The rank's position in the job.
        attempt: Which start of the run this is.
        outbox: Brings them to the run directory.
        source: What they keep of the source code.

    Attributes:
        are_compiled: Whether steps are compiled, so that nothing can be dumped of them.
    """

    def __init__(
        self, training: CellTraining, coordinates: Coordinates, attempt: int, outbox: Outbox, source: SourceMode
    ) -> None:
        self.are_compiled = False
        self._training = training
        self._coordinates = coordinates
        self._attempt = attempt
        self._outbox = outbox
        self._source = source

    def has_module(self, scope: Sequence[str]) -> bool:
        """Return whether any name or pattern in `scope` matches a cell of the model."""
        return any(chosen(cell.name, scope) for cell in self._training.modules)

    def start(self, command: Command, step: int, max_bytes: int) -> CellDump:
        """Start to capture the cells of `step` for a command; see `DumpMaker`."""
        if self.are_compiled:
            raise DumpError(NO_CALLS_NOTE)
        place = f"dumps/{command.id}/attempt{self._attempt}/step{step}/rank{self._coordinates.rank}"
        parcel, most = self._outbox.parcel(place), self._outbox.room(max_bytes)
        writer = begin_writer(CellWriter, parcel, self._info(command, step), command.task, most)
        writer.source = self._source
        roots = self._training.roots
        models = {str(stage) if len(roots) > 1 else "": root for stage, root in enumerate(roots)}
        capture = CellCapture(models, writer, command.scope)
        capture.attach()
        return CellDump(parcel, writer, capture)

    def _info(self, command: Command, step: int) -> DumpInfo:
        place = self._coordinates
        axes = {axis: (getattr(place, axis), getattr(place, f"{axis}_size")) for axis in _AXES}
        return DumpInfo(
            id=command.id,
            step=step,
            attempt=self._attempt,
            rank=place.rank,
            reason=command.reason,
            pipeline_stage=place.pp,
            pipeline_size=place.pp_size,
            replica=place.dp if place.world_size > place.dp_size else None,
            layout=RankLayout(axes={axis: found for axis, found in axes.items() if found[1] > 1}),
        )
