"""Task overflow_check: the dump of a step is kept only if a call in it gave NaN or Inf.

Decides what counts as an overflow, and where a dump lies until that is known. Values are looked at when lines are
flushed, when their statistics are on the host anyway.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from trainermon.core.errors import DumpError
from trainermon.core.private_files import make_private_folder
from trainermon.dump.debugger_config import DebuggerConfig
from trainermon.dump.files.records import DumpInfo
from trainermon.dump.forms import TensorForm
from trainermon.dump.selecting_writer import SelectingWriter

WAITING_FOLDER = "overflow_check"
_OUTPUTS = frozenset(["output", "output_kwargs"])


class OverflowWriter(SelectingWriter):
    """Writes a dump into `<dump_path>/overflow_check/rank<R>`; moves it to `directory` if a call overflowed.

    A dump whose process was killed stays where it was written, and can be read there.
    """

    def __init__(self, directory: Path, info: DumpInfo, config: DebuggerConfig) -> None:
        self.num_overflows = 0
        self._wanted = directory
        self._unseen: list[dict[str, Any]] = []
        super().__init__(directory.parent.parent / WAITING_FOLDER / directory.name, info, config)

    def add(
        self, key: str, value: dict[str, Any], *, parent: str | None = None, stack: Sequence[str] | None = None
    ) -> None:
        """Append an entry.

        Whether it has an overflow (NaN or new Inf) is checked at the next `flush`, when its numbers are known. `key`,
        `value`, `parent` and `stack` are as in `DumpWriter.add`.
        """
        self._unseen.append(value)
        super().add(key, value, parent=parent, stack=stack)

    def flush(self) -> None:
        """Write what has waited, and count the overflows in it."""
        super().flush()
        unseen, self._unseen = self._unseen, []
        self.num_overflows += sum(map(is_overflow, unseen))

    def close(self, **changes: Any) -> DumpInfo:
        """Put the dump in place if there was an overflow, and remove it otherwise; return the final info.

        Raises:
            DumpError: It cannot be written or moved.
        """
        info = super().close(**changes)
        try:
            if not self.num_overflows:
                shutil.rmtree(self.directory)
            else:
                make_private_folder(self._wanted.parent)
                shutil.rmtree(self._wanted, ignore_errors=True)  # of an earlier run
                self.directory = self.directory.rename(self._wanted)
        except OSError as error:
            raise DumpError(f"cannot move the dump in {self.directory} to {self._wanted}: {error}") from error
        return info


def is_overflow(value: dict[str, Any]) -> bool:
    """Return whether a call overflowed: it gave NaN, or gave Inf though nothing that it was given was infinite.

    `value` is its entry as in dump.json. Minus infinity that masks and their sums hand on does not count.
    """
    given = [counts for side, item in value.items() if side not in _OUTPUTS for counts in _nonfinite(item)]
    gave = [counts for side, item in value.items() if side in _OUTPUTS for counts in _nonfinite(item)]
    return any(nans for nans, _ in gave) or (any(infs for _, infs in gave) and not any(infs for _, infs in given))


def _nonfinite(item: Any) -> Iterator[tuple[int, int]]:
    """Yield how many NaNs and Infs each tensor and number within a side of an entry has."""
    for leaf in pytree.tree_leaves(item):
        if isinstance(leaf, TensorForm):
            yield (0, 0) if leaf.reading is None else leaf.reading.nonfinite
        elif isinstance(leaf, float):
            yield int(math.isnan(leaf)), int(math.isinf(leaf))
