"""Dumps of this rank: the replay of a step whose gradients are not finite, and what a command ordered."""

from __future__ import annotations

import dataclasses
import logging

from trainermon.core.config import MonitorConfig
from trainermon.core.control import ControlPage
from trainermon.core.errors import DumpError
from trainermon.core.journal import JournalWriter
from trainermon.core.outbox import Outbox, Parcel
from trainermon.core.topology import RunIdentity
from trainermon.core.values import Action, Command, Coordinates
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.layout import layout_of
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.names import chosen
from trainermon.monitor.taps.training import Training
from trainermon.replay.replay import StepExamination, StepKeeper
from trainermon.replay.suitability import ModelStage, stage_of

logger = logging.getLogger("trainermon")

MIB = 1 << 20
REPLAY_ID = "gradient-nonfinite"


@dataclasses.dataclass(slots=True, kw_only=True)
class _ActiveOrder:
    """A command that this rank carries out, and how many bytes it may still write."""

    command: Command
    bytes_left: int

    def covers(self, step: int) -> bool:
        return self.command.first_step <= step < self.command.first_step + self.command.num_steps


class RankDumps:
    """Decides what is dumped on which step, and says in the journal what became of it.

    A step is replayed when its gradients are not finite while those of the step before were: later steps only show the
    consequences.
    """

    def __init__(  # noqa: PLR0913  # the parts that it wires together
        self,
        run: RunIdentity,
        coordinates: Coordinates,
        training: Training,
        *,
        journal: JournalWriter,
        page: ControlPage,
        outbox: Outbox,
    ) -> None:
        self._run = run
        self._outbox = outbox
        self._coordinates = training.coordinates or coordinates
        self._rank = coordinates.rank
        self._training = training
        self._replayable = training.replayable()
        self._names = {module.module: module.name for module in training.modules}
        self._journal = journal
        self._page = page
        self._keeper: StepKeeper | None = None
        self._replay = MonitorConfig().replay
        self._num_replays = 0
        self._nonfinite_before = False
        self._epoch = page.epoch()
        self._known: set[str] = set()
        self._said: set[str] = set()
        self._orders: list[_ActiveOrder] = []
        self._capture: ModuleCapture | None = None
        self._writer: DumpWriter | None = None
        self._parcel: Parcel | None = None
        self._order: _ActiveOrder | None = None

    def configure(self, config: MonitorConfig) -> None:
        """Follow `config` from the next step on."""
        if self._keeper is not None:
            self._keeper.detach()
        self._replay = config.replay
        self._keeper = None
        if config.replay.enabled and config.wg_distribution:
            self._keeper = StepKeeper(
                self._stages(),
                self._replayable,
                names=self._names,
                memory_bytes=int(config.replay.memory_mb * MIB),
                examination=StepExamination(
                    classify=config.replay.classify, keep_bytes=self._outbox.room(int(config.replay.keep_mb * MIB))
                ),
            )
            if self._keeper.refusal:
                self._say_once(f"a step cannot be replayed: {self._keeper.refusal}")
            elif self._replayable.joint and not config.replay.joint:
                self._keeper = None
                self._say_once("a step cannot be replayed: its forward communicates, and replay.joint is false")
            elif self._replayable.joint and config.module_ranks:
                self._keeper = None
                self._say_once("a step cannot be replayed: that takes all ranks, and module_ranks leaves some out")

    def _stages(self) -> list[ModelStage]:
        """Return the roots, as the training loop calls them."""
        roots, entries = self._training.roots, self._replayable.entries
        if entries:
            return [ModelStage(entry, entry, root) for entry, root in zip(entries, roots, strict=True)]
        whole, stages = stage_of(self._training.model), [stage_of(root) for root in roots]
        return [whole] if [whole.model] == [stage.model for stage in stages] else stages

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._journal.append_event({"type": "warning", "message": message})
            logger.info(message)

    @property
    def joint(self) -> bool:
        """Whether all ranks replay together or none."""
        return self._replayable.joint

    @property
    def keeping(self) -> bool:
        """Whether this step is kept, so that it can be replayed."""
        return self._keeper is not None and self._keeper.attached

    def gradients_vanished(self) -> bool:
        """Return whether what is left of the gradients shows that the script clipped them by a norm not finite."""
        return self._keeper is not None and self._replayable.gradients_vanished()

    @property
    def replay_armed(self) -> bool:
        """Whether the gradients of this step are to be checked, for a replay if one is not finite."""
        return self._keeper is not None and self._num_replays < self._replay.max_replays

    def collects(self, step: int) -> bool:
        """Return whether a command asks to collect `step` beside the schedule."""
        return any(order.command.action is Action.COLLECT and order.covers(step) for order in self._orders)

    def prepare(self, step: int, *, gradients_due: bool) -> None:
        """Attach what `step` needs: the keeper of a replay, the capture of an ordered dump."""
        if self._keeper is not None:
            if gradients_due and self.replay_armed:
                self._keeper.attach()
            else:
                self._keeper.detach()
        self._orders = [order for order in self._orders if step < order.command.first_step + order.command.num_steps]
        due = [order for order in self._orders if order.command.action is Action.DUMP and order.covers(step)]
        if due:
            self._start_capture(step, due[0])

    def checked(self, step: int, *, nonfinite: bool) -> None:
        """Replay `step` if its gradients are the first that are not finite, and not by design. Never raises."""
        if nonfinite and self._replayable.expects_overflow():
            return
        if nonfinite and not self._nonfinite_before and self._keeper is not None:
            self._num_replays += 1
            info = self._info(REPLAY_ID, step, "a gradient is not finite at the entry of the optimizer step")
            parcel = self._parcel_for(REPLAY_ID, step)
            result = self._keeper.replay(
                parcel.content,
                info,
                task=self._replay.task,
                max_bytes=self._outbox.room(int(self._replay.max_dump_mb * MIB)),
                question=f"{self._run.run_id}/{self._run.attempt}/{step}",
                final=parcel.final,
            )
            dump = None if result.dump is None else parcel.place
            if dump is None:
                parcel.discard()
            else:
                parcel.send()
            self._journal.append_event(
                {
                    "type": "replay",
                    "step": step,
                    "status": result.status,
                    "dump": dump,
                    "reason": result.reason,
                    "seconds": result.seconds,
                    "micro_steps": result.micro_steps,
                    "bytes": result.bytes_written,
                }
            )
            logger.warning(
                "rank %d, step %d: gradients are not finite; replay: %s%s",
                self._rank,
                step,
                result.status,
                f" ({result.reason})" if result.reason else f", dumped to {dump}",
            )
        self._nonfinite_before = nonfinite

    def forget(self) -> None:
        """Let go of what was kept for a replay."""
        if self._keeper is not None:
            self._keeper.clear()

    def finish_step(self) -> None:
        """Let go of what was kept, and end the dump of this step if there is one."""
        self.forget()
        self._finish_capture()

    def _finish_capture(self) -> None:
        if self._capture is None or self._writer is None or self._order is None or self._parcel is None:
            return
        self._capture.detach()
        step = self._writer.info.step
        try:
            written = self._writer.close()
        except DumpError as error:
            self._parcel.send()
            self._tell(self._order.command, step, "failed", reason=str(error))
        else:
            self._parcel.send()
            self._order.bytes_left -= written.bytes_written
            status = "over quota" if written.over_quota else "written"
            self._tell(self._order.command, step, status, dump=self._parcel.place, bytes=written.bytes_written)
        self._capture = self._writer = self._order = self._parcel = None

    def abandon(self) -> None:
        """Take every hook away, and end an unfinished dump with what was captured."""
        self._finish_capture()
        if self._keeper is not None:
            self._keeper.detach()
            self._keeper.clear()

    def poll_commands(self, step: int) -> None:
        """Take up new commands; `step` is the next one to begin. Costs one memory read when there is none."""
        epoch = self._page.epoch()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for command in self._page.read_commands():
            if command.id not in self._known:
                self._known.add(command.id)
                self._take_up(command, step)

    def _take_up(self, command: Command, step: int) -> None:
        if command.action is Action.CONFIGURE:
            return
        if command.action is Action.STOP:
            self._orders.clear()
        elif command.first_step < step:
            self._tell(command, step, "late")
        elif command.scope and not any(chosen(m.name, command.scope) for m in self._training.modules):
            self._tell(command, step, "failed", reason=f"no module of the model is named by the scope {command.scope}")
        else:
            self._orders.append(_ActiveOrder(command=command, bytes_left=command.max_bytes))

    def _start_capture(self, step: int, order: _ActiveOrder) -> None:
        command = order.command
        info = self._info(command.id, step, command.reason)
        parcel = self._parcel_for(command.id, step)
        most = self._outbox.room(max(order.bytes_left, 0))
        try:
            writer = DumpWriter(parcel.content, info, task=command.task, max_bytes=most, final=parcel.final)
        except DumpError as error:
            parcel.discard()
            self._orders.remove(order)
            self._tell(command, step, "failed", reason=str(error))
            return
        self._capture = ModuleCapture(
            [stage.model for stage in self._stages()],
            writer,
            scope=command.scope,
            names=self._names,
            gathered=not self._replayable.shadowed,
        )
        self._capture.attach()
        self._writer, self._order, self._parcel = writer, order, parcel

    def _tell(self, command: Command, step: int | None, status: str, **details: object) -> None:
        self._journal.append_event({"type": "dump", "step": step, "command": command.id, "status": status, **details})

    def _info(self, dump_id: str, step: int, reason: str) -> DumpInfo:
        place = self._coordinates
        mixes = place.world_size > place.dp_size
        return DumpInfo(
            id=dump_id,
            step=step,
            attempt=self._run.attempt,
            rank=self._rank,
            reason=reason,
            pipeline_stage=place.pp,
            pipeline_size=place.pp_size,
            replica=(place.dp if place.ep_size == 1 else 0) if mixes or place.ep_size > 1 else None,
            layout=self._layout(),
        )

    def _layout(self) -> RankLayout:
        roots = [stage.model for stage in self._stages()]
        numbered = {str(number) if len(roots) > 1 else "": root for number, root in enumerate(roots)}
        return layout_of(numbered).in_whole()  # as the names of its modules are

    def _parcel_for(self, dump_id: str, step: int) -> Parcel:
        """Return the folder of a dump; one that cannot be made is the writer's to tell."""
        return self._outbox.parcel(f"dumps/{dump_id}/attempt{self._run.attempt}/step{step}/rank{self._rank}")
