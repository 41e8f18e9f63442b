"""What is made of tensors element by element, taken piece by piece, so that its memory does not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainermon.core.values import STATISTICS
from trainermon.monitor.taps.collector import Collector
from trainermon.statistics.kernel import moments
from trainermon.statistics.merge import merge_rows

# Elements in a piece. On a CPU its float32 copies stay in the cache: half the time of larger pieces. Elsewhere 16 MiB.
CPU_PIECE, DEVICE_PIECE = 1 << 17, 1 << 22


@torch.no_grad()
def take_in_pieces(
    collector: Collector,
    series: Sequence[int],
    tensors: Sequence[Tensor],
    make: Callable[..., Sequence[Tensor]],
) -> None:
    """Record statistics of the results of the elementwise function `make` on `tensors` of one shape, piece by piece.

    `make` returns one result per series. Needs memory for what `make` needs for a piece, or for one index of the first
    dimension of tensors that are not contiguous. Nothing waits for the device.
    """
    if all(tensor.is_contiguous() for tensor in tensors) or not tensors[0].dim():
        tensors = [tensor.reshape(-1) for tensor in tensors]
    first = tensors[0]
    length = max(1, piece_size(first) * len(first) // max(1, first.numel()))
    pieces = list(zip(*(torch.split(tensor, length) for tensor in tensors), strict=True))
    rows = torch.empty((len(pieces), len(series), len(STATISTICS)), dtype=torch.float64, device=first.device)
    for piece, row in zip(pieces, rows, strict=True):
        moments(make(*piece), row)
    collector.repeat(series, rows[0] if len(pieces) == 1 else merge_rows(rows.transpose(0, 1)))


def piece_size(tensor: Tensor) -> int:
    """Return the number of elements per piece on the device of `tensor`."""
    return CPU_PIECE if tensor.is_cpu else DEVICE_PIECE
