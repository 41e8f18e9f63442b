"""Lets Megatron offload its optimizer without a GPU: every tensor is a device's but those that `.cpu()` made."""

import contextlib

import torch


@contextlib.contextmanager
def told_apart():
    """Within, `is_cuda` is false only of tensors that were brought to the host by `.cpu()`."""
    on_host = []

    def cpu(tensor, *args, **kwargs):
        on_host.append(tensor.clone())
        return on_host[-1]

    is_cuda = property(lambda tensor: not any(tensor is found for found in on_host))
    for name, member in (("is_cuda", is_cuda), ("cpu", cpu)):
        setattr(torch.Tensor, name, member)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda, torch.Tensor.cpu
