"""`PrecisionDebugger`: dumps of chosen steps, ordered by the training script, with msprobe's interface."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import nn

from trainermon.core.config.reading import read_mapping
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.log import make_log_visible
from trainermon.core.values import well_formed
from trainermon.dump.debugger_config import (
    FREE_BENCHMARK,
    GRAD_PROBE,
    DebuggerConfig,
    default_file,
    read_debugger_config,
)
from trainermon.dump.files.layout import layout_of
from trainermon.dump.files.records import DumpInfo, RankLayout
from trainermon.dump.files.waiting import has_room
from trainermon.dump.online.preheat import PeerErrors
from trainermon.dump.online.session import FreeBenchmarkStep
from trainermon.dump.online.turns import Turns
from trainermon.dump.recording import CustomFunction, DumpRecording, Models, named_models
from trainermon.dump.seeds import DEFAULT_SEED, seed_all
from trainermon.hooks.guard import FaultGuard

if TYPE_CHECKING:
    from trainermon import GradientMonitor

logger = logging.getLogger("trainermon")


class DebuggerConfigFile:
    """Reads the debugger's configuration from a file and the constructor's arguments, and sees when the file changes.

    Args:
        path: The JSON or YAML file; None: the arguments are everything.
        arguments: Values by key that take precedence over the file's; None counts as not given.
    """

    def __init__(self, path: Path | None, arguments: Mapping[str, Any]) -> None:
        self.path = path
        self._arguments = arguments
        self._stamp: tuple[int, int] | None = None

    def read(self) -> tuple[DebuggerConfig, tuple[str, ...]]:
        """Read the file; return the configuration, and notes on it.

        Raises:
            ConfigError: A key is unknown, or a value cannot be met.
        """
        if self.path is None:
            return read_debugger_config({}, **self._arguments)
        self._stamp = _stamp(self.path)
        try:
            return read_debugger_config(read_mapping(self.path), **self._arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def has_changed(self) -> bool:
        """Return whether the file was written to since `read` last read it; False where there is no file."""
        return self.path is not None and _stamp(self.path) != self._stamp


class PrecisionDebugger:
    """Dumps what modules and torch functions take and return, and all gradients, between `start` and `stop`.

        debugger = PrecisionDebugger(dump_path="dumps", level="mix", step=[10])
        for batch in batches:
            debugger.start(model)
            loss = train(batch)
            debugger.stop()
            debugger.step()

    Training is not changed by a bit. There is one debugger in a process: the first construction counts, later ones
    return it. After the first `start` has returned, nothing is raised into training; what goes wrong is logged, and
    noted in the dump.

    Args:
        config_path: A JSON or YAML file (see `DebuggerConfig`); None: `config.json`, if there is one in the current
            directory.
        task: What is recorded (see `DebuggerConfig`); None: as in the file. So with the next three.
        dump_path: Folder that receives `step<N>/rank<R>`.
        level: `L0` modules, `L1` functions, `mix` both, `debug` only what `save` is given.
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
        arguments: dict[str, Any] = {"task": task, "dump_path": path, "level": level, "step": step}
        self._file = DebuggerConfigFile(_path(config_path), arguments)
        self._config, self._notes = self._file.read()
        make_log_visible(quiet=_rank() != 0)
        for note in (*self._notes, *_seed(self._config)):
            logger.log(logging.INFO if _rank() else logging.WARNING, "%s", note)  # once in a job of many ranks
        self._step = self._num_overflows = self._num_skipped = 0
        self._skipped: int | None = None
        self._pid = os.getpid()
        self._recording: DumpRecording | FreeBenchmarkStep | None = None
        self._turns = Turns(every=self._config.free_benchmark.every, budget_ms=self._config.free_benchmark.budget_ms)
        self._peers = PeerErrors(self._config.free_benchmark)
        self._custom: list[CustomFunction] = []
        self._is_interrupted = self._is_only_inside = False
        self._gradients: GradientMonitor | None = None
        self._guard = FaultGuard(lambda _message: self._abandon())
        PrecisionDebugger._instance = self

    @property
    def config(self) -> DebuggerConfig:
        """The configuration in force: the file's, with what the constructor's arguments changed."""
        return self._config

    @classmethod
    def start(
        cls,
        model: Models = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Start to record, if the configuration chooses this step and this rank.

        Args:
            model: A module, several in a list (their numbers begin the names) or in a dict (its keys do); levels L0 and
                mix need one.
            token_range: Refused, as is `scheduled_tokens`: they belong to inference.
            rank_id: The rank, where torch.distributed does not know it.
            scheduled_tokens: Refused.

        Raises:
            AttachError: The level needs a model, and `model` is None or no module.
            ConfigError: Something is asked for that belongs to inference.
        """
        if token_range is not None or scheduled_tokens is not None:
            raise ConfigError("start: token_range and scheduled_tokens choose tokens of an inference; dump whole steps")
        self = cls._instance
        if self is not None and os.getpid() == self._pid:
            self._reload()
            models = named_models(model)  # once: it may be an iterator
            if self._config.collects_modules:
                _require_modules(models, self._config.level)
            self._begin(models, _rank() if rank_id is None else rank_id)

    @classmethod
    def monitor(cls, model: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
        """With task grad_probe: write numbers and signs of the gradients at each step of the optimizer.

        `GradientMonitor.monitor` has the details. With another task it does nothing, and says so in the log.

        Raises:
            AttachError: The model or the optimizer cannot be watched.
        """
        self = cls._instance
        if self is None:
            return
        if self._config.task != GRAD_PROBE:
            logger.warning("monitor(model) has no effect: it belongs to task grad_probe, not to %s", self._config.task)
            return
        from trainermon import GradientMonitor  # a room above this one, which the package hands out

        self._gradients = GradientMonitor(self._config)
        self._gradients.monitor(model, optimizer)

    @classmethod
    def stop(cls) -> None:
        """Stop recording, and write the dump's final files (dump.json and others).

        A `start` in the same step continues them.
        """
        self = cls._instance
        if self is not None and self._recording is not None and os.getpid() == self._pid:
            self._guard.wrap(self._recording.end)()

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
            save_backward: Whether its gradient is recorded too, when it arrives.
        """
        self = cls._instance
        if self is None or self._config.level != "debug" or os.getpid() != self._pid:
            return
        self._begin(None, _rank())
        if self._recording is not None:
            self._guard.wrap(self._recording.save)(variable, well_formed(str(name)), save_backward)

    @classmethod
    def register_custom_api(cls, module: Any, api_name: str, api_prefix: str | None = None) -> None:
        """Record calls of the function `api_name` of `module`, a module or a class, as `<prefix>.<api_name>`.

        Takes effect at the next `start`, at levels L1 and mix. Without `api_prefix` the name of `module` is the prefix.

        Raises:
            ConfigError: There is no such function.
        """
        if not callable(getattr(module, api_name, None)):
            raise ConfigError(f"register_custom_api: {module!r} has no function {api_name!r}")
        if cls._instance is not None:
            prefix = api_prefix or getattr(module, "__name__", type(module).__name__).split(".")[-1]
            cls._instance._custom.append(CustomFunction(module, api_name, prefix))

    @classmethod
    def restore_custom_api(cls, module: Any, api_name: str) -> None:
        """Undo `register_custom_api`: the function is no longer recorded from the next `start` on."""
        if cls._instance is not None:
            kept = [one for one in cls._instance._custom if (one.owner, one.name) != (module, api_name)]
            cls._instance._custom = kept

    @classmethod
    def begin_module(cls, module: nn.Module, name: str) -> None:
        """Start to record only `module`, under `name`, and what happens inside of it.

        `module_dump` calls it and has the details.
        """
        self = cls._instance
        if self is None:
            raise AttachError("module_dump: there is no PrecisionDebugger; make one first")
        recording = self._recording
        if recording is not None and recording.is_on:
            if self._config.collects_modules:
                logger.warning("module_dump has no effect: the modules of the model are recorded already")
                return
            self._guard.wrap(recording.end)()
            self._is_interrupted = True
        self._begin({name: module}, _rank(), only_inside=True)

    @classmethod
    def end_module(cls) -> None:
        """End what `begin_module` began, and resume what it has interrupted."""
        self = cls._instance
        if self is None or (self._config.collects_modules and not self._is_only_inside):
            return
        cls.stop()
        self._is_only_inside = False
        if self._is_interrupted:
            self._is_interrupted = False
            self._begin(None, _rank())

    @classmethod
    def close(cls) -> None:
        """Close the open dump and reset the class: the next construction makes another debugger."""
        if cls._instance is not None:
            cls._instance._finish()
            if cls._instance._gradients is not None:
                cls._instance._gradients.stop()
            cls._instance = None

    def _reload(self) -> None:
        """Read the file again if it says `dump_enable` and has changed; a wrong one changes nothing."""
        if self._config.dump_enable is None or not self._file.has_changed():
            return
        try:
            enabled = self._config.dump_enable
            self._config, self._notes = self._file.read()
            if self._config.dump_enable is None:  # the key was taken out
                self._config = dataclasses.replace(self._config, dump_enable=enabled)
            logger.info("%s was read again", self._file.path)
        except ConfigError as error:
            logger.warning("%s; the configuration stays as it was", error)

    def _begin(self, model: Models, rank: int, *, only_inside: bool = False) -> None:
        config = self._config
        is_chosen = config.chooses(self._step) and (not config.rank or rank in config.rank)
        is_off = config.task == GRAD_PROBE or config.dump_enable is False  # a probe waits for the optimizer
        if not is_chosen or is_off or self._guard.tripped or self._has_enough():
            return
        if self._recording is None:
            directory = Path(config.dump_path) / f"step{self._step}" / f"rank{rank}"
            if not self._has_room(directory):
                return
            layout = self._guard.wrap(layout_of)(named_models(model)) or RankLayout()
            info = DumpInfo(
                step=self._step,
                rank=rank,
                reason="ordered by the script",
                notes=self._notes,
                layout=layout,
                skipped_steps=self._num_skipped,
            )
            if config.task == FREE_BENCHMARK:
                self._recording = self._guard.wrap(FreeBenchmarkStep)(directory, config, info, self._turns, self._peers)
            else:
                self._recording = self._guard.wrap(DumpRecording)(directory, config, info)
        if self._recording is not None:
            self._is_only_inside = only_inside
            self._guard.wrap(functools.partial(self._recording.begin, only_inside=only_inside))(model, self._custom)

    def _has_room(self, directory: Path) -> bool:
        """Return whether this step may be dumped, as far as those allow that still wait to be judged.

        A step that may not is counted once, and stays without a dump: half of one would be worth nothing.
        """
        wanted = functools.partial(has_room, directory.parent.parent, directory.parent, self._config.max_pending)
        if self._skipped != self._step and self._guard.wrap(wanted)():
            return True
        if self._skipped != self._step:
            self._skipped = self._step
            self._num_skipped += 1
            if self._num_skipped == 1:
                where, limit = self._config.dump_path, self._config.max_pending
                logger.warning("step %d is not dumped: max_pending, %d steps, wait in %s", self._step, limit, where)
        return False

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None and os.getpid() == self._pid:
            self._guard.wrap(recording.close)()
            self._num_overflows += recording.num_overflows
            if recording.num_overflows and self._has_enough():
                count, path = self._num_overflows, self._config.dump_path
                logger.warning("%d calls gave NaN or Inf up to step %d: no more is recorded", count, self._step)
                logger.warning("`trainermon diagnose %s` names the first", path)

    def _has_enough(self) -> bool:
        wanted = self._config.overflow_nums
        return self._config.task == "overflow_check" and 0 < wanted <= self._num_overflows

    @classmethod
    def _begin_child(cls) -> None:
        """Leave the dump to the process that a worker was forked from, which writes into the same files."""
        if cls._instance is not None and cls._instance._recording is not None:
            cls._instance._recording.stop_in_child()

    def _abandon(self) -> None:
        """After a fault: take everything off the model, whatever becomes of the files."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.end()


os.register_at_fork(after_in_child=PrecisionDebugger._begin_child)


def module_dump(module: nn.Module, dump_name: str) -> None:
    """Record one module, as `Module.<dump_name>.<Class>`, and what happens inside of it, until `module_dump_end`.

    At level L1 the modules inside are recorded too, and functions outside are not; a `start` at that level is
    interrupted. While the modules of the whole model are recorded it does nothing, and says so in the log.

    Raises:
        AttachError: There is no debugger.
    """
    PrecisionDebugger.begin_module(module, dump_name)


def module_dump_end() -> None:
    """Stop the recording of one module that `module_dump` started."""
    PrecisionDebugger.end_module()


def _require_modules(models: Mapping[str, Any], level: str) -> None:
    if not models:
        raise AttachError(f"start(model): level {level} records modules, but no model was given")
    for model in models.values():
        if not isinstance(model, nn.Module):
            raise AttachError(f"start(model): found a {type(model).__name__}, expected a torch.nn.Module, or several")


def _path(given: str | Path | None) -> Path | None:
    if given is not None:
        return Path(given)
    return default_file() if default_file().is_file() else None


def _seed(config: DebuggerConfig) -> Iterator[str]:
    """Seed the generators for the rest of the process if the configuration says so, and yield a note that says it."""
    if config.seed is None and config.is_deterministic is None:
        return
    seed, mode = DEFAULT_SEED if config.seed is None else config.seed, bool(config.is_deterministic)
    seed_all(seed, mode)
    yield f"seed_all({seed}, mode={mode}) was called, as the configuration's seed and is_deterministic say"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
