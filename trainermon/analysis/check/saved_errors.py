"""Inputs and results of wrong calls as files, for whoever looks into them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import RepeatableCall, plain
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.checking import CallsCheck
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import load_raw, parse_dump
from trainermon.dump.files.records import FORWARD
from trainermon.replay.dumped_calls import rebuild


def save_errors(check: CallsCheck, folder: Path) -> list[Path]:
    """Write what each wrong forward call took and gave, and what float64 gives, and return the paths.

    The names are msprobe's: `Functional.linear.0.forward.input.0.pt`, `….forward.output.device.0.pt` and
    `….forward.output.bench.0.pt`. Backward calls are left out. Cost: a run in float64 of each.

    Raises:
        DumpError: The folder cannot be written.
    """
    wrong = {call.key for call in check.of(Status.ERROR)}
    if not wrong:
        return []
    directory = Path(check.source)
    raw = load_raw(directory)
    paths = []
    for entry in parse_dump(directory, raw).entries:
        if entry.key in wrong and entry.direction == FORWARD:
            dumped = rebuild(directory, raw.data, entry)
            parts = {
                "input": dumped.call.tensors,
                "output.device": pytree.tree_leaves(dumped.result),
                "output.bench": _golden(RepeatableCall(dumped.call)),
            }
            for part, leaves in parts.items():
                paths += _save(folder, f"{entry.key}.{part}", leaves)
    return paths


def _golden(call: RepeatableCall) -> list[Tensor]:
    try:
        return call.run(torch.float64)
    except Exception:  # noqa: BLE001  # whatever a kernel raises; it was judged without, by its shape or number
        return []


def _save(folder: Path, name: str, leaves: Iterable[object]) -> list[Path]:
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                paths.append(folder / f"{name}.{number}.pt")
                torch.save(plain(leaf).contiguous(), paths[-1])
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a disk that is full
        raise DumpError(f"cannot write into {folder}: {error}") from error
    return paths
