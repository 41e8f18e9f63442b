"""Digests of the weights in a checkpoint, for an engine that loads files, or a trainer that wrote some."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.analysis.checkpoint.pieces import Box, StoredArray, TensorPieces
from trainermon.core.errors import CheckpointError, ConfigError
from trainermon.core.terminal.progress import counted
from trainermon.rl.digest import Digester, TensorDigest
from trainermon.rl.names import same
from trainermon.rl.weights import whole_of


def digest_checkpoint(path: Path, *, dtype: str = "") -> dict[str, TensorDigest]:
    """Return the digest of each parameter and buffer in a checkpoint, by name.

    Cost: one pass over the files. With torch, at the pace of reading; without it some ten times slower.

    Raises:
        CheckpointError: It cannot be read, or a tensor is not whole in it.
        ConfigError: `dtype` asks for a cast, and torch is not installed.
    """
    checkpoint = open_checkpoint(path)
    has_torch = importlib.util.find_spec("torch") is not None
    if dtype and not has_torch:
        raise ConfigError(f"--dtype: casting to {dtype} needs torch, which is not installed")
    found = {}
    for name, tensor in counted(checkpoint.tensors.items(), len(checkpoint.tensors), "tensors"):
        found[same(name)] = _of_tensor(tensor, dtype, has_torch=has_torch)
    return found


def _of_tensor(tensor: TensorPieces, dtype: str, *, has_torch: bool) -> TensorDigest:
    digester = Digester(dtype)
    regions = {}
    for number, piece in enumerate(tensor.pieces):
        if not isinstance(piece.region, Box):
            raise CheckpointError(f"{tensor.name}: stored as ranges of the flattened tensor, expected boxes")
        if piece.region not in regions:
            regions[piece.region] = str(number)
            digester.add(
                str(number), _elements(piece.stored, has_torch=has_torch), piece.region.starts, piece.stored.dtype
            )
    parts = list(digester.finish().values())
    whole = whole_of(parts)
    return TensorDigest(
        dtype=whole.dtype, shape=tensor.shape, total=whole.total, order=whole.order if whole.order is not None else 0
    )


def _elements(stored: StoredArray, *, has_torch: bool) -> Any:
    array = stored.array()
    if not has_torch:
        return array
    import torch

    bits = array.view(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1")
    return torch.from_numpy(bits.copy()).view(getattr(torch, stored.dtype))
