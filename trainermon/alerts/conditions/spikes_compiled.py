"""What a spike condition learns of a step, by the compiled library: one pass over its series."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainermon.alerts.conditions.condition import Indices, Slots
from trainermon.alerts.conditions.criteria import Spike
from trainermon.alerts.conditions.spread import Floats
from trainermon.core.native.library import library_or_none

TINY = 1e-30
"""The least magnitude: a standard deviation of zero would make 0 / 0 of a constant series."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpikesMemory:
    """What a watcher remembers: arrays with an element for each series, as in `spikes`.

    Attributes:
        condition: The rule's.
        levels: float32.
        magnitudes: float32; None for logarithms.
        window: float32 [series, values].
        next: int64.
        num_learned: int32.
        firsts: float32; None where the first level does not matter.
        num_firsts: int32; likewise.
        num_starting: So many values give the level.
        refresh_every: So many values have a new trend.
    """

    condition: Spike
    levels: Floats
    magnitudes: Floats | None
    window: Floats
    next: Indices
    num_learned: NDArray[np.int32]
    firsts: Floats | None
    num_firsts: NDArray[np.int32] | None
    num_starting: int
    refresh_every: int


class _Spikes(ctypes.Structure):
    """`struct spikes` of spikes.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("levels", "magnitudes", "window", "next")),
        *((name, ctypes.c_void_p) for name in ("num_learned", "firsts", "num_firsts")),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_starting", "refresh_every", "warmup")),
        ("tiny", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """`struct step` of spikes.c."""

    _fields_ = (
        *(("slots", ctypes.c_void_p), ("first", ctypes.c_int64), ("count", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("seen", "missed")),
        *(("started", ctypes.c_void_p), ("due", ctypes.c_void_p)),
        *(("num_started", ctypes.c_int64), ("num_due", ctypes.c_int64)),
    )


class CompiledSpikes:
    """Learns the values of series into arrays that stay where they are; see `compiled_spikes`."""

    def __init__(self, library: ctypes.CDLL, memory: SpikesMemory) -> None:
        condition = memory.condition
        self._learn = library.trainermon_learn_spikes
        self._memory = memory  # keeps the arrays
        arrays = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
        self._spikes = _Spikes(
            **{name: _address(array) for name, array in arrays.items() if isinstance(array, np.ndarray)},
            width=condition.window,
            num_starting=memory.num_starting,
            refresh_every=memory.refresh_every,
            warmup=condition.warmup,
            tiny=TINY,
        )
        self._chosen = np.empty((2, len(memory.levels)), np.int64)
        started, due = map(_address, self._chosen)
        self._step = _Step(started=started, due=due)
        self._arguments = ctypes.byref(self._spikes), ctypes.byref(self._step)

    def learn(self, slots: Slots, seen: Floats, missed: Floats) -> tuple[Indices, Indices]:
        """Learn values; return the series whose level begins, and those whose trend is due."""
        step = self._step
        step.seen, step.missed = _address(seen), _address(missed)
        step.count = len(seen)
        if isinstance(slots, slice):
            step.slots, step.first = None, slots.indices(len(self._memory.levels))[0]
        else:
            step.slots = _address(slots)
        self._learn(*self._arguments)
        return self._chosen[0, : step.num_started], self._chosen[1, : step.num_due]


def compiled_spikes(memory: SpikesMemory) -> CompiledSpikes | None:
    """Return what learns into these arrays by the compiled library; None without it."""
    library = _library()
    return None if library is None else CompiledSpikes(library, memory)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # `ctypes.data` takes five times as long


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = library_or_none()
    if found is None or not hasattr(found, "trainermon_learn_spikes"):
        return None
    found.trainermon_learn_spikes.argtypes = (ctypes.c_void_p,) * 2
    found.trainermon_learn_spikes.restype = None
    return found
