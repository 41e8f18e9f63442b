"""Inputs and results of wrong calls as files, for whoever looks into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.accuracy.calls import RepeatableCall, plain
from trainermon.accuracy.judge import Status
from trainermon.analysis.check.backward import GradientChecker
from trainermon.analysis.check.checking import CallsCheck
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import is_spoiled, load_raw, parse_dump
from trainermon.dump.files.records import BACKWARD, FORWARD
from trainermon.replay.dumped_calls import DumpedCall, rebuild


def save_errors(check: CallsCheck, folder: Path) -> list[Path]:
    """Write what each wrong call took and gave, and what float64 gives, and return the paths.

    The names are msprobe's: `Functional.linear.0.forward.input.0.pt`, `….forward.output.device.0.pt` and
    `….forward.output.bench.0.pt`. A wrong backward adds the gradients of the results as `….backward.input.0.pt`, and
    those of the arguments, in their order, as `….backward.output.device.0.pt` and `….backward.output.bench.0.pt`; the
    gradient of a tensor that several calls take is the sum of what they give back. Cost: a run in float64 of each.

    Raises:
        DumpError: The folder cannot be written.
    """
    wrong = {call.key for call in check.of(Status.ERROR)}
    if not wrong:
        return []
    directory = Path(check.source)
    raw = load_raw(directory)
    damaged: dict[str, str] = {}
    entries = parse_dump(directory, raw, damaged).entries
    forwards = [one for one in entries if one.direction == FORWARD and not is_spoiled(one.key, damaged)]
    gradients = GradientChecker(directory, raw.data, forwards)
    paths = []
    for entry in forwards:
        stem = entry.key.removesuffix(f".{FORWARD}")
        is_backward_wrong = f"{stem}.{BACKWARD}" in wrong
        if entry.key not in wrong and not is_backward_wrong:
            continue
        parts: dict[str, Sequence[object]] = {}
        with contextlib.suppress(DumpError):  # it was wrong with random inputs: the seed in its reason makes them again
            parts |= _forward_parts(rebuild(directory, raw.data, entry))
            parts |= _backward_parts(gradients, stem) if is_backward_wrong else {}
        for part, leaves in parts.items():
            paths += _save(folder, f"{stem}.{part}", leaves)
    return paths


def _forward_parts(dumped: DumpedCall) -> dict[str, Sequence[object]]:
    return {
        f"{FORWARD}.input": dumped.call.tensors,
        f"{FORWARD}.output.device": pytree.tree_leaves(dumped.result),
        f"{FORWARD}.output.bench": _golden(RepeatableCall(dumped.call)),
    }


def _backward_parts(gradients: GradientChecker, stem: str) -> dict[str, Sequence[object]]:
    pairs = gradients.compared(stem)
    return {
        f"{BACKWARD}.input": gradients.product(stem).backward.gradients,
        f"{BACKWARD}.output.device": [given for given, _ in pairs],
        f"{BACKWARD}.output.bench": [exact for _, exact in pairs],
    }


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
