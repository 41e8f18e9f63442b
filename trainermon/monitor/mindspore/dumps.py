"""Dumps of steps of MindSpore that a command orders: where they go, and what they say of themselves."""

from __future__ import annotations

import dataclasses

from trainermon.core.errors import DumpError
from trainermon.core.events import DumpEvent, DumpStatus
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Outbox, Parcel
from trainermon.core.values import Command, Coordinates, SourceMode
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.mindspore.capture import CellCapture
from trainermon.dump.mindspore.debugger import NO_CALLS_NOTE
from trainermon.dump.mindspore.writer import CellWriter
from trainermon.hooks.names import chosen
from trainermon.monitor.mindspore.training import CellTraining

_AXES = ("tp", "cp", "dp", "pp", "ep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellDumpOrigin:
    """What the dumps of this rank say of themselves, and where they go.

    Attributes:
        training: Whose cells they show.
        coordinates: The rank's position in the job.
        attempt: Which start of the run this is.
        outbox: Brings them to the run directory.
        source: What they keep of the source code.
    """

    training: CellTraining
    coordinates: Coordinates
    attempt: int
    outbox: Outbox
    source: SourceMode

    def has_cell(self, command: Command) -> bool:
        """Return whether a name or pattern in the command's scope matches a cell, or it has none."""
        return not command.scope or any(chosen(each.name, command.scope) for each in self.training.modules)

    def parcel(self, command: Command, step: int) -> Parcel:
        """Return the folder, in the outbox of the node, for a dump of `step`, which its writer makes."""
        rank = self.coordinates.rank
        return self.outbox.parcel(f"dumps/{command.id}/attempt{self.attempt}/step{step}/rank{rank}")

    def info(self, command: Command, step: int) -> DumpInfo:
        """Return the info of a new, still empty dump of `step`."""
        place = self.coordinates
        axes = {axis: (getattr(place, axis), getattr(place, f"{axis}_size")) for axis in _AXES}
        return DumpInfo(
            id=command.id,
            step=step,
            attempt=self.attempt,
            rank=place.rank,
            reason=command.reason,
            pipeline_stage=place.pp,
            pipeline_size=place.pp_size,
            replica=place.dp if place.world_size > place.dp_size else None,
            layout=RankLayout(axes={axis: found for axis, found in axes.items() if found[1] > 1}),
        )


class CellDump:
    """The dump of one step that a command has ordered, from now to `close`.

    Args:
        origin: Where it comes from, and where it goes.
        command: What is asked for.
        step: The step that begins.
        max_bytes: The most that it may write.

    Raises:
        DumpError: Its folder cannot be written.
    """

    def __init__(self, origin: CellDumpOrigin, command: Command, step: int, max_bytes: int) -> None:
        self._command, self._step = command, step
        self._parcel = origin.parcel(command, step)
        try:
            self._writer = CellWriter(
                self._parcel.content,
                origin.info(command, step),
                task=command.task,
                max_bytes=origin.outbox.room(max_bytes),
                final=self._parcel.final,
            )
        except DumpError:
            self._parcel.delete()
            raise
        self._writer.source = origin.source
        roots = origin.training.roots
        models = {str(stage) if len(roots) > 1 else "": root for stage, root in enumerate(roots)}
        self._capture = CellCapture(models, self._writer, command.scope)
        self._capture.attach()

    def detach(self) -> None:
        """Capture no more."""
        self._capture.detach()

    def stop_in_child(self) -> None:
        """Capture nothing in a forked child: the files are its parent's."""
        self._capture.stop_in_child()

    def close(self, journal: JournalWriter) -> int:
        """Write the dump and send it off, tell the journal what became of it, and return how many bytes were written.

        Call `detach` before.
        """
        try:
            written = self._writer.close()
        except DumpError as error:
            self._parcel.send()
            journal.append_event(failed(self._command, self._step, str(error)))
            return 0
        if not self._capture.num_calls:
            self._parcel.delete()
            journal.append_event(failed(self._command, self._step, NO_CALLS_NOTE))
            return 0
        self._parcel.send()
        status = DumpStatus.OVER_QUOTA if written.over_quota else DumpStatus.WRITTEN
        journal.append_event(
            DumpEvent(
                step=self._step,
                command=self._command.id,
                status=status,
                dump=self._parcel.place,
                bytes=written.bytes_written,
            )
        )
        return written.bytes_written


def failed(command: Command, step: int, reason: str) -> DumpEvent:
    """Return the event that says that the dump of `step` was not made, and why."""
    return DumpEvent(step=step, command=command.id, status=DumpStatus.FAILED, reason=reason)
