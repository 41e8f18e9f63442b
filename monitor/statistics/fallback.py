"""The moments in torch calls: for devices without a kernel of ours, and for a CPU without the compiled one.

`exact_row` decides what the right answer is, on any device, without a copy to the host. `cpu_row` gives the same within
the promised error at a fraction of the cost, by chunks that stay in the core's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainermon.monitor.statistics.merge import merge_rows

EXACT_CHUNK = 1 << 22


def exact_row(elements: Tensor) -> Tensor:
    """Return the moments of a tensor of any real dtype and layout as float64 `[8]` on its device.

    Sums run in float64. Nothing is copied to the host and nothing branches on values; the temporaries are at most
    `EXACT_CHUNK` elements long, about 80 MB on the device at worst.
    """
    chunks = torch.split(elements.reshape(-1), EXACT_CHUNK)
    rows = [_chunk_row(chunk) for chunk in chunks if chunk.numel()]
    return merge_rows(torch.stack(rows) if rows else torch.empty((0, 8), dtype=torch.float64, device=elements.device))


def _chunk_row(chunk: Tensor) -> Tensor:
    values = chunk.to(torch.float64)
    nans = values.isnan()
    infs = values.isinf()
    bad = nans | infs
    finite = values.masked_fill(bad, 0.0)
    row = torch.stack(
        (
            values.masked_fill(bad, torch.inf).amin(),
            values.masked_fill(bad, -torch.inf).amax(),
            finite.sum(),
            finite.square_().sum(),
        )
    )
    counts = torch.stack(((values == 0).sum(), nans.sum(), infs.sum())).to(torch.float64)
    count = torch.full((1,), float(chunk.numel()), dtype=torch.float64, device=chunk.device)
    return torch.cat((count, row, counts))


@torch.no_grad()
def moments(tensors: list[Tensor], out: Tensor) -> None:
    """Write the moments of each tensor into the rows of `out`; see `kernel.moments` for the contract."""
    for index, tensor in enumerate(tensors):
        out[index] = exact_row(tensor)
