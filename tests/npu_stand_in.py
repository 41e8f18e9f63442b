"""A device `npu` that is none: its tensors live in host memory, its streams and events are notes of what was asked.

Registered through PrivateUse1, torch's place for a device that comes from outside, as `torch_npu` is. It is global to a
process and cannot be taken back: import it in a process of its own. What code does with it shows that it needs nothing
that only CUDA has; it does not show what a real NPU computes.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

calls: list[str] = []


_memory: dict[int, torch.Tensor] = {}  # by the address of the storage, which autograd's copies of a handle share


class NpuTensor(torch.Tensor):
    """The handle of a tensor on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch has it

    def data_ptr(self):
        return _raw(self).data_ptr()


class Stream(torch.Stream):
    _numbers = itertools.count(1)

    def __new__(cls, device=None):
        return super().__new__(cls, stream_id=next(cls._numbers), device_index=0, device_type=20)

    def wait_stream(self, other):
        calls.append(f"{self.stream_id} waits for {other.stream_id}")


class Event:
    def __init__(self):
        self.is_recorded = self.has_passed = False

    def record(self, stream):
        self.is_recorded, self.has_passed, self.stream = True, False, stream.stream_id
        events.append(self)
        calls.append(f"event in {stream.stream_id}")

    def query(self):
        return self.is_recorded and self.has_passed

    def synchronize(self):
        calls.append("synchronize")
        self.has_passed = True


events: list[Event] = []
DEFAULT = Stream()
_current = [DEFAULT]


@contextlib.contextmanager
def stream(entered):
    _current.append(entered)
    yield
    _current.pop()


module: Any = types.ModuleType("torch.npu")
module.Stream, module.Event, module.stream = Stream, Event, stream
module.current_stream = lambda device=None: _current[-1]
module.is_available = lambda: True
module.is_initialized = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module._is_in_bad_fork = lambda: False
module.manual_seed_all = lambda seed: None
module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]

_setup_privateuseone_for_python_backend("npu", backend_module=module)


def wrap(raw):
    """Return the handle of `raw`; of a copy where it is not contiguous, for a handle has no strides of its own."""
    raw = raw.contiguous()
    handle = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
    handle.__class__ = NpuTensor
    _memory[handle.untyped_storage()._cdata] = raw
    return handle


def _copy_from(source, target, non_blocking=False):
    """Copy between host and device, or on the device: what torch leaves to a device that is not its own."""
    _raw(target).copy_(_raw(source))
    return target


def _raw(tensor):
    return _memory[tensor.untyped_storage()._cdata] if _is_handle(tensor) else tensor


def _is_handle(value):
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _compute(op, *args, **kwargs):
    """Do any operation of torch in host memory."""
    if kwargs.get("pin_memory"):
        raise RuntimeError("the stand-in has no pinned memory")
    handles = {id(_raw(h)): h for h in pytree.tree_leaves((args, kwargs)) if _is_handle(h)}
    args, kwargs = pytree.tree_map(
        lambda x: torch.device("cpu") if isinstance(x, torch.device) else _raw(x), (args, kwargs)
    )
    found = op(*args, **kwargs)
    for handle in handles.values():
        if handle.shape != _raw(handle).shape:  # an output that was made empty to be resized
            handle.data = wrap(_raw(handle))
    return pytree.tree_map(
        lambda x: handles[id(x)] if id(x) in handles else wrap(x) if isinstance(x, torch.Tensor) else x, found
    )


def _as_strided(tensor, size, stride, storage_offset=None):
    offset = (storage_offset or 0) + _raw(tensor).storage_offset()  # handles know of no offset
    return wrap(_raw(tensor).as_strided(size, stride, offset))


_library = torch.library.Library("_", "IMPL")
_library.fallback(_compute, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
_aten.impl("as_strided", _as_strided, "PrivateUse1")
for name in ("detach", "alias"):
    _aten.impl(name, lambda tensor: wrap(_raw(tensor)), "PrivateUse1")
_aten.impl("record_stream", lambda tensor, stream: calls.append(f"used in {stream.stream_id}"), "PrivateUse1")
