"""The stages of a step (prompt, response, reward, …) in files, in the layout of msprobe's SingleSave.

    FOLDER/data/reward/step12/rank0/micro_step0/reward.npy, reward.json
    FOLDER/data/response/step12/rank0/micro_step0/response.0.npy, response.1.npy, response.json

The JSON has maximum, minimum, mean, norm and shape of each array (of complex numbers, of their magnitudes). Two folders
are compared by `trainermon rl compare`.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainermon.core.private_files import make_private_folder, replace_file, replacing
from trainermon.core.values import as_plain

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_NO_NAME = re.compile(r"[/\\\x00-\x1f]")


class StageFile(NamedTuple):
    """One stored array, and where it belongs."""

    key: str
    step: int
    rank: int
    micro_step: int
    part: str
    path: Path


class StageRecorder:
    """Writes stages of steps into files.

    Args:
        folder: Where.
        rank: Number of this process.
        every: Only steps that are a multiple of it are kept.
        samples: Of each array only so many rows along the first dimension are kept; 0: all.
        quota_bytes: When so much is written nothing more is; said once.
    """

    def __init__(
        self, folder: str | Path, *, rank: int = 0, every: int = 1, samples: int = 0, quota_bytes: int = 10 << 30
    ) -> None:
        self.folder = Path(folder)
        self.step_number = 0
        self.rank = rank
        self._every = max(1, every)
        self._samples = samples
        self._left_bytes = quota_bytes
        self._times: dict[tuple[str, int], int] = {}

    def save(self, stages: Mapping[str, Any]) -> None:
        """Keep arrays or tensors, or lists or mappings of them, each under its key; a further call is a micro step.

        A tensor of an accelerator is copied, which waits for it. None is left out; a number is an array without shape.

        Raises:
            ValueError: A key cannot be a file's name, or a value is no array.
            OSError: Nothing can be written.
        """
        for key, value in stages.items():
            if value is not None:
                number = self._times.get((key, self.step_number), 0)
                self.save_micro_step({key: value}, number)
                self._times = {known: n for known, n in self._times.items() if known[1] == self.step_number}
                self._times[key, self.step_number] = number + 1

    def save_micro_step(self, stages: Mapping[str, Any], number: int | None) -> None:
        """Keep stages as those of a micro step; None: of the step, which has none. Else as `save`."""
        if self.step_number % self._every:
            return
        for key, value in stages.items():
            if value is None:
                continue
            if not _KEY.fullmatch(str(key)):
                raise ValueError(f"stage {key!r}: expected letters, digits, '_', '-' and '.'")
            self._write(key, value, "" if number is None else f"micro_step{int(number)}")

    def save_config(self, values: Mapping[str, Any]) -> None:
        """Keep the settings of the run beside the stages, as `configurations.json`."""
        make_private_folder(self.folder)
        replace_file(self.folder / "configurations.json", json.dumps(as_plain(values), indent=2, default=str).encode())

    def _write(self, key: str, value: Any, micro_step: str) -> None:
        arrays = {part: self._cut(as_array(each, key)) for part, each in _parts(value, key)}
        size = sum(array.nbytes for array in arrays.values())
        if size > self._left_bytes:
            if self._left_bytes:
                _log.warning("stages in %s have reached their quota: nothing more is kept", self.folder)
            self._left_bytes = 0
            return
        self._left_bytes -= size
        target = self.folder / "data" / key / f"step{self.step_number}" / f"rank{self.rank}" / micro_step
        make_private_folder(target)
        for part, array in arrays.items():
            with replacing(target / f"{key}{part}.npy") as file:
                np.save(file, array, allow_pickle=False)
        described = {"data": _described(value, iter(arrays.values()))}
        replace_file(target / f"{key}.json", json.dumps(described, indent=2).encode())

    def _cut(self, array: np.ndarray) -> np.ndarray:
        return array[: self._samples] if self._samples and array.ndim else array


def stage_files(folder: Path) -> Iterator[StageFile]:
    """Yield the arrays stored in a folder, ours or msprobe's, in the order of key, step, rank, micro step and part."""
    found = []
    for path in folder.glob("data/*/step*/rank*/**/*.npy"):
        places = path.relative_to(folder / "data").parts
        key, step, rank = places[0], places[1].removeprefix("step"), places[2].removeprefix("rank")
        micro_step = places[3].removeprefix("micro_step") if len(places) == 5 else "0"
        if step.isdigit() and rank.isdigit() and micro_step.isdigit() and path.stem.startswith(key):
            part = path.stem.removeprefix(key).lstrip("._")
            found.append(StageFile(key, int(step), int(rank), int(micro_step), part, path))
    return iter(sorted(found))


def stored_stages(folder: str | Path, *, rank: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step by step what a rank stored there, so that a run can be repeated with another's rollouts.

    Of each step a mapping from the stage's key to its array; a list of them where the stage has several parts (those of
    a mapping in the order of their names) or was saved several times.
    """
    steps: dict[int, dict[str, list[Path]]] = {}
    for file in stage_files(Path(folder)):
        if file.rank == rank:
            steps.setdefault(file.step, {}).setdefault(file.key, []).append(file.path)
    for step in sorted(steps):
        loaded = {key: [np.load(path, allow_pickle=False) for path in paths] for key, paths in steps[step].items()}
        yield step, {key: arrays[0] if len(arrays) == 1 else arrays for key, arrays in loaded.items()}


def as_array(value: Any, key: str) -> np.ndarray:
    """Return a tensor or array as an array on the host; of types that numpy has not, as float32.

    Of a DTensor the local part. A tensor of torch or MindSpore that is on an accelerator is waited for.

    Raises:
        ValueError: It is neither, nor a number.
    """
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    if torch is not None and isinstance(value, torch.Tensor):
        return _array_of_torch(value)
    if mindspore is not None and isinstance(value, mindspore.Tensor):
        tensors = importlib.import_module("trainermon.dump.mindspore.tensors")  # which loads MindSpore
        return np.asarray(tensors.as_array(value))
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"stage {key!r}: found {type(value).__name__} of {array.dtype}, expected arrays of numbers")
    return array


def _array_of_torch(tensor: Any) -> np.ndarray:
    layout = importlib.import_module("trainermon.statistics.layout")  # which loads torch
    plain = layout.readable(tensor.detach()).cpu().resolve_conj().resolve_neg()
    if plain.is_floating_point() and plain.dtype.itemsize < 4 and str(plain.dtype) != "torch.float16":
        plain = plain.float()
    return np.asarray(plain.numpy())


def _parts(value: Any, key: str) -> list[tuple[str, Any]]:
    """Return the arrays in a value, each with what follows the key in the name of its file.

    Raises:
        ValueError: Names in it cannot be those of files, or two of them give the same.
    """
    found = list(_leaves(value, ""))
    names = [name for name, _ in found]
    wrong = next((name for name in names if _NO_NAME.search(name) or names.count(name) > 1), None)
    if wrong is not None:
        raise ValueError(f"stage {key!r}: found the part {wrong[1:]!r}, expected names of files, each once")
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple):
        for part, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(each, f"{name}.{part}")
    else:
        yield name, value


def _described(value: Any, arrays: Iterator[np.ndarray]) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _described(each, arrays) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each, arrays) for each in value]
    return _description(next(arrays))


def _description(array: np.ndarray) -> dict[str, Any]:
    if not array.size:
        return {"max": None, "min": None, "mean": None, "norm": None, "shape": list(array.shape)}
    wide = (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64)
    numbers = {"max": wide.max(), "min": wide.min(), "mean": wide.mean(), "norm": np.linalg.norm(wide.ravel())}
    return {**as_plain({name: float(number) for name, number in numbers.items()}), "shape": list(array.shape)}
