"""Digests of weights: a few numbers per tensor that add up over shards and over fused tensors.

Of each row (along the first dimension; of more than two, along the first two) the checksum of the bits is taken, as
`trainermon.statistics.checksums` defines it. A tensor's digest has two sums of these, modulo 2^64:

    total = sum of checksum(row)        order = sum of weight(index of the row in the whole tensor) * checksum(row)

The weight of a row with two indices is the product of one for each.

Both are sums over elements, so those of shards add up to those of the whole, in whichever dimension it was split.
`order` sees rows that have changed places, as heads or fused parts in the wrong order are; `total` needs no knowledge
of places: of a tensor that fuses others it is the sum of theirs. Rows of zeros, which pad a vocabulary, add nothing.
What is different goes unseen with a probability of about 2^-64, but for elements that have changed places in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trainermon.core.errors import ConfigError
from trainermon.rl.quantised import TensorSums, is_quantised, moments_of

MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SECOND = 1 << 40  # far from what the first dimension counts: weights of the two are not the same
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


NamedTensors = Iterable[tuple[str, Any]] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """The digest of a tensor, or of a part of one.

    Attributes:
        dtype: Its type, as `bfloat16`.
        shape: Its shape.
        starts: Where the part begins in each dimension of the whole tensor; empty: it is whole, or nobody said.
        total: 0 to 2^64 - 1.
        order: 0 to 2^64 - 1.
        moments: Where one side is quantised, see `quantised.py`; None: not taken.
    """

    dtype: str
    shape: tuple[int, ...]
    starts: tuple[int, ...] = ()
    total: int
    order: int
    moments: TensorSums | None = None

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightDigest:
    """The digests of all tensors that one process holds, or sends.

    Attributes:
        version: The version of the weights, counted by the script.
        tensors: By name.
        engine: The engine that holds them; empty: the trainer.
        shard: Number of the engine's or trainer's rank that holds this part.
        num_shards: How many ranks hold parts.
    """

    version: int
    tensors: Mapping[str, TensorDigest]
    engine: str = ""
    shard: int = 0
    num_shards: int = 1


class Digester:
    """Takes tensors one by one; digests are on the host when `finish` returns.

    Tensors of an accelerator are reduced there, in the order of its stream, and nothing waits before `finish`.

    Args:
        dtype: Floating-point tensors are cast to this type first, as `bfloat16`; empty: they are taken as they are. Of
            a type with a scale (`float8`, `int8`) moments are taken instead of a cast, which waits for the device.
    """

    def __init__(self, dtype: str = "") -> None:
        self._takes_moments = is_quantised(dtype)
        self._dtype = "" if self._takes_moments else dtype
        self._moments: dict[str, TensorSums | None] = {}
        self._open: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], Any, Any]] = {}

    def add(self, name: str, tensor: Any, starts: tuple[int, ...] = (), dtype: str = "", scale: Any = None) -> None:
        """Take a tensor (torch, or numpy) that begins at `starts` of the whole one of that name.

        `dtype` says what the bits of an array are that numpy has no type for, `scale` what a quantised one is to be
        multiplied by.
        """
        local, begin = _local_part(tensor)
        torch = _torch_of(local)
        if torch is not None and (scale is not None or (self._takes_moments and local.is_floating_point())):
            self._moments[name] = moments_of(local, scale)
        starts = starts or begin
        rows, read = _row_checksums(local, self._dtype)
        columns = tuple(local.shape)[1:2] if len(local.shape) > 2 else ()
        dtype = dtype if _torch_of(local) is None and dtype else read
        total, order = _sums(rows, columns, starts[:2] if starts else (0, 0))
        self._open[name] = (dtype, tuple(local.shape), starts, total, order)

    @property
    def num_tensors(self) -> int:
        """How many were taken."""
        return len(self._open)

    def finish(self) -> dict[str, TensorDigest]:
        """Return the digests by name. Waits for the device, once for each device."""
        numbers = _on_host([entry[3:] for entry in self._open.values()])
        return {
            name: TensorDigest(
                dtype=dtype,
                shape=shape,
                starts=starts,
                total=total & _MASK,
                order=order & _MASK,
                moments=self._moments.get(name),
            )
            for (name, (dtype, shape, starts, *_)), (total, order) in zip(self._open.items(), numbers, strict=True)
        }


def digest_tensors(named_tensors: NamedTensors, *, dtype: str = "") -> dict[str, TensorDigest]:
    """Return the digest of each tensor (torch on any device, or numpy) by name.

    Cost: one pass over the elements, with `dtype` another one for the cast; waits for the device at the end. A DTensor
    stands for its local part, without communication.
    """
    digester = Digester(dtype)
    for name, tensor in items(named_tensors):
        digester.add(name, tensor)
    return digester.finish()


def items(named_tensors: NamedTensors) -> Iterator[tuple[str, Any]]:
    """Return names and tensors of a mapping, or of what yields pairs of them."""
    return iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)


def added(parts: Iterable[TensorDigest]) -> tuple[int, int]:
    """Return total and order of the whole that disjoint parts make."""
    total = order = 0
    for part in parts:
        total, order = total + part.total, order + part.order
    return total & _MASK, order & _MASK


@functools.lru_cache(maxsize=64)
def row_weights(first: int, count: int) -> np.ndarray:
    """Return the weights of rows `first` and following, int64 [count], odd.

    Source: SplitMix64, in G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    with np.errstate(over="ignore"):
        x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        weights: np.ndarray = ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return weights


def _row_checksums(tensor: Any, dtype: str) -> tuple[Any, str]:
    """Return the checksum of each row, int64, where the tensor is, and the name of the type that was read."""
    torch = _torch_of(tensor)
    if torch is None:
        array = np.asarray(tensor)
        array = array.reshape(-1, *array.shape[2:]) if array.ndim > 2 else array
        if dtype and array.dtype.kind == "f" and array.dtype.name != dtype:
            array = array.astype(_numpy_type(dtype))
        return _rows_by_numpy(array), array.dtype.name
    from trainermon.statistics.checksums import row_checksums  # loads torch, which whoever passes a tensor has

    if dtype and tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype))
    tensor = tensor.flatten(0, 1) if tensor.ndim > 2 else tensor
    return row_checksums(tensor), str(tensor.dtype).removeprefix("torch.")


def _numpy_type(dtype: str) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise ConfigError(
            f"numpy arrays cannot be cast to {dtype}: pass tensors, or arrays of the engine's type"
        ) from None


def _rows_by_numpy(array: np.ndarray) -> np.ndarray:
    rows = array.shape[0] if array.ndim else 1
    flat = np.ascontiguousarray(array).reshape(rows, -1) if array.size else np.zeros((rows, 0), array.dtype)
    bits = flat.view(_SIGNED[flat.dtype.itemsize]).astype(np.int64)
    with np.errstate(over="ignore"):
        sums: np.ndarray = (bits * (bits + np.int64(MULTIPLIER - (1 << 64)))).sum(axis=1)
    return sums


def _sums(rows: Any, columns: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Any, Any]:
    count = len(rows) // max(1, *columns) if columns else len(rows)
    weights = row_weights(starts[0], count)
    if columns:
        with np.errstate(over="ignore"):
            weights = (weights[:, None] * row_weights(_SECOND + starts[1], columns[0])).reshape(-1)
    torch = _torch_of(rows)
    if torch is not None:
        return rows.sum(), (rows * torch.from_numpy(weights).to(rows.device, non_blocking=True)).sum()
    with np.errstate(over="ignore"):
        return int(rows.sum()), int((rows * weights).sum())


def _on_host(numbers: list[tuple[Any, Any]]) -> list[tuple[int, int]]:
    """Return the numbers as ints; those on a device come in one copy."""
    devices: dict[Any, list[int]] = {}
    found: list[tuple[int, int]] = [(0, 0)] * len(numbers)
    for index, (total, order) in enumerate(numbers):
        if isinstance(total, int):
            found[index] = (total, order)
        else:
            devices.setdefault(total.device, []).append(index)
    for indices in devices.values():
        torch = _torch_of(numbers[indices[0]][0])
        pairs = torch.stack([value for index in indices for value in numbers[index]]).tolist()
        for place, index in enumerate(indices):
            found[index] = (pairs[2 * place], pairs[2 * place + 1])
    return found


def _local_part(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """Return what of a tensor is on this rank, and where it begins in the whole; () for a plain one."""
    if not hasattr(tensor, "to_local") or not hasattr(tensor, "device_mesh"):
        return tensor, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(starts)


def _torch_of(value: Any) -> Any:
    """Return torch if `value` is a tensor of it, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None
