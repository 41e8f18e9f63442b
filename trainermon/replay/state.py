"""Everything besides its arguments and parameters that a forward depends on: taken, set, and put back bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainermon.statistics.layout import has_memory, parts_of

# Of a Mersenne Twister in the memory of numpy or Python: 624 words, and the position among them.
_WORDS = 624
_MT19937_BYTES = _WORDS * 4 + 4
# The position and the words beside it tell whether one was used: every draw moves the position, and when it comes to
# the same place again all words are others. To look at all of them takes 3 µs each time, from memory.
_Spot = ctypes.c_char * 64
_HAS_GAUSS = 3  # its place in the state
# In torch's state: seed, how many words are left, whether it is seeded, position; 624 words of 64 bits; normal numbers.
_TORCH_HEAD = struct.Struct("@Qi4xQ")
_TORCH_WORDS_END = _TORCH_HEAD.size + _WORDS * 8
_TORCH_MEMORY = struct.Struct("@Qi4xI")  # the same in its memory; words of 32 bits follow


class NotCoveredError(Exception):
    """Raised if something that the replay needs was not kept; the text says what."""


class RandomState(NamedTuple):
    """The state of every generator a model may draw from: Python's, numpy's, torch's on the CPU and on its devices."""

    python: Any
    numpy: Any
    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]

    @classmethod
    def current(cls, devices: Iterable[torch.device], *, anew: bool = False) -> RandomState:
        """Return the present state of all generators. Cost: copies of about 8 KB; no device is waited for.

        With `anew` numpy and torch are asked whatever is known, for a state that the training goes on from.
        """
        numpy = sys.modules.get("numpy")
        return cls(
            python=_python.current(),
            numpy=None if numpy is None else _numpy.current(numpy, anew=anew),
            cpu=_torch.current(anew=anew),
            devices=tuple([(device, _device_module(device).get_rng_state(device)) for device in devices])
            if devices
            else (),
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
        self._spot: Any = None
        self._is_known = sys.implementation.name == "cpython" and isinstance(self._generator, random.Random)
        if self._is_known:
            address = id(self._generator) + object.__basicsize__
            position, *words = struct.unpack(f"@{_WORDS + 1}I", ctypes.string_at(address, _MT19937_BYTES))
            self._is_known = (*words, position) == self._state[1]
            self._spot = _Spot.from_address(address)

    def current(self) -> Any:
        """Return what `random.getstate()` does."""
        if not self._is_known or self._generator.gauss_next is not None:
            return random.getstate()
        memory = self._spot.raw
        if memory != self._memory:
            self._memory, self._state = memory, random.getstate()
        return self._state


class _NumpyState:
    """Asks numpy for the state of its global generator only if that was used since: numpy takes 40 µs to tell.

    Whether it was used is seen in its memory. A normal number that lies ready may be taken without a trace there, so a
    state that has one is asked for anew. That one was put back by `set_state`, beside the same memory, is not seen.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._spot: Any = None
        self._memory = b""
        self._state: tuple[Any, ...] = ()

    def current(self, numpy: Any, *, anew: bool) -> Any:
        """Return what `numpy.random.get_state()` does; it is asked in any case if `anew`."""
        generator = numpy.random.get_bit_generator()
        if generator is not self._generator:
            if type(generator) is not numpy.random.MT19937:
                return numpy.random.get_state(legacy=False)
            self._generator, self._memory = generator, b""
            end = generator.ctypes.state_address + _MT19937_BYTES
            self._spot = _Spot.from_address(end - ctypes.sizeof(_Spot))
        memory = self._spot.raw
        if anew or memory != self._memory:
            state = numpy.random.get_state()
            self._memory, self._state = b"" if state[_HAS_GAUSS] else memory, state
            return state
        return self._state


class _TorchState:
    """Asks torch for the state of its generator on the CPU only if that was used since: torch takes 15 µs to tell.

    Whether it was used is seen in its memory, where that looks as expected. A state with a normal number that lies
    ready is asked for anew; that one was put back by `set_rng_state`, beside the same memory, is not seen.
    """

    def __init__(self) -> None:
        self._memory, self._state = b"", torch.default_generator.get_state()
        self._spot = _torch_spot(torch.default_generator, self._state)

    def current(self, *, anew: bool) -> Tensor:
        """Return what `torch.get_rng_state()` does, which nobody may write to; it is asked in any case if `anew`."""
        memory = b"" if self._spot is None else self._spot.raw
        if anew or not memory or memory != self._memory:
            self._state = torch.default_generator.get_state()
            has_normal = bool(self._state[_TORCH_WORDS_END:].any())
            self._memory = b"" if has_normal else memory
        return self._state


def _torch_spot(generator: torch.Generator, state: Tensor) -> Any:
    """Return a view of the place in memory where position and first words of the generator are; None: not as expected.

    `state` is its present state.
    """
    content = bytes(state.tolist())
    if len(content) < _TORCH_WORDS_END or not hasattr(generator, "_cdata"):
        return None
    words = struct.pack(f"@{_WORDS}I", *struct.unpack_from(f"@{_WORDS}Q", content, _TORCH_HEAD.size))
    begin = ctypes.string_at(generator._cdata, 256).find(words[:64]) - _TORCH_MEMORY.size
    if begin < 0 or ctypes.string_at(generator._cdata + begin + _TORCH_MEMORY.size, len(words)) != words:
        return None
    address = generator._cdata + begin
    seen = _TORCH_MEMORY.unpack(ctypes.string_at(address, _TORCH_MEMORY.size))
    return _Spot.from_address(address) if seen == _TORCH_HEAD.unpack_from(content) else None


_python, _numpy, _torch = _PythonState(), _NumpyState(), _TorchState()


def accelerators(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices with a generator of their own on which `model` has parameters or buffers."""
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return tuple(sorted(devices, key=str))


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type)


class AutocastState(NamedTuple):
    """Which automatic casts (`torch.autocast`) are on.

    Attributes:
        types: (device type, whether it is on, dtype) of each.
        cache: Whether casts of weights are cached.
    """

    types: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def current(cls, devices: Sequence[torch.device]) -> AutocastState:
        """Return which automatic casts are on now, for the CPU and the types of `devices`."""
        if not (devices or torch._C._is_any_autocast_enabled()):
            return _NO_CASTS
        names = dict.fromkeys(["cpu", *[device.type for device in devices]])
        return cls(
            tuple([(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names]),
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


_NO_CASTS = AutocastState((("cpu", False, torch.bfloat16),), cache=True)  # on a CPU: what is off uses no dtype


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
            if not module._buffers:
                continue
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
    """Return whether two tensors of one dtype and shape are equal bit for bit, NaNs included. Waits for the device.

    False where one has no memory: its bits are not known.
    """
    if left.dtype != right.dtype or left.layout is not right.layout or left.is_nested is not right.is_nested:
        return False
    parts, their_parts = parts_of(left.detach()), parts_of(right.detach())
    return all(
        part.shape == their_part.shape
        and has_memory(part)
        and has_memory(their_part)
        and torch.equal(_bytes(part), _bytes(their_part))
        for part, their_part in zip(parts, their_parts, strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
