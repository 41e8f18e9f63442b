"""The tensors of torch, as a dump asks about them: read, sliced, copied, saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainermon.dump.debugger_config import TensorSlice
from trainermon.dump.files.tensor_files import save_tensor, suffix_for
from trainermon.dump.statistics import TensorReadings, has_elements
from trainermon.statistics.crc32 import crc32
from trainermon.statistics.layout import dense, untransformed


class TorchTensors:
    """What `FrameworkTensors` asks, of torch's tensors on any device."""

    framework = "pytorch"

    def reader(self) -> TensorReadings:
        """Return what reads the tensors of one dump."""
        return TensorReadings()

    def num_bytes(self, tensor: Tensor) -> int:
        """Return how many bytes the elements take; 0 where there are none, or nothing but a shape."""
        return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()

    def suffix(self, tensor: Tensor, file_format: str) -> str:
        """Return the ending of the tensor's file; `.pt` for whatever numpy cannot hold as an array."""
        return suffix_for(tensor, file_format)

    def save(self, tensor: Tensor, path: Path | str) -> int:
        """Write the tensor to a file; see `save_tensor`."""
        return save_tensor(tensor, path)

    def sliced(self, tensor: Tensor, slices: Sequence[TensorSlice]) -> Tensor:
        """Return the part of `tensor` that `slices` leave; one that does not fit its shape changes nothing."""
        tensor = tensor.detach()
        if tensor.is_nested:
            return tensor
        for part in slices:
            if part.dim < tensor.dim() and tensor.shape[part.dim] == part.size:
                tensor = tensor.narrow(part.dim, part.begin, min(part.end, part.size) - part.begin)
        return tensor

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy on the tensor's device."""
        return tensor.clone()

    def checksum(self, tensor: Tensor) -> str:
        """Return the tensor's `checksum`."""
        return checksum(tensor)


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes in order, as 8 hexadecimal digits; waits for the device.

    A tensor without elements has that of no bytes, one with a shape alone "". A DTensor counts with its local part.

    Raises:
        RuntimeError: torch cannot read the tensor (its own error).
        ValueError: The tensor has elements but no memory.
    """
    if not has_elements(tensor):
        return ""
    return f"{crc32(untransformed(dense(tensor).cpu().contiguous().resolve_conj().resolve_neg())):08x}"
