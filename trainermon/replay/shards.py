"""Which parts of gathered parameters were bad before anybody gathered them: only their owners can tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def nonfinite_names(shards: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yield the names of those (name, tensor) pairs whose tensor holds a NaN or an Inf.

    Waits for the device once for each floating or complex tensor; others are passed over.
    """
    for name, shard in shards:
        if (shard.is_floating_point() or shard.is_complex()) and not bool(shard.detach().isfinite().all()):
            yield name
