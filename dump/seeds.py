"""Runs that can be repeated: seeds for every generator, and settings that are put back."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainermon.monitor.errors import ConfigError
from trainermon.monitor.strict import require

MAX_SEED = 2**32 - 1
# What `rm_dropout` replaces.
DROPOUTS = ("dropout", "dropout2d", "dropout3d")


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
        self._dropouts = {name: getattr(functional, name) for name in DROPOUTS}

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
        for name, function in self._dropouts.items():
            setattr(functional, name, function)
        for setter, state in self._states:
            setter(state)


def seed_all(  # noqa: PLR0913  # msprobe has them in this order
    seed: int = 1234,
    mode: bool = False,  # noqa: FBT001, FBT002  # msprobe's
    rm_dropout: bool = False,  # noqa: FBT001, FBT002
    is_enhanced: bool = False,  # noqa: FBT001, FBT002
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
        rm_dropout: Whether `dropout`, `dropout2d` and `dropout3d` of torch.nn.functional, and so their modules, drop
            nothing until `restore`.
        is_enhanced: Refused. In msprobe it resets all generators at every draw, so that layers get equal weights.
        rank_offset: Added to the seed; True: the rank, so that ranks draw different numbers.
        warn_only: Whether an operation without a deterministic algorithm only warns.

    Returns:
        What restores settings and generators, as a context manager or by `restore()`.

    Raises:
        ConfigError: `seed` is out of range, or `is_enhanced` is asked for.
    """
    require(type(seed) is int and 0 <= seed <= MAX_SEED, "seed_all: seed", seed, f"a whole number from 0 to {MAX_SEED}")
    if is_enhanced:
        raise ConfigError(
            "seed_all: is_enhanced would draw the same numbers again and again, and give layers equal weights; "
            "to find the draw in which two runs part, use random_save"
        )
    before = Seeded()
    own = (seed + (rank() if rank_offset is True else int(rank_offset))) % (MAX_SEED + 1)
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
    for name in DROPOUTS if rm_dropout else ():
        setattr(functional, name, _without_dropping(getattr(functional, name)))
    return before


def _without_dropping(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function`, which still announces itself to function modes, with the probability 0."""

    @functools.wraps(function)
    def dropping_nothing(
        input: Tensor,
        p: float = 0.5,  # noqa: ARG001
        training: bool = True,  # noqa: FBT001, FBT002
        inplace: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        return function(input, 0.0, training, inplace)

    return dropping_nothing


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


def rank() -> int:
    """Return the rank of this process, 0 where there is one only."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
