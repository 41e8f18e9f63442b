"""What modules of a pipeline stage are called in the whole model, where its dump does not tell.

Each stage counts its layers from 0. So those of a later stage go on where the stage before ends.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from trainermon.analysis.compare.items import MODULE, DumpRows
from trainermon.analysis.compare.merging.places import DumpShard

_Layers = dict[str, dict[int, set[int]]]
"""By the path of what holds them, the numbers of the layers that each stage has."""


def numbered_on(parts: Sequence[DumpShard], rows: Sequence[DumpRows]) -> tuple[list[DumpShard], tuple[str, ...]]:
    """Return the parts with names of the whole model in their layouts, and the paths of what was numbered for that.

    Only of parts that do not tell these names, and where each stage that has such layers counts them from 0. `rows` are
    the calls of each part.
    """
    layers: _Layers = defaultdict(lambda: defaultdict(set))
    for part, own in zip(parts, rows, strict=True):
        for path, number in _layers(own):
            layers[path][_stage(part)].add(number)
    untold = {_stage(part) for part in parts if not part.is_named}
    local = {
        path: stages
        for path, stages in layers.items()
        if len(stages) > 1 and untold & stages.keys() and all(min(numbers) == 0 for numbers in stages.values())
    }
    named = [part if part.is_named else _named(part, local) for part in parts]
    return named, tuple(path or "the model" for path in local)


def _named(part: DumpShard, layers: _Layers) -> DumpShard:
    stage = _stage(part)
    renamed: dict[str, str] = {}
    for path, stages in layers.items():
        before = sum(max(numbers) + 1 for other, numbers in stages.items() if other < stage)
        prefix = f"{path}." if path else ""
        renamed |= {f"{prefix}{number}": f"{prefix}{number + before}" for number in stages[stage] if before}
    return part._replace(layout=dataclasses.replace(part.layout, renamed=renamed))


def _layers(rows: DumpRows) -> Iterator[tuple[str, int]]:
    """Yield the outermost numbered module around each call of a module: the path of what holds it, and its number."""
    for call in rows.calls:
        names = call.path.split(".") if call.family == MODULE else ()
        at = next((at for at, name in enumerate(names) if name.isdecimal()), None)
        if at is not None:
            yield ".".join(names[:at]), int(names[at])


def _stage(part: DumpShard) -> int:
    return part.layout.axes.get("pp", (0, 1))[0]
