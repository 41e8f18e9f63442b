"""What a dump asks of the tensors of a framework; what writes a dump's files goes by this, and imports none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trainermon.dump.debugger_config import TensorSlice
from trainermon.dump.forms import TensorLeaf


class TensorReader(Protocol):
    """Computes the statistics of a dump's tensors, and numbers the values in the order in which they became known.

    A tensor that was read before and is unchanged keeps its statistics and its number.
    """

    @property
    def waits_for_device(self) -> bool:
        """Whether `resolve` would have to wait for an accelerator to finish its work."""

    def next_order(self) -> int:
        """Return the next number, from 1, in the order in which values became known."""

    def read(self, leaves: Sequence[TensorLeaf]) -> Sequence[Exception]:
        """Start the statistics of each leaf's tensor as it is now, and set them as its form's reading.

        Returns:
            Errors of tensors whose statistics cannot be computed.
        """

    def reread(self, tensors: Sequence[Any]) -> None:
        """Drop what is remembered of `tensors`, which were changed without their version counter noticing."""

    def resolve(self) -> None:
        """Fill the numbers of all started statistics into the readings; waits for the device."""


class FrameworkTensors(Protocol):
    """The tensors of one framework."""

    @property
    def framework(self) -> str:
        """The framework's name, as dump.json has it: `pytorch`, `mindspore`."""

    def reader(self) -> TensorReader:
        """Return what reads the tensors of one dump."""

    def num_bytes(self, tensor: Any) -> int:
        """Return how many bytes the elements take; 0 where there are none, or nothing but a shape."""

    def suffix(self, tensor: Any, file_format: str) -> str:
        """Return the ending of the tensor's file, `.pt` or `.npy`, where the user asked for `file_format`."""

    def save(self, tensor: Any, path: str) -> int:
        """Write the tensor as it is now to a file of mode 0600, and return its number of bytes.

        Raises:
            OSError: The file cannot be written.
        """

    def sliced(self, tensor: Any, slices: Sequence[TensorSlice]) -> Any:
        """Return the part that `slices` leave, without a copy; one that does not fit the shape changes nothing."""

    def copied(self, tensor: Any) -> Any:
        """Return a copy on the tensor's device."""

    def checksum(self, tensor: Any) -> str:
        """Return the CRC-32 of the elements' bytes in order, 8 hexadecimal digits; waits for the device."""
