"""Records what a training shows of itself at its first step: settings, states of generators, draws, inputs, weights."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from torch import nn

from trainermon.analysis.environment.collect import collect_environment
from trainermon.analysis.environment.members import members_of_rank
from trainermon.analysis.environment.shown_settings import hyperparameters_in, layout_in
from trainermon.core.environment.pack import update_pack, write_pack
from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.system import loaded_libraries
from trainermon.core.errors import ConfigError, TrainermonError
from trainermon.core.topology import find_coordinates
from trainermon.dump.draws import RandomLog
from trainermon.dump.seeds import rank as rank_here
from trainermon.hooks.guard import FaultGuard
from trainermon.monitor.environment.model_settings import model_settings
from trainermon.monitor.environment.model_sources import model_sources
from trainermon.monitor.environment.random_states import random_states, read_draws
from trainermon.monitor.environment.shown_tensors import input_of, tensors_in
from trainermon.monitor.environment.torch_settings import torch_settings
from trainermon.monitor.environment.weights import recorded_weights, training_of
from trainermon.monitor.frameworks import load

logger = logging.getLogger("trainermon")

DEFAULT_OUTPUT = "environment.zip"


class EnvironmentRecorder:
    """Writes what a training runs on and with into one pack; from entering it until `steps` steps are over.

    At the first forward the weights are hashed where they are, and states of generators read; of each step, its inputs.
    Afterwards nothing is left behind. A fault of the recorder is logged once, and training continues.

    Args:
        model: The model as the training loop calls it, or the list of its virtual pipeline stages.
        optimizer: Its optimizer, whose steps are counted; None: each forward is a step.
        steps: How many steps' inputs are recorded.
        output: The pack. All ranks of a node write into it; on a shared file system, all ranks of the job.
        files: Launch scripts and configurations.
        draws: Whether draws of random numbers are listed up to the first forward.
        redactor: What takes secrets out; None: one without a key.

    Raises:
        PackError: The pack cannot be written, or a file not be read.
        ConfigError: `steps` is less than 1.
    """

    def __init__(  # noqa: PLR0913  # what is recorded
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        steps: int = 1,
        *,
        output: str | Path = DEFAULT_OUTPUT,
        files: Sequence[str | Path] = (),
        draws: bool = True,
        redactor: Redactor | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps: found {steps}, expected 1 or more")
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        self._optimizer = optimizer
        self._num_steps = steps
        self._output = Path(output)
        self._files = [Path(file) for file in files]
        self._redactor = redactor or Redactor()
        self._guard = FaultGuard(lambda _message: self.close())
        self._handles: list[Any] = []
        self._shown: dict[str, Any] = {}
        self._code: dict[str, str] = {}
        self._step = self._forward = 0
        self._log = DrawLog() if draws else None

    def use_draws(self, log: DrawLog | None) -> None:
        """Take the draws of a list that was started earlier."""
        self._log = log

    def __enter__(self) -> EnvironmentRecorder:
        """Start recording, and return itself."""
        self.start()
        return self

    def start(self) -> None:
        """Start recording; rank 0 writes what is known without the job."""
        if rank_here() == 0:
            pack = collect_environment(self._files, os.environ, self._redactor, Path.cwd())
            write_pack(self._output, pack, world_size=find_coordinates(groups={}).world_size)
        else:
            self._redactor.learn(os.environ)
        self._guard.wrap(self._prepare)()
        for model in self._models:
            hook = self._guard.wrap(self._see_forward)
            self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        counts = getattr(self._optimizer, "register_step_post_hook", None)
        if counts is not None:
            self._handles.append(counts(self._guard.wrap(self._see_step)))

    def _prepare(self) -> None:
        """Do before the first step what it need not wait for."""
        load()
        self._code = model_sources(self._models)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop recording, and write what there is."""
        self.close()

    def close(self) -> None:
        """Stop recording, and write what there is; does nothing the second time, and does not raise."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if self._log is not None:
            self._log.close()
        if handles and self._shown:
            shown, self._shown = self._shown, {}
            try:
                update_pack(self._output, members_of_rank(rank_here(), shown))
            except TrainermonError:
                logger.exception("what this rank showed is lost")

    def _see_forward(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._shown:
            draws = self._log.finished(self._redactor) if self._log is not None else None
            self._shown = {**first_sight(self._models, self._optimizer, self._redactor), "code": self._code}
            if draws is not None:
                self._shown["random"]["draws"] = draws
        prefix = f"forward{self._forward}." if self._forward else ""
        self._shown["data"].setdefault(str(self._step), {}).update(inputs_of(args, kwargs, prefix))
        self._forward += 1
        if not hasattr(self._optimizer, "register_step_post_hook"):
            self._see_step()

    def _see_step(self, *_: Any) -> None:
        self._step, self._forward = self._step + 1, 0
        if self._step >= self._num_steps:
            self.close()


def first_sight(models: Sequence[nn.Module], optimizer: Any, redactor: Redactor) -> dict[str, Any]:
    """Return what a process shows at its first forward, by section: without draws, inputs and code.

    Waits for the device.
    """
    training = training_of(models, optimizer)
    hyperparameters = hyperparameters_in(models, optimizer)
    return {
        "random": {"states": random_states()},
        "torch": torch_settings(),
        "layout": layout_in(training),
        "model": model_settings(models if training is None else training.roots),
        "hyperparameters": {name: redactor.value(name, value) for name, value in hyperparameters.items()},
        "libraries": loaded_libraries(),
        "weights": recorded_weights(models, training),
        "data": {},
    }


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what is kept of the tensors in a model's arguments, by dotted name."""
    named = (("args", args), ("kwargs", dict(kwargs)))
    return {f"{prefix}{name}": input_of(tensor) for part, value in named for name, tensor in tensors_in(value, part)}


class DrawLog:
    """Lists draws in a file of its own, until they are asked for; a second list at once stays empty."""

    _is_listing: ClassVar[bool] = False

    def __init__(self) -> None:
        self._log: RandomLog | None = None
        if not DrawLog._is_listing:
            descriptor, name = tempfile.mkstemp(prefix="trainermon-draws-")
            os.close(descriptor)
            self._log = RandomLog(Path(name))
            DrawLog._is_listing = True

    def finished(self, redactor: Redactor) -> list[dict[str, str]] | None:
        """End the list, and return the draws; None if it has none of its own."""
        if self._log is None:
            return None
        self._log.close()
        draws = [{name: redactor.text(text) for name, text in draw.items()} for draw in read_draws(self._log.path)]
        self.close()
        return draws

    def close(self) -> None:
        """End the list, and remove its file; does nothing the second time."""
        if self._log is not None:
            self._log.close()
            self._log.path.unlink(missing_ok=True)
            self._log = None
            DrawLog._is_listing = False
