"""Prints which share of lines and branches of each folder the tests have seen run; needs the data of `coverage`."""

from __future__ import annotations

import collections
from pathlib import Path, PurePath

import coverage

PACKAGE = Path(__file__).parents[1] / "trainermon"


def folder_of(path: str) -> str:
    """Return the folder of the package that a file belongs to, as far down as the second level."""
    inside = PurePath(path).relative_to(PACKAGE)
    return "/".join(inside.parts[:-1][:2]) or "(face)"


def main() -> None:
    """Print a line for each folder, and one for all."""
    measured = coverage.Coverage()
    measured.load()
    seen: collections.Counter[str] = collections.Counter()
    there: collections.Counter[str] = collections.Counter()
    for path in sorted(measured.get_data().measured_files()):
        numbers = measured._analyze(path).numbers
        for folder in (folder_of(path), "all"):
            seen[folder] += numbers.n_executed + numbers.n_executed_branches
            there[folder] += numbers.n_statements + numbers.n_branches
    for folder in (*sorted(there.keys() - {"all"}), "all"):
        print(f"{folder:28} {100 * seen[folder] / max(1, there[folder]):5.1f} %  of {there[folder]:6,}")


if __name__ == "__main__":
    main()
