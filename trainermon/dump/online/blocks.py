"""What the blocks of a process that write into one folder have in common, whichever objects they belong to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trainermon.dump.online.findings import FindingsFile

FILES = ("accuracy_dispatch.csv", "accuracy_dispatch.json")
SAVED_CALLS = "calls"


class DispatchedBlocks:
    """Files, and numbers of blocks and calls, of one folder: a loop may make a new object for each block.

    The first block of a process replaces what an earlier run has left in the folder.

    Args:
        folder: `<dump_path>/rank<R>`.
        rank: This rank.

    Attributes:
        findings: The rows, and counts over all blocks.
        numbers: How many calls each operator had.
        num_saved: How many calls were saved.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.findings = FindingsFile(folder, rank=rank, step=0, takes_all=False, names=FILES)
        self.numbers: Counter[str] = Counter()
        self.num_saved = 0
        self._folder, self._num_blocks = folder, 0

    @staticmethod
    def of(folder: Path, rank: int) -> DispatchedBlocks:
        """Return that of a folder: always the same one in a process."""
        folder = folder.absolute()
        return _OF_FOLDERS.setdefault(folder, DispatchedBlocks(folder, rank))

    def begin(self, *, takes_all: bool) -> None:
        """Begin the next block; `takes_all`: calls that passed are rows, too."""
        if not self._num_blocks:
            for path in (self._folder / SAVED_CALLS).glob("*.pt"):
                path.unlink()
        self.findings.begin_step(self._num_blocks, takes_all=takes_all)
        self._num_blocks += 1


_OF_FOLDERS: dict[Path, DispatchedBlocks] = {}
