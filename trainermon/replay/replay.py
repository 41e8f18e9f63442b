"""Runs the step that has just been computed once more, with every module watched, before the optimizer spoils it.

Once a non-finite gradient has been reduced and stepped, every weight of every rank is bad and nothing tells any more
where it came from. So before the optimizer writes the forwards are run again from kept arguments, generators and
buffers, and the backwards from the kept gradients of what the model returned. The run does not notice:

* The parameters are replaced by shadows for the time: leaves of their own that share the storage. Gradients, hooks and
  the reducer of the true parameters are out of reach, whatever kind of checkpointing the model uses. Where a framework
  gathers parameters for the forward, the true ones stay and their gradients are put aside.
* A model that keeps to itself is replayed by one rank alone, and nothing is communicated: one that would is
  recognised, by its kind or on its first attempt. A model that communicates is replayed by all ranks or by none.
* Generators, buffers, training flags and autocast are as before afterwards, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from trainermon.core.events import DumpStatus
from trainermon.core.values import SourceMode
from trainermon.dump.capture import ModuleCapture
from trainermon.dump.files.reader import read_dump, split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, DumpInfo
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.replayable import Replayable
from trainermon.replay.absent import absent_from_replay
from trainermon.replay.agreement import DisagreedError, ReplayAgreement, ReplayVote
from trainermon.replay.changes import changed, fingerprint, verdict_on
from trainermon.replay.in_float64 import Float64Calls, GradientCheck, stem_of
from trainermon.replay.keep import ForwardKeeper, KeptForward
from trainermon.replay.kept_step import KEPT_FILE, KeptStep, save_step
from trainermon.replay.operations import OperationWatch, RunningCalls
from trainermon.replay.rerun import (
    CommunicationError,
    ReplayFidelity,
    ReplayWatcher,
    StepRerun,
    eager,
    rerun,
    shadow_parameters,
    undisturbed,
)
from trainermon.replay.room import lack_of_memory
from trainermon.replay.shards import nonfinite_names
from trainermon.replay.state import NotCoveredError
from trainermon.replay.suitability import ModelStage, is_compiled, refusal_of, stage_of

logger = logging.getLogger("trainermon")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The outcome of a replay.

    Attributes:
        status: `nonfinite` (the fault is in the dump), `clean` (this rank's own forward and backward were finite),
            `refused` (not possible for this model or step) or `failed`.
        nonfinite: Whether a value of the replay was not finite.
        micro_steps: How many were replayed.
        seconds: How long it took.
        reason: Why it was refused or failed; else what is not covered.
        dump: Folder of the dump; None if nothing was written.
        bytes_written: Size of the dump.
    """

    status: DumpStatus
    nonfinite: bool
    micro_steps: int
    seconds: float
    reason: str
    dump: Path | None = None
    bytes_written: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepExamination:
    """What a replay examines beyond repeating a step that is not finite or not reproducible.

    With `classify` it is run once more: then the dump's info tells which operation made the first non-finite value and
    why, and whether the step is reproducible. Within `keep_bytes` it is kept on disk, for `trainermon replay`.
    """

    classify: bool = True
    keep_bytes: int = 0


class StepKeeper:
    """Keeps what a replay of the current step needs, and replays it.

    `attach` before the forward of a step that is to be watched, `replay` before its optimizer step writes if need be,
    `clear` after it, `detach` when the next step is not to be watched. While `replaying` is true hooks of others
    should do nothing: the model runs, but no training does.

    A root may be a plain module, one in DistributedDataParallel, or a compiled one (which is replayed in eager mode,
    and so not bit for bit); several are the stages of a virtual pipeline. `refusal` says why a replay is impossible, ""
    if it is possible. Memory: `ForwardKeeper`.

    Args:
        stages: The roots.
        replayable: What the framework asks of a replay.
        names: Names of modules, where the path below the root is not what they are to be called.
        memory_bytes: Most that is kept alive.
        examination: What else is done about a bad step.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[ModelStage],
        replayable: Replayable | None = None,
        *,
        names: Mapping[nn.Module, str] | None = None,
        memory_bytes: int = 256 << 20,
        examination: StepExamination = StepExamination(),
    ) -> None:
        self.replaying = False
        self._stages = [stage_of(stages)] if isinstance(stages, nn.Module) else list(stages)
        self._models = [stage.model for stage in self._stages]
        self._replayable = replayable or Replayable()
        self._names = names
        self._compiled = any(is_compiled(stage.entry, stage.model) for stage in self._stages)
        self._memory_bytes = memory_bytes
        self._examination = examination
        self._keeper = ForwardKeeper(self._stages, self._replayable, memory_bytes=memory_bytes)
        self.refusal = self._replayable.refusal or refusal_of(self._stages, self._replayable)

    def attach(self) -> None:
        """Hook the model to keep the forwards from now on; nothing is hooked if a replay would be refused anyway."""
        if not self.refusal:
            self._keeper.attach()

    def detach(self) -> None:
        """Remove the hooks; what was kept stays."""
        self._keeper.detach()

    def reset(self) -> None:
        """Release what was kept: the step is over."""
        self._keeper.reset()

    def take_over(self, step: KeptStep) -> None:
        """Keep, instead of an own step, one that another process kept on disk, to replay it here."""
        self._keeper.take_over(step.forwards, step.dropped)

    @property
    def attached(self) -> bool:
        """Whether its hooks are on the model."""
        return self._keeper.attached

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that are kept alive now."""
        return self._keeper.size_bytes

    def replay(  # noqa: PLR0913  # what is written, where to, and what the ranks agree on
        self,
        directory: Path,
        info: DumpInfo,
        *,
        task: str = "statistics",
        max_bytes: int = 1 << 30,
        question: str = "",
        final: Path | None = None,
        source: SourceMode = SourceMode.FUNCTIONS,
    ) -> ReplayResult:
        """Run the kept micro steps again into a dump in `directory`, which is taken to `final` later; never raises.

        Call it before the optimizer writes to the parameters, when they are still those of the forward. A model that
        communicates is replayed if every rank calls this with the same `question` within ten seconds; it names the step
        once and for all among the ranks of the job.
        """
        started = time.perf_counter()
        if self.refusal:
            return _unreplayed(_ReplayOutcome(DumpStatus.REFUSED, self.refusal), started)
        vote = ReplayVote(self._agreement(), question, self._counts())
        outcome, writer = _ReplayOutcome(), None
        try:
            reason = self._reason_against()
            if reason:
                outcome = _ReplayOutcome(DumpStatus.REFUSED, reason)
            else:
                shards = tuple(nonfinite_names(self._replayable.own_shards()))
                info = dataclasses.replace(info, replay=True, joint=self._replayable.joint, bad_shards=shards)
                writer = DumpWriter(directory, info, task=task, max_bytes=max_bytes, final=final)
                writer.source = source
                outcome = self._attempt(self._capture(writer), vote)
        except Exception as error:  # noqa: BLE001  # the border to training: no dump, but the step goes on
            outcome = _ReplayOutcome(DumpStatus.FAILED, f"{type(error).__name__}: {error}")
        vote.against(outcome.reason)
        if writer is None:
            return _unreplayed(outcome, started)
        again = ReplayVote(self._agreement(), f"{question}/again", self._counts())
        return self._finished(writer, outcome, started, again)

    def _agreement(self) -> ReplayAgreement | None:
        return ReplayAgreement.of_all_ranks() if self._replayable.joint else None

    def _counts(self) -> list[tuple[int, int]]:
        """Return how many micro steps each root had, and how many of them are kept."""
        kept = [len(self._keeper.complete(number)) for number in range(len(self._stages))]
        return [(count + dropped, count) for count, dropped in zip(kept, self._keeper.dropped, strict=True)]

    def _reason_against(self) -> str:
        if not all(count for _, count in self._counts()):
            return self._uncovered() or "no forward with a gradient was kept for this step"
        if not self._replayable.joint:
            return ""
        try:
            for kept in self._keeper.forwards:
                kept.check()
        except NotCoveredError as error:
            return str(error)
        lack = lack_of_memory(self._keeper.devices, self._keeper.size_bytes)
        return lack or self._replayable.not_ready() or (self._uncovered() if self._keeper.error else "")

    def _capture(self, writer: DumpWriter) -> ModuleCapture:
        gathered = not self._replayable.shadowed
        return ModuleCapture(self._models, writer, names=self._names, gathered=gathered)

    def _attempt(
        self, watcher: ReplayWatcher, vote: ReplayVote, mode: AbstractContextManager[Any] | None = None
    ) -> _ReplayOutcome:
        """Run what the ranks agree on once more, with `watcher` on the modules and under `mode`; return the outcome."""
        return self._guarded(watcher, functools.partial(self._rerun, vote, mode))

    def _guarded(self, watcher: ReplayWatcher, body: Callable[[StepRerun], _ReplayOutcome]) -> _ReplayOutcome:
        """Return what `body` returns, run with everything in place, or the outcome of its error: the step goes on."""
        self.replaying = self._keeper.muted = True
        try:
            with self._prepared(watcher) as using:
                return body(using)
        except (CommunicationError, DisagreedError, NotCoveredError) as error:
            return _ReplayOutcome(DumpStatus.REFUSED, str(error))
        except Exception as error:  # the border to training: whatever the model raises, the step goes on
            logger.warning("the replay of a step failed: %s", error, exc_info=error)
            return _ReplayOutcome(DumpStatus.FAILED, f"{type(error).__name__}: {error}")
        finally:
            self.replaying = self._keeper.muted = False

    def _rerun(self, vote: ReplayVote, mode: AbstractContextManager[Any] | None, using: StepRerun) -> _ReplayOutcome:
        before = {} if mode is None else fingerprint(self._models)  # before the vote: it may fail on this rank alone
        chosen = self._last(vote.cast())
        fidelities = _rerun_all(chosen, using._replace(mode=mode))
        num_micro_steps = len({micro_step for micro_step, _ in chosen})
        return _ReplayOutcome(
            micro_steps=num_micro_steps,
            left_out=max(kept for _, kept in self._counts()) - num_micro_steps,
            fidelities=fidelities,
            changes=() if mode is None else changed(before, fingerprint(self._models)),
        )

    def _examined(
        self, outcome: _ReplayOutcome, directory: Path, *, nonfinite: bool, vote: ReplayVote
    ) -> dict[str, Any]:
        """Return fields of the dump's info: what a second replay told, and where the step was kept; {} on an error.

        The dump is whole already, whatever goes wrong here.
        """
        try:
            said = self._again(outcome, nonfinite=nonfinite, vote=vote)
            if nonfinite or outcome.reproduced is False:
                said["kept"] = self._keep_on_disk(directory)
        except Exception as error:  # the border to training: the verdicts are lost, not the dump
            logger.warning("a replayed step could not be examined: %s", error, exc_info=error)
            vote.against(f"{type(error).__name__}: {error}")
            return {}
        return said

    def _again(self, first: _ReplayOutcome, *, nonfinite: bool, vote: ReplayVote) -> dict[str, Any]:
        """Return fields of the dump's info from a second replay: reproducibility and the first bad operations.

        Where the ranks replay together they all do so twice: none of them knows what another one found.
        """
        if not self._examination.classify:
            return {}
        calls = RunningCalls(self._models, self._names)
        second, watch = _ReplayOutcome(DumpStatus.REFUSED), OperationWatch(calls)
        if first.status is not DumpStatus.CLEAN:
            vote.against(first.reason or first.status)
            return {}
        if self._replayable.joint or nonfinite or first.reproduced is False:
            second = self._attempt(calls, vote, watch)
            vote.against(second.reason)
        verdict, reason = verdict_on(first.fidelities, second.fidelities, second.changes, is_eager=self._compiled)
        said = {"reproducibility": verdict, "reproducibility_reason": reason}
        if second.status is not DumpStatus.CLEAN or not watch.found:
            return said
        return {**said, "operations": tuple(watch.found), **self._in_float64(watch.found, calls)}

    def _in_float64(self, operations: Sequence[OperationVerdict], calls: RunningCalls) -> dict[str, Any]:
        """Return fields of the dump's info: whether the step is finite with these modules in float64, and which.

        Empty where one rank alone cannot tell.
        """
        if self._replayable.joint or not self._replayable.shadowed or self._compiled:
            return {}
        computed = [operation.call for operation in operations if operation.cause is not NonfiniteCause.INHERITED]
        keys = [call.replace(f".{BACKWARD}.", f".{FORWARD}.") for call in computed]
        if not keys:
            return {}
        stems = dict.fromkeys(map(stem_of, keys))
        finite: list[bool] = []

        def body(using: StepRerun) -> _ReplayOutcome:
            with GradientCheck(using.leaves or ()) as gradients:
                fidelities = _rerun_all(self._last(max(kept for _, kept in self._counts())), using)
            finite.append(gradients.finite and all(fidelity.finite for fidelity in fidelities))
            return _ReplayOutcome()

        self._guarded(Float64Calls(self._models, self._names, stems=stems, gave=calls.gave), body)
        names = tuple(split_key(f"{stem}.{FORWARD}.0")[0] if stem else "(model)" for stem in stems)
        return {"float64_finite": finite[0], "float64_modules": names} if finite else {}

    @contextmanager
    def _prepared(self, watcher: ReplayWatcher) -> Iterator[StepRerun]:
        """Return a context for a replay, in which only the model itself can fail; it yields a `StepRerun`."""
        with (
            undisturbed(
                self._models, self._replayable, [leaf for kept in self._keeper.forwards for leaf in kept.leaves]
            ),
            eager(compiled=self._compiled),
            shadow_parameters(self._models) if self._replayable.shadowed else nullcontext() as leaves,
        ):
            watcher.attach()
            try:
                yield StepRerun(self._stages, self._replayable, watcher, leaves)
            finally:
                watcher.detach()

    def _last(self, most: int) -> list[tuple[int, KeptForward]]:
        """Return the kept forwards in the order of the step, with their micro steps; of each root the `most` last."""
        chosen = {}
        for number, dropped in enumerate(self._keeper.dropped):
            for micro_step, kept in list(enumerate(self._keeper.complete(number), dropped))[-most:]:
                chosen[id(kept)] = micro_step
        return [(chosen[id(kept)], kept) for kept in self._keeper.forwards if id(kept) in chosen]

    def _finished(self, writer: DumpWriter, outcome: _ReplayOutcome, started: float, vote: ReplayVote) -> ReplayResult:
        uncovered = "; ".join(filter(None, [self._uncovered(), outcome.shortened]))
        notes = ["the compiled model was replayed in eager mode: values may differ in the last bits"]
        try:
            writer.publish(
                micro_steps=outcome.micro_steps,
                aborted="" if outcome.status is DumpStatus.CLEAN else outcome.status.value,
                uncovered="; ".join(filter(None, [uncovered, outcome.reason])),
                absent=absent_from_replay(self._keeper),
                reproduced=outcome.reproduced,
                lost_nonfinite=outcome.lost_nonfinite,
                notes=(*writer.info.notes, *(notes if self._compiled else ())),
            )
            nonfinite = read_dump(writer.directory).nonfinite
            written = writer.close(**self._examined(outcome, writer.directory, nonfinite=nonfinite, vote=vote))
        except Exception as error:  # noqa: BLE001  # the border to training
            failed = _ReplayOutcome(DumpStatus.FAILED, outcome.reason or f"{type(error).__name__}: {error}")
            vote.against(failed.reason)
            return _unreplayed(failed, started)
        lost = "the step's own output was not finite, the replay's is: a transient fault"
        return ReplayResult(
            status=DumpStatus.NONFINITE if outcome.status is DumpStatus.CLEAN and nonfinite else outcome.status,
            nonfinite=nonfinite,
            micro_steps=outcome.micro_steps,
            seconds=time.perf_counter() - started,
            reason=outcome.reason or (lost if outcome.lost_nonfinite else uncovered),
            dump=writer.directory,
            bytes_written=written.bytes_written,
        )

    def _keep_on_disk(self, directory: Path) -> str:
        """Return the name of the file in `directory` that the step can be replayed from, or why there is none."""
        if not self._examination.keep_bytes:
            return "not kept on disk: replay.keep_mb is 0"
        if self._replayable.joint or not self._replayable.shadowed or len(self._stages) > 1:
            return "not kept on disk: the model is split over ranks, and a replay takes all of them"
        try:
            path, (dropped,) = directory / KEPT_FILE, self._keeper.dropped
            max_bytes = self._examination.keep_bytes
            save_step(path, self._models[0], self._keeper.complete(0), dropped=dropped, max_bytes=max_bytes)
        except (NotCoveredError, OSError) as error:
            return f"not kept on disk: {error}"
        return KEPT_FILE

    def _uncovered(self) -> str:
        parts = []
        if any(self._keeper.dropped):
            number, mebibytes = max(self._keeper.dropped), self._memory_bytes / 2**20
            parts.append(f"the first {number} micro steps did not fit the budget of {mebibytes:g} MiB")
        if self._keeper.error:
            parts.append(f"a forward was not kept: {self._keeper.error}")
        parts += [f"the step had {found}, which is not in the replay" for found in absent_from_replay(self._keeper)]
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _ReplayOutcome:
    status: DumpStatus = DumpStatus.CLEAN
    reason: str = ""
    micro_steps: int = 0
    left_out: int = 0
    fidelities: Sequence[ReplayFidelity] = ()
    changes: Sequence[str] = ()

    @property
    def shortened(self) -> str:
        return (
            f"another rank had not kept {self.left_out} of the micro steps that this one had" if self.left_out else ""
        )

    @property
    def reproduced(self) -> bool | None:
        known = [fidelity.same for fidelity in self.fidelities if fidelity.same is not None]
        return all(known) if known else None

    @property
    def lost_nonfinite(self) -> bool:
        return any(fidelity.lost_nonfinite for fidelity in self.fidelities)


def _rerun_all(forwards: Sequence[tuple[int, KeptForward]], using: StepRerun) -> list[ReplayFidelity]:
    fidelities = []
    for micro_step, kept in forwards:
        using.watcher.micro_step, using.watcher.stage = micro_step, kept.stage
        fidelities.append(rerun(kept, using))
        using.replayable.between_micro_steps()
    return fidelities


def _unreplayed(outcome: _ReplayOutcome, started: float) -> ReplayResult:
    seconds = time.perf_counter() - started
    return ReplayResult(status=outcome.status, nonfinite=False, micro_steps=0, seconds=seconds, reason=outcome.reason)
