"""Which steps are replayed, and what the journal says of it."""

from __future__ import annotations

import logging

from trainermon.core.config import MonitorConfig
from trainermon.core.events import ReplayEvent, WarningEvent
from trainermon.core.journal import JournalWriter
from trainermon.monitor.session.dump_origin import DumpOrigin
from trainermon.replay.replay import StepExamination, StepKeeper

logger = logging.getLogger("trainermon")

MIB = 1 << 20
REPLAY_ID = "gradient-nonfinite"


class StepReplays:
    """Replays a step when its gradients are not finite while those of the step before were.

    Later steps only show the consequences.
    """

    def __init__(self, origin: DumpOrigin, journal: JournalWriter) -> None:
        self._origin = origin
        self._journal = journal
        self._keeper: StepKeeper | None = None
        self._settings = MonitorConfig().replay
        self._num_replays = 0
        self._nonfinite_before = False
        self._said: set[str] = set()

    def configure(self, config: MonitorConfig) -> None:
        """Take the settings of replays from `config`, from the next step on."""
        if self._keeper is not None:
            self._keeper.detach()
        self._settings = config.replay
        self._keeper = None
        if not (config.replay.enabled and config.wg_distribution):
            return
        keeper = self._new_keeper()
        if keeper.refusal:
            self._say_once(f"a step cannot be replayed: {keeper.refusal}")
        elif self.joint and not config.replay.joint:
            self._say_once("a step cannot be replayed: its forward communicates, and replay.joint is false")
            return
        elif self.joint and config.module_ranks:
            self._say_once("a step cannot be replayed: that takes all ranks, and module_ranks leaves some out")
            return
        self._keeper = keeper

    def _new_keeper(self) -> StepKeeper:
        settings, origin = self._settings, self._origin
        return StepKeeper(
            origin.stages(),
            origin.replayable,
            names=origin.names,
            memory_bytes=int(settings.memory_mb * MIB),
            examination=StepExamination(
                classify=settings.classify, keep_bytes=origin.room(int(settings.keep_mb * MIB))
            ),
        )

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._journal.append_event(WarningEvent(message=message))
            logger.info(message)

    @property
    def joint(self) -> bool:
        """Whether a replay needs all ranks to take part, as the model communicates."""
        return self._origin.replayable.joint

    @property
    def keeping(self) -> bool:
        """Whether the inputs of this step are kept, so that it can be replayed."""
        return self._keeper is not None and self._keeper.attached

    @property
    def armed(self) -> bool:
        """Whether the gradients of this step are to be checked, for a replay if one is not finite."""
        return self._keeper is not None and self._num_replays < self._settings.max_replays

    def gradients_vanished(self) -> bool:
        """Return whether what is left of the gradients shows that the script clipped them by a norm not finite."""
        return self._keeper is not None and self._origin.replayable.gradients_vanished()

    def prepare(self, *, gradients_due: bool) -> None:
        """Keep the inputs of the coming step if it may be replayed."""
        if self._keeper is not None:
            if gradients_due and self.armed:
                self._keeper.attach()
            else:
                self._keeper.detach()

    def checked(self, step: int, *, nonfinite: bool) -> None:
        """Replay `step` if its gradients are the first that are not finite, and not by design. Never raises."""
        if nonfinite and self._origin.replayable.expects_overflow():
            return
        if nonfinite and not self._nonfinite_before and self._keeper is not None:
            self._replay(self._keeper, step)
        self._nonfinite_before = nonfinite

    def _replay(self, keeper: StepKeeper, step: int) -> None:
        self._num_replays += 1
        info = self._origin.info(REPLAY_ID, step, "a gradient is not finite at the entry of the optimizer step")
        parcel = self._origin.parcel(REPLAY_ID, step)
        result = keeper.replay(
            parcel.content,
            info,
            task=self._settings.task,
            max_bytes=self._origin.room(int(self._settings.max_dump_mb * MIB)),
            question=self._origin.question(step),
            final=parcel.final,
            source=self._origin.source,
        )
        dump = None if result.dump is None else parcel.place
        if dump is None:
            parcel.delete()
        else:
            parcel.send()
        self._journal.append_event(
            ReplayEvent(
                step=step,
                status=result.status,
                dump=dump,
                reason=result.reason,
                seconds=result.seconds,
                micro_steps=result.micro_steps,
                bytes=result.bytes_written,
            )
        )
        logger.warning(
            "rank %d, step %d: gradients are not finite; replay: %s%s",
            self._origin.rank,
            step,
            result.status,
            f" ({result.reason})" if result.reason else f", dumped to {dump}",
        )

    def reset(self) -> None:
        """Release what was kept for a replay."""
        if self._keeper is not None:
            self._keeper.reset()

    def detach(self) -> None:
        """Remove every hook, and release what was kept."""
        if self._keeper is not None:
            self._keeper.detach()
            self._keeper.reset()
