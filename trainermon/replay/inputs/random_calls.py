"""A recorded call with random inputs in place of those that were recorded."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainermon.core.errors import DumpError
from trainermon.dump.files.records import EntryRecord
from trainermon.replay.dumped_calls import DumpedCall, rebuild
from trainermon.replay.inputs.constraints import constrain
from trainermon.replay.inputs.numbers import TensorNumbers, tensor_like

MAX_ELEMENTS = 1 << 28
"""The numbers of a tensor beyond which it is not made: its shape may be made up."""


class RandomTensors:
    """Makes tensors from the forms of a dump; forms of one value (`order`) become one tensor.

    Args:
        key: The call whose tensors they are; other calls get other numbers.
        seed: Of the numbers.
    """

    def __init__(self, key: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
        self._made: dict[Any, Tensor] = {}

    def __call__(self, form: Mapping[str, Any]) -> Tensor:
        """Return a tensor with the statistics of a form.

        Raises:
            DumpError: It has too many elements, or its type is none of torch's.
        """
        identity = form.get("order"), str(form.get("dtype")), str(form.get("shape"))
        if identity[0] is None or identity not in self._made:
            numbers = TensorNumbers.of_form(form)
            if numbers.count > MAX_ELEMENTS:
                raise DumpError(f"a tensor of {numbers.count:,} elements: random ones have at most {MAX_ELEMENTS:,}")
            made = _strided(tensor_like(numbers, self.rng), form.get("stride"))
            if identity[0] is None:
                return made
            self._made[identity] = made
        return self._made[identity]


def rebuild_random(directory: Path, data: Mapping[str, Any], entry: EntryRecord, seed: int) -> DumpedCall:
    """Return the call of `entry` with inputs that have the recorded statistics, and that the operation accepts.

    Nothing is read but `data`, what dump.json has by key; the call has no result. The same seed gives the same inputs.

    Raises:
        DumpError: It is no forward call, the function is not known, or it would make too much.
    """
    tensors = RandomTensors(entry.key, seed)
    dumped = rebuild(directory, data, entry, tensors)
    args, kwargs = list(dumped.call.args), dict(dumped.call.kwargs)
    constrain(dumped.name, args, kwargs, tensors.rng)
    return dataclasses.replace(dumped, call=dumped.call._replace(args=args, kwargs=kwargs))


def _strided(tensor: Tensor, stride: Any) -> Tensor:
    """Return the tensor with the recorded order of its elements in memory, as far as that can be."""
    if not isinstance(stride, list) or len(stride) != tensor.dim() or 0 in stride:
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -int(stride[dim]))
    back = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)
