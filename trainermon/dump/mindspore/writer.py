"""A dump whose tensors are MindSpore's."""

from __future__ import annotations

from collections.abc import Sequence

from trainermon.dump.forms import TensorLeaf
from trainermon.dump.mindspore.tensors import MindSporeTensors
from trainermon.dump.selecting_writer import SelectingWriter
from trainermon.dump.writer import DumpWriter
from trainermon.hooks.mindspore.functions import unseen


class CellWriter(DumpWriter):
    """Writes all that it is given of the calls of cells; see `DumpWriter`."""

    def record(self, key: str, leaves: Sequence[TensorLeaf]) -> None:
        """Record statistics, checksums and tensors as asked for; no call that this makes is recorded itself."""
        with unseen():
            super().record(key, leaves)

    def _framework_tensors(self) -> MindSporeTensors:
        return MindSporeTensors()


class SelectingCellWriter(CellWriter, SelectingWriter):
    """Writes what the configuration chooses of the calls of cells and functions; see `SelectingWriter`."""
