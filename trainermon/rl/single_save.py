"""`SingleSave`: msprobe's way to keep named tensors of a step in files, with its names, arguments and layout."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainermon.core.errors import ConfigError
from trainermon.core.topology import find_coordinates
from trainermon.rl.stages import StageRecorder

_log = logging.getLogger(__name__)
FRAMEWORKS = ("pytorch", "mindspore")
_MAX_SAID = 100
_UNBOUNDED = 1 << 62


class SingleSave:
    """Keeps named tensors of a step in files; there is one in a process, which its class methods use.

        SingleSave("saved")
        for batch in batches:
            SingleSave.save({"prompt": prompt, "log_prob": [one, another]})
            SingleSave.step()

    `saved/data/prompt/step0/rank0/micro_step0/prompt.npy` and `prompt.json` result. `SingleComparator` and the command
    `trainermon rl compare` compare two such folders. What fails later than the constructor is logged and left out.

    Args:
        dump_path: The folder.
        fmk: `pytorch` or `mindspore`: which of them knows the rank.

    Raises:
        ConfigError: `fmk` is neither.
    """

    _instance: ClassVar[SingleSave | None] = None
    _said: ClassVar[set[str]] = set()

    def __new__(cls, dump_path: str | Path, fmk: str = "pytorch") -> SingleSave:
        """Return the process's one; the first call decides on the folder."""
        if fmk not in FRAMEWORKS:
            raise ConfigError(f"fmk: found {fmk!r}, expected {' or '.join(map(repr, FRAMEWORKS))}")
        if cls._instance is None:
            made = super().__new__(cls)
            made._stages = StageRecorder(dump_path, quota_bytes=_UNBOUNDED)
            made._framework = fmk
            cls._instance = made
        elif cls._instance._stages.folder != Path(dump_path):
            cls._say_once(f"{dump_path} is left empty: this process saves in {cls._instance._stages.folder} already")
        return cls._instance

    _stages: StageRecorder
    _framework: str

    @classmethod
    def save(cls, data: Mapping[str, Any]) -> None:
        """Keep tensors, arrays, or lists, tuples and mappings of them; a further call in a step is a micro step.

        A tensor of an accelerator is copied, which waits for it. Types that numpy has not, as bfloat16, become float32.
        """
        with cls._contained("save"):
            stages = cls._current()
            for key, value in _items(data):
                with cls._contained("save"):
                    stages.save({key: value})

    @classmethod
    def save_ex(cls, data: Mapping[str, Any], micro_batch: int | None = None) -> None:
        """Keep the same as those of micro step `micro_batch`; None: in the folder of the rank itself."""
        with cls._contained("save_ex"):
            stages = cls._current()
            for key, value in _items(data):
                with cls._contained("save_ex"):
                    stages.save_micro_step({key: value}, micro_batch)

    @classmethod
    def save_config(cls, data: Mapping[str, Any]) -> None:
        """Keep settings of the run as `configurations.json`."""
        with cls._contained("save_config"):
            cls._current().save_config(data)

    @classmethod
    def step(cls) -> None:
        """Begin the next step; without it everything is of step 0."""
        with cls._contained("step"):
            cls._current().step_number += 1

    @classmethod
    def _current(cls) -> StageRecorder:
        if cls._instance is None:
            raise RuntimeError("there is no SingleSave: make one first, SingleSave(folder)")
        stages = cls._instance._stages
        stages.rank = _rank(cls._instance._framework)
        return stages

    @classmethod
    @contextlib.contextmanager
    def _contained(cls, what: str) -> Iterator[None]:
        """Let a failure cost what should have been saved, and nothing else; each is logged once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # nothing of a monitor may reach training
            cls._say_once(f"{what}: {error}; it is left out")

    @classmethod
    def _say_once(cls, message: str) -> None:
        if message not in cls._said and len(cls._said) < _MAX_SAID:
            cls._said.add(message)
            _log.warning("SingleSave: %s", message)


def _items(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not isinstance(data, Mapping):
        raise TypeError(f"found {type(data).__name__}, expected a mapping from names to tensors")
    return list(data.items())


def _rank(framework: str) -> int:
    """Return this process's rank, asked for each time: the process group may have been made after the first save."""
    if framework == "mindspore":
        return int(importlib.import_module("trainermon.monitor.mindspore.place").find_coordinates({}).rank)
    return find_coordinates().rank
