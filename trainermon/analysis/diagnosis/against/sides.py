"""One side of a comparison over steps: a run with its stored rows and dumps, or dumps alone, also msprobe's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainermon.analysis.compare.merging.places import (
    DumpLocation,
    PlacePair,
    find_places,
    hollow_places,
    lone_places,
    pair_places,
)
from trainermon.analysis.compare.noise import ROUNDOFF
from trainermon.analysis.diagnosis.domains import read_places
from trainermon.analysis.diagnosis.evidence import modules_of, run_id_of
from trainermon.core.errors import DumpError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSide:
    """What there is of one side of a comparison of two runs.

    Attributes:
        path: The directory that the user named.
        run_id: The run's name.
        is_run: Whether it is a run's directory, which may have stored rows; else it has dumps only.
        dumps: Those of the last attempt of each step and rank.
        places: The ranks' positions on the axes (`tp`, `pp` …), by rank.
        modules: The modules' names in definition order, if the run tells.
        product_unit: The unit roundoff of products of float32 tensors, as the run was told to take them.
        accelerator: The type of device that it trains on: `cuda`, `npu` …; "": none, or not told.
        layout: How the run is split, if it tells: the framework, and the size of each axis.
    """

    path: Path
    run_id: str
    is_run: bool
    dumps: tuple[DumpLocation, ...]
    places: Mapping[int, Mapping[str, int]]
    modules: tuple[str, ...]
    product_unit: float = ROUNDOFF["float32"]
    accelerator: str = ""
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def open_side(path: Path) -> RunSide:
    """Return a `RunSide` of what is at `path`: the directory of a run, or dumps at or below it.

    Raises:
        DumpError: there is neither.
    """
    if not path.is_dir():
        raise DumpError(f"{path} is not a directory: expected a run (<output>/<run id>), or dumps")
    is_run = (path / "run.json").exists() or (path / "nodes").is_dir()
    dumps: tuple[DumpLocation, ...] = ()
    with contextlib.suppress(DumpError) if is_run else contextlib.nullcontext():
        dumps = tuple(find_places(path))
    return RunSide(
        path=path,
        run_id=run_id_of(path),
        is_run=is_run,
        dumps=dumps,
        places=read_places(path),
        modules=modules_of(path),
        product_unit=_product_unit(path),
        accelerator=_accelerator(path),
        layout=_layout(path),
    )


_PRECISIONS = {"high": ROUNDOFF["tf32"], "medium": ROUNDOFF["bfloat16"]}  # of torch.set_float32_matmul_precision
_SIZES = ("world_size", "dp_size", "tp_size", "pp_size", "cp_size", "ep_size")
_FIRST_RANK = "ranks/rank00000.json"


def _product_unit(run_dir: Path) -> float:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        told = json.loads((run_dir / _FIRST_RANK).read_bytes())["environment"]["torch"]
        return _PRECISIONS.get(told.get("float32_matmul_precision"), ROUNDOFF["float32"])
    return ROUNDOFF["float32"]


def _accelerator(run_dir: Path) -> str:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads((run_dir / _FIRST_RANK).read_bytes())["accelerator"]["type"])
    return ""


def _layout(run_dir: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        told = json.loads((run_dir / _FIRST_RANK).read_bytes())
        return {"framework": told["framework"]} | {name: told["coordinates"][name] for name in _SIZES}
    return {}


def common_product_unit(ours: RunSide, theirs: RunSide) -> float:
    """Return the unit roundoff of products of float32 tensors, the coarser of two runs.

    Another type of device may take them in TF32 or HF32.
    """
    other = ROUNDOFF["tf32"] if ours.accelerator != theirs.accelerator or ours.accelerator == "npu" else 0.0
    return max(ours.product_unit, theirs.product_unit, other)


def pair_dumps(ours: RunSide, theirs: RunSide, step: int | None) -> dict[int | None, list[PlacePair]]:
    """Return, by step and in order, the pairs of dumps that belong together; with `step`, those of that step only.

    Where one side is dumps of a single step, that step stands for whichever the other side has.
    """
    targets = [place for place in ours.dumps if step is None or place.step in (None, step)]
    goldens = list(theirs.dumps)
    if not targets or not goldens:
        return {}
    if ours.is_run and theirs.is_run:
        steps = {place.step for place in goldens} & {place.step for place in targets}
        targets, goldens = ([place for place in side if place.step in steps] for side in (targets, goldens))
    found: dict[int | None, list[PlacePair]] = {}
    with contextlib.suppress(DumpError):  # nothing belongs together
        for pair in pair_places(targets, goldens) if targets and goldens else ():
            found.setdefault(pair.target.step, []).append(pair)
    return dict(sorted(found.items(), key=lambda one: one[0] if one[0] is not None else -1))


def lone_dumps(
    ours: RunSide, theirs: RunSide, step: int | None, pairs: Mapping[int | None, Sequence[PlacePair]]
) -> list[str]:
    """Return the places of dumps, and of ranks without one, that are in none of `pairs`; with `step`, of that step.

    Two runs need not have dumped the same: there are none of these.
    """
    if ours.is_run and theirs.is_run:
        return []
    paired = [pair for of_step in pairs.values() for pair in of_step]
    lone = lone_places(paired, ours.dumps, theirs.dumps) if ours.dumps and theirs.dumps else []
    for side in (ours, theirs):
        lone += hollow_places(side.path, {(place.step, place.rank) for place in side.dumps})
    places = [one.place for one in lone if step in (None, one.place.step)]
    return list(dict.fromkeys(place.label or str(place.directory) for place in places))
