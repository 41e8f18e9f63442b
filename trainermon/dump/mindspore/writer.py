"""A dump whose tensors are MindSpore's."""

from __future__ import annotations

from trainermon.dump.mindspore.tensors import MindSporeTensors
from trainermon.dump.selecting_writer import SelectingWriter


class CellWriter(SelectingWriter):
    """Writes what the configuration chooses of the calls of cells; see `SelectingWriter`."""

    def _framework_tensors(self) -> MindSporeTensors:
        return MindSporeTensors()
