"""One launch of a worker per number of ranks, with exactly the variants that the chosen tests ask for."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks


def jobs(variants, quick):
    """Return (size, name) of every variant at every size of `quick`; what `quick` does not name is slow."""
    return [
        pytest.param(size, name, marks=() if name in quick[size] else pytest.mark.slow, id=f"{name}-{size}")
        for size in quick
        for name in variants
    ]


class Launches:
    """Starts all variants of a size at once, the first time that one of them is asked for.

    Args:
        worker: The script that each rank runs, with a folder and the names of variants as arguments.
        request: The request of a fixture in the test module: its session knows which tests were chosen.
        folders: Where each launch gets a folder.
    """

    def __init__(self, worker: Path, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        items = [item for item in request.session.items if item.path == request.path]
        parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
        self._chosen = [(p["size"], p["name"]) for p in parameters if "size" in p]
        self._worker, self._folders = worker, folders
        self._launched: dict[int, Path] = {}

    def __call__(self, size: int) -> Path:
        """Return the folder in which the ranks of the launch of `size` left what they found."""
        if size not in self._launched:
            folder = self._launched[size] = self._folders.mktemp(f"{self._worker.parent.name}{size}")
            places: Any = {"TRAINERMON_SPOOL": f"{folder}/spool", "TRAINERMON_OUTPUT": f"{folder}/output"}
            names = dict.fromkeys(name for chosen, name in self._chosen if chosen == size)
            run_ranks(self._worker, str(folder), *names, world_size=size, timeout_s=900, **places)
        return self._launched[size]
