"""Runs that can be repeated: seeds for every generator, and settings that are put back."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import random
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from trainermon.core.errors import ConfigError
from trainermon.core.strict import require
from trainermon.dump.debugger_config import MAX_SEED

logger = logging.getLogger("trainermon")

DEFAULT_SEED = 1234
# What `rm_dropout` replaces.
DROPOUTS = ("dropout", "dropout2d", "dropout3d")


# What makes collectives of Huawei's libraries repeat themselves, for `mode`.
_COLLECTIVES = {"HCCL_DETERMINISTIC": ("False", "True"), "LCCL_DETERMINISTIC": ("0", "1")}
_VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", *_COLLECTIVES)
_CUDNN = ("enabled", "deterministic", "benchmark")


class SeededState:
    """Remembers the settings and random generators that `seed_all` changes, to restore them.

    Usable as a context manager.
    """

    def __init__(self) -> None:
        self._states = _states()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._functions: list[tuple[Any, str, Any]] = [(functional, n, getattr(functional, n)) for n in DROPOUTS]
        self._functions.append((DataLoader, "__iter__", DataLoader.__iter__))

    def __enter__(self) -> SeededState:
        """Return itself."""
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Put everything back."""
        self.restore()

    def restore(self) -> None:
        """Set everything that `seed_all` changed back to what it was before."""
        torch.use_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        for name, value in self._cudnn.items():
            setattr(torch.backends.cudnn, name, value)
        for variable, text in self._variables.items():
            if text is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = text
        for owner, name, function in self._functions:
            setattr(owner, name, function)
        for setter, state in self._states:
            setter(state)


def seed_all(  # noqa: PLR0913  # msprobe has them in this order
    seed: int = DEFAULT_SEED,
    mode: bool = False,  # noqa: FBT001, FBT002  # msprobe's
    rm_dropout: bool = False,  # noqa: FBT001, FBT002
    is_enhanced: bool = False,  # noqa: FBT001, FBT002
    *,
    rank_offset: int | bool = False,
    warn_only: bool = False,
) -> SeededState:
    """Seed every generator, and switch to deterministic settings, for this process and those that it starts.

    Generators go on from there as always: two layers that are made after it differ. Two runs that call it alike draw
    the same numbers. Set are, as in msprobe: the seeds of random, numpy and torch on all devices, NPUs included;
    PYTHONHASHSEED, for processes that are started from now on; cuDNN off, without benchmark and deterministic;
    CUBLAS_WORKSPACE_CONFIG; by `mode` torch's deterministic algorithms, HCCL_DETERMINISTIC and LCCL_DETERMINISTIC. Call
    it before the first use of a device and before process groups are made: later their libraries do not look. A
    DataLoader that shuffles by torch's own generator is told when it is first used.

    Args:
        seed: 0 to 2^32 - 1.
        mode: Whether torch uses deterministic algorithms only; an operation without one raises an error, or warns.
        rm_dropout: Whether `dropout`, `dropout2d` and `dropout3d` of torch.nn.functional, and so their modules, drop
            nothing until `restore`. Not by default: it trains another model.
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
    before = SeededState()
    own = (seed + (rank() if rank_offset is True else int(rank_offset))) % (MAX_SEED + 1)
    _seed_generators(own)
    _make_repeatable(seed, mode=mode, warn_only=warn_only)
    for name in DROPOUTS if rm_dropout else ():
        setattr(functional, name, _without_dropping(getattr(functional, name)))
    DataLoader.__iter__ = _telling_of_shuffles(DataLoader.__iter__)  # type: ignore[method-assign]
    return before


def _seed_generators(seed: int) -> None:
    """Seed the generators of this process: of Python, numpy and torch, on all devices."""
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed)  # the generator that scripts use
    torch.manual_seed(seed)
    _seed_npu(seed)


def _seed_npu(seed: int) -> None:
    npu = getattr(torch, "npu", None)  # torch_npu brings it
    if npu is not None:
        npu.manual_seed_all(seed)


def _make_repeatable(seed: int, *, mode: bool, warn_only: bool) -> None:
    """Have libraries choose what can be repeated; `seed` is that of all ranks."""
    os.environ["PYTHONHASHSEED"] = str(seed)  # that of all ranks: what they put into sets comes out in one order
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.update({name: words[mode] for name, words in _COLLECTIVES.items()})
    for name, value in zip(_CUDNN, (False, True, False), strict=True):
        setattr(torch.backends.cudnn, name, value)
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _telling_of_shuffles(iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `iterate` of DataLoader, which says once of a loader whose order hangs on what was drawn before."""
    if hasattr(iterate, "__wrapped__"):  # seeded twice
        return iterate
    told = False

    @functools.wraps(iterate)
    def telling(loader: Any) -> Any:
        nonlocal told
        if not told and shuffles(loader):
            told = True
            logger.warning(
                "seed_all: a DataLoader shuffles (%s): two runs get the same batches only if they draw alike before; "
                "give shuffle=False, or generator=torch.Generator().manual_seed(seed)",
                type(loader.sampler).__name__,
            )
        return iterate(loader)

    return telling


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader's order comes from torch's own generator, and so from all earlier random numbers.

    Samplers with a generator or a seed of their own, as DistributedSampler has, repeat themselves.
    """
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return any(isinstance(sampler, drawing) and sampler.generator is None for sampler in samplers)


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
