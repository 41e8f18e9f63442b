"""Runs that can be repeated: seeds for every generator, and a record of which random numbers were drawn where."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainermon.dump.function_names import name_of, unreplaced
from trainermon.dump.stacks import call_stack
from trainermon.monitor.strict import require

MAX_SEED = 2**32 - 1
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


class Seeded:
    """What `seed_all` has set; as a context manager it puts all of that back, the states of the generators included."""

    def __init__(self) -> None:
        self._states = _states()
        self._settings = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )
        self._workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def __enter__(self) -> Seeded:
        """Return itself."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Put everything back."""
        self.restore()

    def restore(self) -> None:
        """Put settings and generators back to where they were."""
        deterministic, warn_only, cudnn_deterministic, benchmark = self._settings
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.deterministic = cudnn_deterministic
        torch.backends.cudnn.benchmark = benchmark
        if self._workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = self._workspace
        for setter, state in self._states:
            setter(state)


def seed_all(
    seed: int = 1234,
    mode: bool = False,  # noqa: FBT001, FBT002  # msprobe's
    *,
    rank_offset: int | bool = False,
    warn_only: bool = False,
) -> Seeded:
    """Seed every generator: those of Python, of numpy if it is installed, and of torch on all devices.

    Generators go on from there as always: two layers that are made after it differ. Two runs that call it alike draw
    the same numbers.

    Args:
        seed: 0 to 2^32 - 1.
        mode: Whether torch uses deterministic algorithms only; an operation without one raises an error, or warns.
        rank_offset: Added to the seed; True: the rank, so that ranks draw different numbers.
        warn_only: Whether an operation without a deterministic algorithm only warns.

    Returns:
        What restores settings and generators, as a context manager or by `restore()`.

    Raises:
        ConfigError: `seed` is out of range.
    """
    require(type(seed) is int and 0 <= seed <= MAX_SEED, "seed_all: seed", seed, f"a whole number from 0 to {MAX_SEED}")
    before = Seeded()
    own = (seed + (_rank() if rank_offset is True else int(rank_offset))) % (MAX_SEED + 1)
    random.seed(own)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(own)  # the generator that scripts use
    torch.manual_seed(own)
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    return before


@contextlib.contextmanager
def random_save(output_path: str | Path = "./output") -> Iterator[Path]:
    """Write one line for every call of torch that draws random numbers, until the `with` block is left.

    Columns: `api_name` (`torch_random.randn.0`), `stack`, and `crc32`, a checksum of what was drawn: the first line in
    which two runs differ names the call where they part. Nothing is drawn, reset or replaced. Calls of the thread that
    entered are seen. Waits for the device at each such call.

    Yields:
        The file: `random_rank<R>.csv` in `output_path`.
    """
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"random_rank{_rank()}.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["api_name", "stack", "crc32"])
        with _Draws(writer):
            yield path


class _Draws(TorchFunctionMode):
    def __init__(self, writer: Any) -> None:
        super().__init__()
        self._writer = writer
        self._counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1)
        func = unreplaced(func, caller)
        result = func(*args, **(kwargs or {}))
        named = name_of(func, args, caller)
        if named is not None and named.name in DRAWING and isinstance(result, torch.Tensor):
            number = self._counts[named.name]
            self._counts[named.name] += 1
            place = "tensor_random" if named.prefix == "Tensor" else "torch_random"
            self._writer.writerow([f"{place}.{named.name}.{number}", "\n".join(call_stack()), _crc(result)])
        return result


def _crc(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return f"{zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data):08x}" if plain.numel() else f"{0:08x}"


def _states() -> list[tuple[Callable[[Any], Any], Any]]:
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        import numpy as np

        states.append((np.random.set_state, np.random.get_state()))
    return states


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
