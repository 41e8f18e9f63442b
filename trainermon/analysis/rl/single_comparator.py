"""`SingleComparator`: compares two folders of `SingleSave`, with msprobe's names and arguments."""

from __future__ import annotations

from pathlib import Path

from trainermon.analysis.rl.stage_differences import StageComparison, compare_stages
from trainermon.analysis.rl.stage_tables import write_tables


class SingleComparator:
    """Compares what two runs saved, array by array.

    print(SingleComparator.compare("saved", "saved_there").sentence)
    """

    @classmethod
    def compare(
        cls,
        dir1: str | Path,
        dir2: str | Path,
        output_path: str | Path = "./msprobe_compare_output",
        num_processes: int = 8,  # noqa: ARG003  # msprobe's: one process is enough
    ) -> StageComparison:
        """Write `KEY.xlsx` for every key that both have, with msprobe's columns, and return what differs.

        Args:
            dir1: A folder that `SingleSave` was given, ours or msprobe's.
            dir2: The other.
            output_path: Where the tables are written.
            num_processes: No effect.

        Raises:
            DumpError: A folder has nothing that was saved.
            OSError: A table cannot be written.
        """
        found = compare_stages(Path(dir1), Path(dir2))
        write_tables(found, Path(output_path))
        return found
