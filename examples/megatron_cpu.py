"""Lets Megatron-Core, which was written for CUDA devices, train on a CPU with gloo: call `install()` before it is imported.

Only what Megatron's plain paths touch is replaced: "cuda" as a device means the CPU, streams and events do nothing, and
tensors are named as on a GPU where Megatron compares those names. For tests and for a first look; never for speed.
"""

import contextlib
import functools

import torch

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class Nothing:
    """Stands for a stream or an event: everything is done already when it is asked."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class FloatTensor:
    """Makes a float32 tensor, and is a class, because Megatron also asks for instances of it."""

    def __new__(cls, values):
        return torch.tensor(values, dtype=torch.float32)


def install():
    """Make the CPU look like a CUDA device to Megatron, in this process, for good."""
    cpu, cuda = torch.device("cpu"), torch.cuda
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda.current_device = lambda: cpu
    cuda.Stream = cuda.Event = Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda device=None: Nothing()
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    cuda.FloatTensor = FloatTensor
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)

    from megatron.core.tensor_parallel import random  # only now: importing them touches torch.cuda
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _as_on_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 forgets to define it where Transformer Engine is not installed


def _on_cpu(factory):
    @functools.wraps(factory)
    def made(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _named_as_on_cuda(tensor_type):
    @functools.wraps(tensor_type)
    def named(tensor, *args, **kwargs):
        result = tensor_type(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return named


def _as_on_host(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
