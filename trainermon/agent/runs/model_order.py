"""The order of the model's layers, which a segment does not keep: its rows are sorted by name."""

from __future__ import annotations

import json
from pathlib import Path

from trainermon.core.journal import Header
from trainermon.core.values import SeriesKey

_LATER = {"weight": 0}  # of what stands in one module, as the layers of torch declare it: the weight, then the rest


class ModelOrder:
    """Places series as the rank's own table does, by the modules that each rank has named in `ranks/rank00000.json`.

    Args:
        run_dir: The run directory; each rank's file is read once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._modules: dict[int, dict[str, int]] = {}

    def __call__(self, header: Header, key: SeriesKey) -> int:
        """Return where the series stands; what belongs to no module that is known comes first."""
        rank = header.coordinates.rank
        if rank not in self._modules:
            self._modules[rank] = _modules_of(self._run_dir / "ranks" / f"rank{rank:05d}.json")
        modules = self._modules[rank]
        name = key.name
        while name and name not in modules:
            name = name.rpartition(".")[0]
        own = key.name[len(name) :].lstrip(".")
        return 2 * modules.get(name, 0) + _LATER.get(own, 1 if own else 0)


def _modules_of(path: Path) -> dict[str, int]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["modules"]
        return {str(name): place for place, name in enumerate(names)}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
