"""`PrecisionDebugger` for MindSpore: dumps of chosen steps, ordered by the script, with msprobe's interface."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import mindspore
from mindspore import Tensor, nn
from mindspore.communication import GlobalComm, get_rank

from trainermon.core.config.reading import read_mapping
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.log import make_log_visible
from trainermon.core.strict import shown
from trainermon.core.values import well_formed
from trainermon.dump.debugger_config import DebuggerConfig, default_file, read_debugger_config
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.files.waiting import has_room
from trainermon.dump.forms import TensorLeaf
from trainermon.dump.mindspore.encoding import encode, is_followed
from trainermon.dump.mindspore.recording import OF_CELLS, StepCapture
from trainermon.dump.mindspore.writer import SelectingCellWriter
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore.hooks import on_gradient

logger = logging.getLogger("trainermon")

Cells: TypeAlias = nn.Cell | Sequence[nn.Cell] | Mapping[str, nn.Cell] | None
TASKS = ("statistics", "tensor", "structure")
LEVELS = ("L0", "L1", "mix", "debug")
NO_CALLS_NOTE = (
    "MindSpore runs nothing of Python in graph mode and inside of ms.jit: no call is seen; dump in PyNative mode"
)


class PrecisionDebugger:
    """Dumps what cells and functions take and return, parameters and all gradients, between `start` and `stop`.

        debugger = PrecisionDebugger(dump_path="dumps", level="L0", step=[10])
        for batch in batches:
            debugger.start(model)
            loss, gradients = forward_and_backward(*batch)
            optimizer(gradients)
            debugger.stop()
            debugger.step()

    It takes the configuration of `trainermon.PrecisionDebugger`, with what MindSpore shows: levels L0, L1, mix and
    debug, tasks statistics, tensor and structure. Files of tensors are numpy's. Training is not changed by a bit, and
    after the first `start` has returned nothing is raised into it.

    Args:
        config_path: A JSON or YAML file; None: `config.json`, if there is one in the current directory.
        task: What is recorded; None: as in the file. So with the next three.
        dump_path: Folder that receives `step<N>/rank<R>`.
        level: `L0` cells, `L1` calls of functions, of methods of tensors and of the cells' primitives, `mix` both,
            `debug` only what `save` is given.
        step: Numbers of the steps that are dumped, or ranges such as `"3-7"`; empty: all.

    Raises:
        ConfigError: A key is unknown, or a value cannot be met.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> PrecisionDebugger:
        """Return the process's debugger."""
        return cls._instance or super().__new__(cls)

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | Path | None = None,
        level: str | None = None,
        step: list[int | str] | None = None,
    ) -> None:
        if PrecisionDebugger._instance is not None:
            logger.info("there is a PrecisionDebugger already; it stays as it is")
            return
        path = None if dump_path is None else str(dump_path)
        self._config, self._notes = _read(config_path, {"task": task, "dump_path": path, "level": level, "step": step})
        make_log_visible(quiet=_rank() != 0)
        for note in self._notes:
            logger.log(logging.INFO if _rank() else logging.WARNING, "%s", note)
        self._step = 0
        self._pid = os.getpid()
        self._writer: SelectingCellWriter | None = None
        self._capture: StepCapture | None = None
        self._is_on = False
        self._counts: dict[str, int] = {}
        self._guard = PlainFaultGuard(lambda _message: self._abandon())
        PrecisionDebugger._instance = self

    @property
    def config(self) -> DebuggerConfig:
        """The configuration in force: the file's, with what the constructor's arguments changed."""
        return self._config

    @classmethod
    def start(cls, model: Cells = None, rank_id: int | None = None) -> None:
        """Start to record, if the configuration chooses this step and this rank.

        Args:
            model: A cell, several in a list (their numbers begin the names) or in a dict (its keys do); levels L0
                and mix need one, L1 sees with it the primitives of its cells.
            rank_id: The rank, where `mindspore.communication` does not know it.

        Raises:
            AttachError: The level needs a model, and `model` is None or no cell.
        """
        self = cls._instance
        if self is None or os.getpid() != self._pid:
            return
        models = _named(model)
        if self._config.level in OF_CELLS or models:
            _require_cells(models, self._config.level)
        self._begin(models, _rank() if rank_id is None else rank_id)

    @classmethod
    def stop(cls) -> None:
        """Stop recording, and write the dump's final files; a `start` in the same step continues them."""
        self = cls._instance
        if self is not None and self._is_on and os.getpid() == self._pid:
            self._guard.wrap(self._end)()

    @classmethod
    def step(cls) -> None:
        """End the current step: the next one has the next number, a dump of its own, and counts calls from 0."""
        self = cls._instance
        if self is not None:
            self._finish()
            self._step += 1

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Set the number of the current step to `step`."""
        if cls._instance is not None:
            cls._instance._finish()
            cls._instance._step = step

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:  # noqa: FBT001, FBT002  # msprobe's
        """Record a variable at level debug: a tensor, a number, or containers of them; and its gradient.

        Args:
            variable: What to record, as it is now.
            name: Its name; calls with the same name are numbered.
            save_backward: Whether the gradients of its tensors are recorded too, when they arrive.
        """
        self = cls._instance
        if self is None or self._config.level != "debug" or os.getpid() != self._pid:
            return
        self._begin({}, _rank())
        if self._writer is not None:
            self._guard.wrap(self._save)(variable, well_formed(str(name)), save_backward)

    @classmethod
    def close(cls) -> None:
        """Close the open dump and reset the class: the next construction makes another debugger."""
        if cls._instance is not None:
            cls._instance._finish()
            cls._instance = None

    def _begin(self, models: Mapping[str, nn.Cell], rank: int) -> None:
        config = self._config
        is_chosen = config.chooses(self._step) and (not config.rank or rank in config.rank)
        if not is_chosen or config.dump_enable is False or self._guard.tripped or self._is_on:
            return
        if self._writer is None:
            directory = Path(config.dump_path) / f"step{self._step}" / f"rank{rank}"
            room = functools.partial(has_room, directory.parent.parent, directory.parent, config.max_pending)
            if not self._guard.wrap(room)():
                return
            layout = RankLayout(axes={"dp": (rank, max(_world_size(), rank + 1))} if _world_size() > 1 else {})
            info = DumpInfo(
                step=self._step, rank=rank, reason="ordered by the script", notes=self._notes, layout=layout
            )
            self._writer = self._guard.wrap(SelectingCellWriter)(directory, info, config)
        if self._writer is not None and config.level != "debug":
            self._is_on = True
            self._guard.wrap(self._attach)(models)

    def _attach(self, models: Mapping[str, nn.Cell]) -> None:
        if self._writer is None:
            return
        earlier, self._capture = self._capture, StepCapture(models, self._writer, self._config.level)
        if earlier is not None:
            self._capture.go_on_from(earlier)
        self._capture.attach()

    def _end(self) -> None:
        self._is_on = False
        if self._capture is not None and self._writer is not None:
            self._capture.detach()
            if not self._capture.num_calls:
                self._writer.take_notes((*self._notes, NO_CALLS_NOTE))
                logger.warning("%s", NO_CALLS_NOTE)
            self._writer.publish()

    def _save(self, variable: Any, name: str, with_gradient: bool) -> None:  # noqa: FBT001  # called through a guard
        if self._writer is None:
            return
        count = self._counts[name] = self._counts.get(name, -1) + 1
        leaves: list[TensorLeaf] = []
        value = encode(variable, "", leaves)
        key = f"{name}.{count}.debug"
        self._writer.record(key, [leaf._replace(slot=leaf.slot.removeprefix(".")) for leaf in leaves])
        self._writer.add_gradients(key, value)
        # a hook on a tensor that is not followed would have its gradient computed
        for leaf in [leaf for leaf in leaves if with_gradient and is_followed(leaf.tensor)]:
            slot = leaf.slot.removeprefix(".")
            on_gradient(leaf.tensor, self._guard.wrap(self._gradient, f"{name}_grad.{count}.debug", slot))

    def _gradient(self, key: str, slot: str, gradient: Tensor) -> None:
        if self._writer is not None:
            leaves: list[TensorLeaf] = []
            form = encode(gradient, slot, leaves)
            self._writer.record(key, leaves)
            self._writer.add_gradients(f"{key}.{slot}" if slot else key, form)

    def _finish(self) -> None:
        writer = self._writer
        if writer is None or os.getpid() != self._pid:
            return
        if self._is_on:
            self._guard.wrap(self._end)()
        self._guard.wrap(writer.close)()
        self._writer = self._capture = None
        self._counts.clear()

    def _abandon(self) -> None:
        """After a fault: take everything off the model, whatever becomes of the files."""
        capture, self._capture, self._writer, self._is_on = self._capture, None, None, False
        if capture is not None:
            capture.detach()

    @classmethod
    def _begin_child(cls) -> None:
        """Leave the dump to the process that a worker was forked from, which writes into the same files."""
        if cls._instance is not None and cls._instance._capture is not None:
            cls._instance._capture.stop_in_child()


os.register_at_fork(after_in_child=PrecisionDebugger._begin_child)


def _read(config_path: str | Path | None, arguments: Mapping[str, Any]) -> tuple[DebuggerConfig, tuple[str, ...]]:
    path = Path(config_path) if config_path is not None else default_file() if default_file().is_file() else None
    try:
        config, notes = read_debugger_config({} if path is None else read_mapping(path), **arguments)
    except ConfigError as error:
        raise error if path is None else ConfigError(f"{path}: {error}") from error
    if config.task not in TASKS:
        where = "" if path is None else f"{path}: "
        probe = "trainermon.monitor.mindspore.gradient_probe.GradientMonitor"
        advice = f"; for its task use {probe}" if config.task == "grad_probe" else ""
        raise ConfigError(
            f"{where}task: found {shown(config.task)}, expected one of {', '.join(TASKS)} with MindSpore{advice}"
        )
    if config.level not in LEVELS:
        raise ConfigError(f"level: found {shown(config.level)}, expected one of {', '.join(LEVELS)} with MindSpore")
    return config, notes


def _named(models: Cells) -> dict[str, nn.Cell]:
    if models is None:
        return {}
    if isinstance(models, nn.Cell):
        return {"": models}
    if isinstance(models, Mapping):
        return dict(models)
    return {str(number): model for number, model in enumerate(models)}


def _require_cells(models: Mapping[str, Any], level: str) -> None:
    if not models:
        raise AttachError(f"start(model): level {level} records cells, but no model was given")
    for model in models.values():
        if not isinstance(model, nn.Cell):
            raise AttachError(f"start(model): found a {type(model).__name__}, expected a mindspore.nn.Cell, or several")
    if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
        logger.warning("%s", NO_CALLS_NOTE)


def _rank() -> int:
    return int(get_rank()) if GlobalComm.INITED else int(os.environ.get("RANK_ID", "0"))


def _world_size() -> int:
    return int(os.environ.get("RANK_SIZE", "1"))
