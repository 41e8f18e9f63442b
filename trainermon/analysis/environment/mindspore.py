"""Records what a training of MindSpore shows of itself at its first forward: weights, inputs, states of generators."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

from trainermon.analysis.environment.collect import collect_environment
from trainermon.analysis.environment.members import members_of_rank
from trainermon.core.environment.pack import update_pack, write_pack
from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.system import loaded_libraries
from trainermon.core.errors import ConfigError, TrainermonError
from trainermon.core.values import STATISTICS
from trainermon.hooks.containment import PlainFaultGuard
from trainermon.hooks.mindspore import hooks
from trainermon.monitor.mindspore.place import find_coordinates
from trainermon.statistics.mindspore.moments import MomentsOfTensors, is_readable
from trainermon.statistics.mindspore.positions import positional_hash_of, samples_hash_of

logger = logging.getLogger("trainermon")

_KEPT = ("min", "max", "sum", "sum_sq")


class CellEnvironmentRecorder:
    """Writes what a training runs on and with into one pack, with what its first forward shows; once.

    Weights are hashed as those of torch are: equal hashes are equal bits in the same places. A fault of the recorder is
    logged once, and training continues. In graph mode no forward is seen.

    Args:
        model: The model, or a list of its stages.
        output: The pack; all ranks of a node write into it.
        files: Launch scripts and configurations.

    Raises:
        ConfigError: `model` is no cell.
        PackError: The pack cannot be written, or a file not be read.
    """

    def __init__(self, model: nn.Cell | Sequence[nn.Cell], *, output: Path, files: Sequence[Path]) -> None:
        self._models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        if not self._models or not all(isinstance(each, nn.Cell) for each in self._models):
            raise ConfigError(f"model: found {type(model).__name__}, expected a mindspore.nn.Cell or a list of them")
        self._output, self._files = output, files
        self._place = find_coordinates({})
        self._guard = PlainFaultGuard(lambda _message: self.close())
        self._handles: list[hooks.HookHandle] = []
        self._moments = MomentsOfTensors()

    def start(self) -> None:
        """Start recording; rank 0 writes what is known without the job."""
        if self._place.rank == 0:
            pack = collect_environment(self._files, os.environ, Redactor(), Path.cwd())
            write_pack(self._output, pack, world_size=self._place.world_size)
        see = self._guard.wrap(self._see_forward)
        self._handles = [hooks.before_with_kwargs(model, see) for model in self._models]

    def close(self) -> None:
        """Stop recording; does nothing the second time."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _see_forward(self, _cell: nn.Cell, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        if not self._handles:
            return
        self.close()
        named = [*_tensors_in(args, "args"), *_tensors_in(kwargs or {}, "kwargs")]
        shown = {
            "random": {"states": random_states_here()},
            "libraries": loaded_libraries(),
            "weights": {name: self._weight(parameter) for name, parameter in self._parameters()},
            "data": {"0": {name: self._input(tensor) for name, tensor in named}},
        }
        try:
            update_pack(self._output, members_of_rank(self._place.rank, shown))
        except TrainermonError:
            logger.exception("what this rank showed is lost")

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self._models):
            stage = f"stage{number}." if len(self._models) > 1 else ""
            for parameter in model.get_parameters():
                if is_readable(parameter) and parameter.size:
                    yield stage + parameter.name, parameter

    def _weight(self, parameter: Any) -> dict[str, Any]:
        shape = tuple(parameter.shape)
        label = f"{','.join('0' * len(shape))}+{'x'.join(map(str, shape))}"
        return {**_about(parameter), "regions": {label: self._part(parameter)}}

    def _input(self, tensor: Tensor) -> dict[str, Any]:
        samples = f"{samples_hash_of(tensor.asnumpy()):016x}" if tensor.ndim and tensor.size else ""
        return {**_about(tensor), **self._part(tensor), "samples": samples}

    def _part(self, tensor: Tensor) -> dict[str, Any]:
        rows = np.empty((1, len(STATISTICS)))
        self._moments.write([tensor], rows)
        row = dict(zip(STATISTICS, rows[0].tolist(), strict=True))
        return {
            "hash": f"{positional_hash_of(tensor.asnumpy()):016x}",
            "count": int(tensor.size),
            **{name: row[name] for name in _KEPT},
            "nonfinite": int(row["nans"] + row["infs"]),
        }


def rank_here() -> int:
    """Return the rank of this process, 0 where there is one only."""
    return find_coordinates({}).rank


def random_states_here() -> dict[str, str]:
    """Return a hash of the state of each generator by name: Python's, numpy's, MindSpore's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(f"{kind}{rest}".encode() + np.asarray(keys).tobytes()),
        "mindspore": _digest(mindspore.get_rng_state().asnumpy().tobytes()),
        "mindspore.seed": str(mindspore.get_seed()),
    }


def _about(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).lower()}


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield from [(name, value)] if is_readable(value) else []
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{name}.{number}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
