"""A record of which random numbers were drawn where: the first line in which two runs differ is where they part."""

from __future__ import annotations

import csv
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from trainermon.dump.facts.stacks import call_stack
from trainermon.dump.function_modes import put_in, take_out
from trainermon.dump.function_names import name_of, unreplaced
from trainermon.dump.seeds import rank
from trainermon.dump.torch_tensors import checksum
from trainermon.hooks.guard import FaultGuard
from trainermon.hooks.patch import CallPatch

DRAWING = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "dropout",
        "dropout_",
        "alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "exponential_",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "rrelu",
        "uniform_",
        "trunc_normal_",
        "kaiming_uniform_",
        "xavier_uniform_",
    ]
)
"""Functions of torch that draw from a generator."""

# Functions that say what the state of a generator is, or set it.
STEERING = frozenset(
    ["seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator"]
)


class RandomLog:
    """Lists every call that draws random numbers, until it is closed; can be used as a context manager.

    Attributes:
        path: The file. Its columns are `api_name` (`torch_random.randn.0`), `stack`, and `crc32`, a checksum of what
            was drawn.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115  # until it is closed
        self._writer = csv.writer(self._file)
        self._writer.writerow(["api_name", "stack", "crc32"])
        self._counts: Counter[str] = Counter()
        self._guard = FaultGuard(lambda _message: self.close())
        self._process = os.getpid()
        self._mode = _DrawRecorder(self._guard.wrap(self._drawn))
        self._patches = list(self._followed())
        for patch in self._patches:
            patch.attach()
        put_in(self._mode)

    def close(self) -> None:
        """Stop listing, and close the file."""
        take_out(self._mode)
        for patch in self._patches:
            patch.detach()
        self._file.close()

    def __enter__(self) -> RandomLog:
        """Return itself."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __fspath__(self) -> str:
        """Return where the file is."""
        return str(self.path)

    def _followed(self) -> Iterator[CallPatch]:
        for library, owner in (("python_random", random), ("numpy_random", np.random)):
            for name in _drawing_names(owner):
                begins = self._guard.wrap(lambda _args, _kwargs: True)
                ends = self._guard.wrap(self._drawn_by_name, library, name)
                yield CallPatch(owner, name, begins=begins, ends=ends)

    def _drawn_by_name(self, library: str, name: str, _token: bool, result: Any) -> None:  # noqa: FBT001
        self._drawn(library, name, np.asarray(result) if isinstance(result, int | float | np.ndarray) else repr(result))

    def _drawn(self, library: str, name: str, result: Any) -> None:
        if os.getpid() != self._process:  # a worker that was forked has draws of its own, at times of its own
            return
        number = self._counts[f"{library}.{name}"]
        self._counts[f"{library}.{name}"] += 1
        self._writer.writerow([f"{library}.{name}.{number}", "\n".join(call_stack()), _crc(result)])


class _DrawRecorder(TorchFunctionMode):
    def __init__(self, drawn: Callable[..., Any]) -> None:
        super().__init__()
        self._drawn = drawn

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        result = func(*args, **(kwargs or {}))
        named = name_of(func, args, caller)
        if named is not None and named.name in DRAWING and isinstance(result, torch.Tensor):
            self._drawn("tensor_random" if named.prefix == "Tensor" else "torch_random", named.name, result)
        return result


def random_save(output_path: str | Path = "./output") -> RandomLog:
    """Start a list of every call of torch, Python's `random` and `numpy.random` that draws random numbers.

    Nothing is drawn or reset, and the functions of both modules are back when it ends. Calls of torch are seen in the
    calling thread, those of generators of one's own not (`random.Random()`, `numpy.random.default_rng()`), nor those of
    processes that are forked meanwhile. Waits for the device at each call of torch that draws.

    Returns:
        The list, which goes on until it is closed: a context manager, and a path: `random_rank<R>.csv` in
        `output_path`.
    """
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    return RandomLog(folder / f"random_rank{rank()}.csv")


def _drawing_names(owner: Any) -> list[str]:
    """Return the names of the functions of a module that draw from its own generator."""
    generator = type(vars(owner)["random"].__self__)
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(getattr(value, "__self__", None), generator) and name not in STEERING
    ]


def _crc(drawn: Any) -> str:
    if isinstance(drawn, torch.Tensor):
        return checksum(drawn)
    content = drawn.tobytes() if isinstance(drawn, np.ndarray) else drawn.encode()
    return f"{zlib.crc32(content):08x}"
