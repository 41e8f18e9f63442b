"""Everything besides its arguments and parameters that a forward depends on: taken, set, and put back bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_MT19937_BYTES = (
    624 * 4 + 4
)  # of a Mersenne Twister in the memory of numpy or Python: 624 words, and the position among them
_HAS_GAUSS = 3  # its place in the state


class NotCoveredError(Exception):
    """Raised if something that the replay needs was not kept; the text says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every generator a model may draw from: Python's, numpy's, torch's on the CPU and on its devices."""

    python: Any
    numpy: Any
    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]

    @classmethod
    def current(cls, devices: Iterable[torch.device], *, anew: bool = False) -> RandomState:
        """Return the present state of all generators. Cost: copies of about 8 KB; no device is waited for.

        With `anew` numpy is asked whatever is known, for a state that the training goes on from.
        """
        numpy = sys.modules.get("numpy")
        return cls(
            python=_python.current(),
            numpy=None if numpy is None else _numpy.current(numpy, anew=anew),
            cpu=torch.get_rng_state(),
            devices=tuple((device, _device_module(device).get_rng_state(device)) for device in devices),
        )

    def put_back(self) -> None:
        """Set every generator to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            _device_module(device).set_rng_state(state, device)


class _PythonState:
    """Asks Python for the state of its global generator only if that was used since: Python takes 16 µs to tell.

    Whether it was used is seen in its memory, where that looks as expected. A state with a normal number that lies
    ready is asked for anew.
    """

    def __init__(self) -> None:
        self._memory, self._state = b"", random.getstate()
        self._generator: Any = getattr(random, "_inst", None)  # the module's functions are its methods
        self._address = id(self._generator) + object.__basicsize__
        self._is_known = sys.implementation.name == "cpython" and isinstance(self._generator, random.Random)
        if self._is_known:
            position, *words = struct.unpack(f"{_MT19937_BYTES // 4}I", self._read())
            self._is_known = (*words, position) == self._state[1]

    def current(self) -> Any:
        """Return what `random.getstate()` does."""
        if not self._is_known or self._generator.gauss_next is not None:
            return random.getstate()
        memory = self._read()
        if memory != self._memory:
            self._memory, self._state = memory, random.getstate()
        return self._state

    def _read(self) -> bytes:
        return ctypes.string_at(self._address, _MT19937_BYTES)


class _NumpyState:
    """Asks numpy for the state of its global generator only if that was used since: numpy takes 40 µs to tell.

    Whether it was used is seen in its memory. A normal number that lies ready may be taken without a trace there, so a
    state that has one is asked for anew. That one was put back by `set_state`, beside the same memory, is not seen.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._memory = b""
        self._state: tuple[Any, ...] = ()

    def current(self, numpy: Any, *, anew: bool) -> Any:
        """Return what `numpy.random.get_state()` does; it is asked in any case if `anew`."""
        generator = numpy.random.get_bit_generator()
        if generator is not self._generator:
            if type(generator) is not numpy.random.MT19937:
                return numpy.random.get_state(legacy=False)
            self._generator, self._address, self._memory = generator, generator.ctypes.state_address, b""
        memory = ctypes.string_at(self._address, _MT19937_BYTES)
        if anew or memory != self._memory:
            state = numpy.random.get_state()
            self._memory, self._state = b"" if state[_HAS_GAUSS] else memory, state
            return state
        return self._state


_python, _numpy = _PythonState(), _NumpyState()


def accelerators(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices with a generator of their own on which `model` has parameters or buffers."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return tuple(sorted(devices, key=str))


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type)


@dataclasses.dataclass(frozen=True, slots=True)
class AutocastState:
    """Which automatic casts (`torch.autocast`) are on.

    Attributes:
        types: (device type, whether it is on, dtype) of each.
        cache: Whether casts of weights are cached.
    """

    types: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def current(cls, devices: Iterable[torch.device]) -> AutocastState:
        """Return which automatic casts are on now, for the CPU and the types of `devices`."""
        names = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return cls(
            tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which exactly these automatic casts are on."""
        with ExitStack() as stack:
            for name, enabled, dtype in self.types:
                if enabled:
                    stack.enter_context(torch.autocast(name, dtype=dtype, cache_enabled=self.cache))
                elif torch.is_autocast_enabled(name):
                    stack.enter_context(torch.autocast(name, enabled=False))
            yield


@dataclasses.dataclass(frozen=True, slots=True)
class KeptBuffer:
    """A buffer of a model as it was before a forward.

    Attributes:
        module: The module that has it.
        name: Its name there.
        tensor: The buffer itself.
        version: Torch's counter of writes to it.
        clone: A copy; None for one that has never changed: then its version must still hold.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    clone: Tensor | None

    def check(self) -> None:
        """Raise an error if the bits of the buffer are no longer known.

        Raises:
            NotCoveredError: It was taken for a constant and has changed.
        """
        if self.clone is None and self.tensor._version != self.version:
            raise NotCoveredError(f"buffer {self.name} of {type(self.module).__name__} changed for the first time")

    def put_back(self) -> None:
        """Write the kept elements back into the module's buffer (the same tensor); nothing if it is unchanged."""
        self.check()
        self.module._buffers[self.name] = self.tensor
        if self.clone is not None and not same_bits(self.tensor, self.clone):
            with torch.no_grad():
                self.tensor.copy_(self.clone)


class BufferKeeper:
    """Keeps the buffers of a model, and learns which of them are constants (masks, tables) that need no copy.

    A version alone does not tell: BatchNorm writes its running statistics without counting one. So a buffer counts as
    constant once a forward has left it bit for bit as it was, and until its version changes. Running statistics, and
    what a forward was once seen to change, never do: a forward may leave them alone by chance, as in evaluation mode
    or when they are NaN already. Learning waits for the device once per constant buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._constant: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._changing: dict[tuple[int, str], Tensor] = {}

    def keep(self) -> list[KeptBuffer]:
        """Return all buffers as they are now, with a clone of each that is not known to be constant."""
        kept = []
        for module in self._modules:
            for name, tensor in module._buffers.items():
                if tensor is None:
                    continue
                constant = self._is_constant(module, name, tensor)
                clone = None if constant else tensor.detach().clone()
                kept.append(KeptBuffer(module, name, tensor, tensor._version, clone))
        return kept

    def _is_constant(self, module: nn.Module, name: str, tensor: Tensor) -> bool:
        place = id(module), name
        known = self._constant.get(place)
        if known is None or known[0] is not tensor:
            return False
        if known[1] != tensor._version:  # changed between two forwards, and may be again before a replay
            self._changing[place] = tensor
            del self._constant[place]
            return False
        return True

    def learn(self, kept: Sequence[KeptBuffer]) -> list[KeptBuffer]:
        """Compare `kept` with the buffers after the forward.

        Return it without clones of buffers that were left alone.
        """
        return [self._judged(buffer) for buffer in kept]

    def _judged(self, buffer: KeptBuffer) -> KeptBuffer:
        place, tensor, clone = (id(buffer.module), buffer.name), buffer.tensor, buffer.clone
        if clone is None or self._changing.get(place) is tensor or isinstance(buffer.module, _NormBase):
            return buffer
        if buffer.module._buffers.get(buffer.name) is not tensor:
            return buffer
        if tensor._version != buffer.version or not same_bits(tensor, clone):
            self._changing[place] = tensor
            return buffer
        self._constant[place] = (tensor, tensor._version)
        return dataclasses.replace(buffer, clone=None)


def clone_buffers(model: nn.Module) -> list[KeptBuffer]:
    """Return all buffers of `model` with a clone each, whatever is known of them."""
    return BufferKeeper(model).keep()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal bit for bit, NaNs included. Waits for the device."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
