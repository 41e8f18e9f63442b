"""Records the dumps, each once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.dump_pairs.cases import LEVELS, Variant, cases_of
from benchmarks.dump_pairs.faults import Truth, broken
from benchmarks.dump_pairs.models import prepare, step
from trainermon import PrecisionDebugger

_LABEL = "label.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What was done to a dump."""

    truth: Truth
    mapping: dict[str, str]


def record(families: Sequence[str], folder: Path) -> None:
    """Record what is missing in `folder`, as tensors, at every level."""
    for family in families:
        variants = {each: None for case in cases_of(family) for each in (case.golden, case.target)}
        for variant in variants:
            for level in LEVELS:
                if not (folder_of(folder, family, variant, level) / _LABEL).exists():
                    _record(folder, family, variant, level)


def folder_of(folder: Path, family: str, variant: Variant, level: str) -> Path:
    """Return where a dump is recorded."""
    return folder / family / variant.name / level


def label_of(folder: Path) -> Label:
    """Return what was done to the dump in a folder."""
    label = json.loads((folder / _LABEL).read_text())
    kind, module, name, sharing = label["truth"]
    return Label(truth=Truth(kind, module, name, tuple(sharing)), mapping=label["mapping"])


def _record(folder: Path, family: str, variant: Variant, level: str) -> None:
    place = folder_of(folder, family, variant, level)
    shutil.rmtree(place, ignore_errors=True)
    prepared = prepare(family, variant)
    debugger = PrecisionDebugger(dump_path=str(place), level=level, task="tensor", step=[0])
    run = partial(step, family, variant, prepared)
    with broken(prepared, variant.fault, run, partial(debugger.start, prepared.model)) as truth:
        run()
        debugger.stop()
    debugger.step()
    debugger.close()
    (place / _LABEL).write_text(json.dumps({"truth": truth, "mapping": prepared.mapping}))
