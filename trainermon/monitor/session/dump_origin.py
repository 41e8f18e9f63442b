"""What every dump of this rank says of itself, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.core.outbox import Outbox, Parcel
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Command, Coordinates, SourceMode
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.layout import layout_of
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.names import chosen
from trainermon.monitor.frameworks.torch_pipeline import PipelinePlace, place_of
from trainermon.monitor.session.ordered_dumps import StartedDump, begin_writer
from trainermon.monitor.taps.training import Training
from trainermon.replay.suitability import ModelStage, stage_of


class DumpOrigin:
    """Gives every dump of this rank what it says about itself: model, run, rank, place among the ranks; and its folder.

    Attributes:
        rank: Global rank.
        replayable: What the framework requires of a replay.
        names: Plain name of every module in the whole model.
        source: What its dumps keep of the source code.
    """

    def __init__(
        self,
        run: RunIdentity,
        coordinates: Coordinates,
        training: Training,
        outbox: Outbox,
        source: SourceMode = SourceMode.FUNCTIONS,
    ) -> None:
        self.source = source
        self.rank = coordinates.rank
        self.replayable = training.replayable()
        self.names = {module.module: module.name for module in training.modules}
        self._run = run
        self._coordinates = training.coordinates or coordinates
        self._training = training
        self._outbox = outbox

    def stages(self) -> list[ModelStage]:
        """Return the model's roots, one per virtual pipeline stage, as the training loop calls them."""
        roots, entries = self._training.roots, self.replayable.entries
        if entries:
            return [ModelStage(entry, entry, root) for entry, root in zip(entries, roots, strict=True)]
        whole, stages = stage_of(self._training.model), [stage_of(root) for root in roots]
        return [whole] if [whole.model] == [stage.model for stage in stages] else stages

    def has_module(self, scope: Sequence[str]) -> bool:
        """Return whether any name or pattern in `scope` matches a module of the model."""
        return any(chosen(module.name, scope) for module in self._training.modules)

    def start(self, command: Command, step: int, max_bytes: int) -> StartedDump:
        """Start to capture the modules of `step` for a command; see `DumpMaker`."""
        parcel, info = self.parcel(command.id, step), self.info(command.id, step, command.reason)
        writer = begin_writer(DumpWriter, parcel, info, command.task, self.room(max_bytes))
        writer.source = self.source
        capture = ModuleCapture(
            [stage.model for stage in self.stages()],
            writer,
            scope=command.scope,
            names=self.names,
            gathered=not self.replayable.shadowed,
        )
        capture.attach()
        return StartedDump(parcel, writer, capture)

    def info(self, dump_id: str, step: int, reason: str) -> DumpInfo:
        """Return the info of a new, still empty dump of `step`.

        `dump_id` is that of the alert or command, `reason` says in words why it is made.
        """
        where = self._pipeline_place()
        return DumpInfo(
            id=dump_id,
            step=step,
            attempt=self._run.attempt,
            rank=self.rank,
            reason=reason,
            pipeline_stage=where.stage,
            pipeline_size=where.size,
            replica=where.replica,
            layout=self._layout(),
        )

    def parcel(self, dump_id: str, step: int) -> Parcel:
        """Create and return the folder, in the outbox of the node, for a dump of `step`.

        The writer reports one that cannot be made.
        """
        return self._outbox.parcel(f"dumps/{dump_id}/attempt{self._run.attempt}/step{step}/rank{self.rank}")

    def room(self, wanted_bytes: int) -> int:
        """Return how many of `wanted_bytes` the next dump may take: a quarter of what is free at most."""
        return self._outbox.room(wanted_bytes)

    def question(self, step: int) -> str:
        """Return a name of `step` that is unique, and the same on all ranks of the job."""
        return f"{self._run.run_id}/{self._run.attempt}/{step}"

    def _pipeline_place(self) -> PipelinePlace:
        place = self._coordinates
        found = place_of(self._training.roots) if place.pp_size == 1 else None
        if found is not None:
            return found
        mixes = place.world_size > place.dp_size
        replica = (place.dp if place.ep_size == 1 else 0) if mixes or place.ep_size > 1 else None
        return PipelinePlace(place.pp, place.pp_size, replica)

    def _layout(self) -> RankLayout:
        roots = [stage.model for stage in self.stages()]
        numbered = {str(number) if len(roots) > 1 else "": root for number, root in enumerate(roots)}
        return layout_of(numbered).in_whole()  # as the names of its modules are
