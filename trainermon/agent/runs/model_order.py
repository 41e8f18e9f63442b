"""The order of the model's layers, which a segment does not keep: its rows are sorted by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from trainermon.core.journal import Header
from trainermon.core.values import SeriesKey


class _NamedPlaces(NamedTuple):
    """Where parameters and modules stand in the model, by name."""

    parameters: dict[str, int]
    modules: dict[str, int]


class ModelOrder:
    """Places series as the rank's own table does, by the names that each rank has listed in `ranks/rank00000.json`.

    Args:
        run_dir: The run directory; each rank's file is read once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._places: dict[int, _NamedPlaces] = {}

    def __call__(self, header: Header, key: SeriesKey) -> int:
        """Return where the series stands among those of its kind.

        What is neither a known parameter nor within a known module comes first. In runs whose ranks have listed no
        parameters these stand at their module, the weight before the others.
        """
        rank = header.coordinates.rank
        if rank not in self._places:
            self._places[rank] = _places_in(self._run_dir / "ranks" / f"rank{rank:05d}.json")
        parameters, modules = self._places[rank]
        if key.name in parameters:
            return parameters[key.name]
        name = key.name
        while name and name not in modules:
            name = name.rpartition(".")[0]
        own = key.name[len(name) :].lstrip(".")
        return 2 * modules.get(name, 0) + (own not in ("", "weight"))


def _places_in(path: Path) -> _NamedPlaces:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return _NamedPlaces(_numbered(about.get("parameter_names", ())), _numbered(about["modules"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return _NamedPlaces({}, {})


def _numbered(names: list[str]) -> dict[str, int]:
    return {str(name): place for place, name in enumerate(names)}
