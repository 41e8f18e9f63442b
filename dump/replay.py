"""Runs the step that has just been computed once more, with every module watched, before the optimizer spoils it.

Once a non-finite gradient has been reduced and stepped, every weight of every rank is bad and nothing tells any more
where it came from. So at the entry of the optimizer step the forwards are run again from kept arguments, generators and
buffers, and the backwards from the kept gradients of what the model returned. The run does not notice:

* The parameters are replaced by shadows for the time: leaves of their own that share the storage. Gradients, hooks and
  the reducer of the true parameters are out of reach, whatever kind of checkpointing the model uses.
* Nothing is communicated: a model that would is recognised, by its kind or on its first attempt, and refused.
* Generators, buffers, training flags and autocast are as before afterwards, bit for bit.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from trainermon.dump.capture import ModuleCapture
from trainermon.dump.keep import ForwardKeeper, KeptForward
from trainermon.dump.reader import read_dump
from trainermon.dump.records import DumpInfo
from trainermon.dump.rerun import CommunicationError, Fidelity, eager, rerun, shadow_parameters, undisturbed
from trainermon.dump.state import NotCoveredError
from trainermon.dump.suitability import is_compiled, refusal_of, unwrap
from trainermon.dump.writer import DumpWriter

logger = logging.getLogger("trainermon")

NONFINITE = "nonfinite"
CLEAN = "clean"
REFUSED = "refused"
FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What a replay came to.

    `status` is `nonfinite` (the fault is in the dump), `clean` (this rank's own forward and backward were finite),
    `refused` (not possible for this model or step) or `failed`; the last two give a `reason`, and a `reason` beside the
    first two says what is not covered. `dump` is None if nothing was written.
    """

    status: str
    nonfinite: bool
    micro_steps: int
    seconds: float
    reason: str
    dump: Path | None = None
    bytes_written: int = 0


class StepKeeper:
    """Keeps what a replay of the current step needs, and replays it.

    `attach` before the forward of a step that is to be watched, `replay` at the entry of its optimizer step if need
    be, `clear` after it, `detach` when the next step is not to be watched. While `replaying` is true hooks of others
    should do nothing: the model runs, but no training does.

    `root` may be a plain module, one in DistributedDataParallel, or a compiled one (which is replayed in eager mode,
    and so not bit for bit). `refusal` says why a replay is impossible, "" if it is possible. Memory: `ForwardKeeper`.
    """

    def __init__(self, root: nn.Module, *, memory_bytes: int = 256 << 20) -> None:
        self.replaying = False
        self._entry, self._model = unwrap(root)
        self._compiled = is_compiled(self._entry, self._model)
        self._memory_bytes = memory_bytes
        self._keeper = ForwardKeeper(self._entry, self._model, memory_bytes=memory_bytes)
        self.refusal = refusal_of(root, self._entry, self._model)

    def attach(self) -> None:
        """Keep the forwards from now on; nothing is hooked if a replay would be refused anyway."""
        if not self.refusal:
            self._keeper.attach()

    def detach(self) -> None:
        """Stop keeping; what was kept stays."""
        self._keeper.detach()

    def clear(self) -> None:
        """Let go of what was kept: the step is over."""
        self._keeper.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept alive now."""
        return self._keeper.size_bytes

    def replay(
        self, directory: Path, info: DumpInfo, *, task: str = "statistics", max_bytes: int = 1 << 30
    ) -> ReplayResult:
        """Run the kept micro steps again into a dump in `directory`; never raises.

        Call it at the entry of the optimizer step, when the parameters are still those of the forward.
        """
        started = time.perf_counter()
        forwards = [kept for kept in self._keeper.forwards if kept.has_gradient]
        reason = self.refusal or ("" if forwards else self._nothing_kept())
        if reason:
            return _unreplayed(REFUSED, reason, started)
        try:
            info = dataclasses.replace(info, replay=True)
            writer = DumpWriter(directory, info, task=task, max_bytes=max_bytes)
        except Exception as error:  # noqa: BLE001  # the border to training: no dump, but the step goes on
            return _unreplayed(FAILED, f"{type(error).__name__}: {error}", started)
        outcome = self._run(writer, forwards)
        return self._finished(writer, outcome, len(forwards), started)

    def _run(self, writer: DumpWriter, forwards: list[KeptForward]) -> _Outcome:
        self.replaying = self._keeper.muted = True
        try:
            with undisturbed(self._model), eager(compiled=self._compiled), shadow_parameters(self._model) as shadows:
                capture = ModuleCapture(self._model, writer)
                capture.attach()
                try:
                    return _Outcome(fidelities=self._rerun_all(forwards, capture, shadows))
                finally:
                    capture.detach()
        except (CommunicationError, NotCoveredError) as error:
            return _Outcome(REFUSED, str(error))
        except Exception as error:  # the border to training: whatever the model raises, the step goes on
            logger.warning("the replay of a step failed: %s", error, exc_info=error)
            return _Outcome(FAILED, f"{type(error).__name__}: {error}")
        finally:
            self.replaying = self._keeper.muted = False

    def _rerun_all(
        self, forwards: list[KeptForward], capture: ModuleCapture, shadows: list[nn.Parameter]
    ) -> list[Fidelity]:
        fidelities = []
        for micro_step, kept in enumerate(forwards, self._keeper.dropped):
            capture.micro_step = micro_step
            fidelities.append(rerun(self._model, kept, capture, shadows))
        return fidelities

    def _finished(self, writer: DumpWriter, outcome: _Outcome, micro_steps: int, started: float) -> ReplayResult:
        uncovered = self._uncovered()
        notes = ["the compiled model was replayed in eager mode: values may differ in the last bits"]
        try:
            written = writer.close(
                micro_steps=micro_steps,
                aborted="" if outcome.status == CLEAN else outcome.status,
                uncovered="; ".join(filter(None, [uncovered, outcome.reason])),
                reproduced=outcome.reproduced,
                lost_nonfinite=outcome.lost_nonfinite,
                notes=tuple(notes if self._compiled else ()),
            )
            nonfinite = read_dump(writer.directory).nonfinite
        except Exception as error:  # noqa: BLE001  # the border to training
            return _unreplayed(FAILED, outcome.reason or f"{type(error).__name__}: {error}", started)
        lost = "the step's own output was not finite, the replay's is: a transient fault"
        return ReplayResult(
            status=NONFINITE if outcome.status == CLEAN and nonfinite else outcome.status,
            nonfinite=nonfinite,
            micro_steps=micro_steps,
            seconds=time.perf_counter() - started,
            reason=outcome.reason or (lost if outcome.lost_nonfinite else uncovered),
            dump=writer.directory,
            bytes_written=written.bytes_written,
        )

    def _uncovered(self) -> str:
        parts = []
        if self._keeper.dropped:
            mebibytes = self._memory_bytes / 2**20
            parts.append(f"the first {self._keeper.dropped} micro steps did not fit the budget of {mebibytes:g} MiB")
        if self._keeper.error:
            parts.append(f"a forward was not kept: {self._keeper.error}")
        return "; ".join(parts)

    def _nothing_kept(self) -> str:
        return self._uncovered() or "no forward with a gradient was kept for this step"


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    status: str = CLEAN
    reason: str = ""
    fidelities: Sequence[Fidelity] = ()

    @property
    def reproduced(self) -> bool | None:
        known = [fidelity.same for fidelity in self.fidelities if fidelity.same is not None]
        return all(known) if known else None

    @property
    def lost_nonfinite(self) -> bool:
        return any(fidelity.lost_nonfinite for fidelity in self.fidelities)


def _unreplayed(status: str, reason: str, started: float) -> ReplayResult:
    seconds = time.perf_counter() - started
    return ReplayResult(status=status, nonfinite=False, micro_steps=0, seconds=seconds, reason=reason)
