"""`TrainerMon`: three lines in a training script.

Until `set_monitor` returns, anything that the script or its configuration has wrong is refused with an error. What the
machine has no room for is logged, and the training goes on unwatched. After it, nothing the monitor does reaches
training: a fault is logged once, and the monitor detaches itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from trainermon.core.config import load_config
from trainermon.core.errors import AttachError, TrainermonError, lacks_room
from trainermon.core.strict import shown
from trainermon.monitor.api_format import CallsOfMsprobe
from trainermon.monitor.sessions import open_session

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainermon.monitor.session.attached_rank import AttachedRank

    Numbers = Tensor | float | Mapping[str, Tensor | float]

logger = logging.getLogger("trainermon")

MAX_STEP = 2**53


class TrainerMon(CallsOfMsprobe):
    """Monitors the training of one model by one optimizer, from `set_monitor` to `close`.

    Args:
        config_file_path: JSON or YAML file, or a mapping of the same keys (`MonitorConfig` lists them); without one,
            gradients, loss and step time are collected at every step.
        process_group: The pipeline-parallel group, if there is one.
        params_have_main_grad: Accepted for compatibility; where gradients live is found out, not assumed.

    Raises:
        ConfigError: The configuration cannot be met as written.
    """

    def __init__(
        self,
        config_file_path: str | Path | Mapping[str, Any] | None = None,
        process_group: Any = None,
        params_have_main_grad: bool = True,  # noqa: FBT001, FBT002  # the signature that users know
    ) -> None:
        del params_have_main_grad
        self._source = config_file_path
        self._config, self._notes = load_config(config_file_path)
        self._pipeline_group = process_group
        self._attached: AttachedRank | None = None
        self._had_no_room = False
        self._finalizer: multiprocessing.util.Finalize | None = None

    def set_monitor(  # noqa: PLR0913, PLR0917  # the signature that users know
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        grad_acc_steps: Any = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Start watching: the next `optimizer.step()` ends step `start_iteration`.

        Args:
            model: The model as the training loop calls it, or the list of its virtual pipeline stages.
            optimizer: The optimizer whose `step()` ends a training step. `(model, grad_acc_steps, optimizer)`, the
                order of msprobe's manual, is understood as well.
            grad_acc_steps: Backward passes per optimizer step.
            tp_group: Tensor-parallel process group, if there is one.
            dp_group: Data-parallel process group; without it, all ranks.
            start_iteration: Number of the first step.

        Every rank of a job calls it. Ranks agree on the run's name through the process group's store; there is no
        collective. Starts the node agent on local rank 0 (about 50 ms, at most 3 s to learn its address).

        Where a disk has no room for what the monitor writes, one line says so, and the training goes on unwatched.

        Raises:
            AttachError, ConfigError, SpoolError: Something cannot be watched, or written, as asked.
        """
        if isinstance(optimizer, int) and not isinstance(grad_acc_steps, int):
            optimizer, grad_acc_steps = grad_acc_steps, optimizer
        stages = self._checked_arguments(model, grad_acc_steps)
        _require_step(start_iteration)
        groups = {"tp": tp_group, "dp": dp_group, "pp": self._pipeline_group}
        try:
            attached, notes = open_session(stages, optimizer, self._config, groups)
            notes = [*self._notes, *notes]
            self._attach(attached, num_micro_steps=grad_acc_steps, step=start_iteration, notes=notes)
        except (TrainermonError, OSError) as error:
            self._had_no_room = lacks_room(error)
            if not self._had_no_room:
                raise
            logger.error("this rank is not monitored, and its training goes on: %s", error)  # noqa: TRY400  # it says all
            return
        for note in notes:
            logger.warning("%s", note)

    def record(self, *, loss: Numbers | None = None, **values: Numbers) -> None:
        """Record the loss, and any other number of the step (`lr=…`, `tokens=…`), under the step it belongs to.

        The numbers of a mapping are recorded under their own names: of `loss={"lm": …, "mtp": …}` none is the loss that
        the rules watch, unless it has one of the name `loss`. What is no number is left out, and logged once. A tensor
        may have any shape; it is reduced to its moments on its device, and nothing waits for it. Of several calls in
        one step (one per micro step), the last one counts.
        """
        if loss is not None:
            values["loss"] = loss
        if self._attached is not None:
            self._attached.record(values)

    def watch(self, optimizer: Any) -> Any:
        """Return what takes the place of a MindSpore optimizer in steps that MindSpore compiles (graph mode, `jit`).

        No hook runs in a compiled step. `optimizer = monitor.watch(optimizer)` after `set_monitor`, and before the step
        is compiled, has the step itself keep the statistics of its gradients; `record`, called after each step, files
        them. PyTorch needs none of it.

        Raises:
            AttachError: Nothing is watched, or it is not a training of MindSpore, or another optimizer.
        """
        watch = getattr(self._attached, "watch", None)
        if watch is None and self._had_no_room:
            return optimizer
        if watch is None:
            raise AttachError("watch: expected a model of MindSpore that set_monitor was called with before")
        return watch(optimizer)

    def expect_micro_steps(self, number: int) -> None:
        """Set how many backward passes the step that runs has, where it is not `grad_acc_steps`.

        For the last step of an epoch that does not divide evenly. Call it before the step's last backward; the steps
        after it have `grad_acc_steps` again. With a wrong number gradients may be read after clipping.
        """
        if self._attached is not None:
            self._attached.expect_micro_steps(number)

    def scale_found_loss(self, factor: float) -> None:
        """Multiply the loss that is found in what the model returns by `factor`.

        For loops whose model returns a share of the step's loss, as transformers' Trainer has it. Losses that are
        recorded are kept as they are.
        """
        if self._attached is not None:
            self._attached.scale_found_loss(factor)

    def phase(self, name: Literal["setup", "checkpoint", "evaluation"]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the agent knows what this rank is busy with, so that it is not taken for hung.

        Checkpoints and evaluations are mostly seen without it. It helps on ranks that only wait for another one's. For
        how long a phase may last is configured under `hang`. Never raises: another name has no effect but a warning.
        """
        return contextlib.nullcontext() if self._attached is None else self._attached.phase(name)

    def close(self) -> None:
        """Write what is left, remove every hook, and wait a bounded time for the agent to store it."""
        self._close(None)

    def _attach(self, attached: AttachedRank, *, num_micro_steps: int, step: int, notes: Sequence[str]) -> None:
        try:
            attached.start(num_micro_steps=num_micro_steps, step=step, config_source=self._source, notes=notes)
        except BaseException:  # whatever it was, nothing of ours stays on the model; it goes on to the script
            attached.undo_start()
            raise
        self._attached = attached
        atexit.register(self._close_at_exit)
        if multiprocessing.parent_process() is not None:  # such a process may end without what is registered at exit
            self._finalizer = multiprocessing.util.Finalize(None, self._close_in_child, exitpriority=0)

    def _close_at_exit(self) -> None:
        # The interpreter leaves here what it printed last; in a session, that may be long ago.
        is_session = bool(getattr(sys, "ps1", sys.flags.interactive))
        self._close(None if is_session else getattr(sys, "last_value", None))

    def _close_in_child(self) -> None:
        error = sys.exc_info()[1]  # what ends the process's function is on its way out
        cause = error.__context__ if isinstance(error, SystemExit) else None  # torch.multiprocessing turns it into one
        self._close(cause or error)

    def _close(self, error: BaseException | None) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if self._attached is not None:
            atexit.unregister(self._close_at_exit)
            if self._finalizer is not None:
                self._finalizer.cancel()
            attached, self._attached = self._attached, None
            attached.close(error)

    @property
    def run_directory(self) -> Path | None:
        """The folder that holds what this run leaves behind; None before `set_monitor` and after `close`."""
        return None if self._attached is None else self._attached.run.directory

    def __enter__(self) -> TrainerMon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _checked_arguments(self, model: object, grad_acc_steps: object) -> list[Any]:
        """Return the model's stages."""
        if self._attached is not None:
            raise AttachError("set_monitor was called already: close() this TrainerMon first, or make another one")
        chunks = list(model) if isinstance(model, list | tuple) else [model]
        if not isinstance(grad_acc_steps, int) or isinstance(grad_acc_steps, bool) or grad_acc_steps < 1:
            raise AttachError(f"grad_acc_steps: found {shown(grad_acc_steps)}, expected a whole number, 1 or more")
        if len({id(chunk) for chunk in chunks}) < len(chunks):
            raise AttachError("model: found the same module twice in the list of virtual pipeline stages")
        return chunks


def _require_step(start_iteration: object) -> None:
    if type(start_iteration) is not int or not 0 <= start_iteration <= MAX_STEP:
        raise AttachError(
            f"start_iteration: found {shown(start_iteration)}, expected a whole number from 0 to {MAX_STEP}"
        )


def set_monitor(  # noqa: PLR0913, PLR0917  # the signature that users know, and where the configuration is
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    grad_acc_steps: Any = 1,
    tp_group: Any = None,
    dp_group: Any = None,
    start_iteration: int = 0,
    *,
    config_file_path: str | Path | Mapping[str, Any] | None = None,
) -> TrainerMon:
    """Make a `TrainerMon`, call its `set_monitor`, and return it; it is closed at exit if not before."""
    monitor = TrainerMon(config_file_path)
    monitor.set_monitor(model, optimizer, grad_acc_steps, tp_group, dp_group, start_iteration)
    return monitor
