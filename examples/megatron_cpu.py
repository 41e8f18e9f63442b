"""Lets Megatron-Core, written for CUDA devices, train on a CPU with gloo: call `install()` before anything of it.

Only what Megatron's plain paths touch is replaced: "cuda" as a device means the CPU, streams and events do nothing, and
tensors are named as on a GPU where Megatron compares those names. For tests and for a first look; never for speed.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class Nothing:
    """Stands for a stream or an event: whatever is asked of it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., Any]:
        return _always(self)


class FloatTensor:
    """Makes a float32 tensor, and is a class, because Megatron also asks for instances of it."""

    def __new__(cls, values: Any) -> Any:
        return torch.tensor(values, dtype=torch.float32)


def install() -> None:
    """Make the CPU look like a CUDA device to Megatron, in this process, for good."""
    cuda: Any = torch.cuda
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda.current_device = _always(torch.device("cpu"))
    cuda.Stream = cuda.Event = Nothing
    cuda.stream = _always(contextlib.nullcontext())
    cuda.current_stream = cuda.default_stream = Nothing
    cuda.synchronize = cuda.empty_cache = cuda.nvtx.range_push = cuda.nvtx.range_pop = _always(None)
    cuda.is_current_stream_capturing = _always(value=False)
    cuda.get_device_capability = _always((8, 0))
    cuda.FloatTensor = FloatTensor
    cuda.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.pin_memory = _itself
    tensor.type = _named_as_on_cuda(tensor.type)
    _install_in_megatron()


def _install_in_megatron() -> None:
    """Replace what Megatron bound when it was imported, which must not be before `install` ran."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # it warns whenever drawing on the "device" moves the generator of the CPU
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    distrib_optimizer.quantize_param_shard = _always(None)  # of FP8; 0.12 wants Transformer Engine to do nothing
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 forgets to define it where Transformer Engine is not installed


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:  # noqa: FBT001, FBT002  # as Megatron calls it
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _named_as_on_cuda(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensor_type)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return named
