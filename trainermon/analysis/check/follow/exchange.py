"""A recorded call on its way to another host, and what that host gives for it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainermon.analysis.check.devices import result_on
from trainermon.analysis.check.follow.frames import Frame, FrameError
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import RawDump, parse_dump
from trainermon.dump.files.records import FORWARD, TENSOR_FOLDER, EntryRecord
from trainermon.dump.files.tensor_files import load_tensor, save_tensor
from trainermon.replay.dumped_calls import rebuild

CALL, RESULT, FAILED = "call", "result", "failed"
_SIDES = ("input_args", "input_kwargs", "parameters", "trainermon")


def call_frame(directory: Path, value: Mapping[str, Any], entry: EntryRecord, rank: int) -> Frame:
    """Return a forward call of the dump in `directory` as a frame; `value` is what dump.json has of it.

    Raises:
        DumpError: A tensor was not dumped, or cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, str] = {}

    def sent(form: Any) -> Any:
        """Return the form with the numbers of tensors in place of the names of their files."""
        if isinstance(form, list):
            return [sent(item) for item in form]
        if not isinstance(form, dict):
            return form
        name = form.get("data_name")
        if not ("dtype" in form and "shape" in form and name):
            return {key: sent(item) for key, item in form.items()}
        if name not in numbers:
            try:
                tensors[name] = load_tensor(directory / TENSOR_FOLDER / Path(name).name, str(form["dtype"]))
            except Exception as error:  # torch.load raises anything on a damaged file
                raise DumpError(f"{Path(name).name} cannot be read") from error
            numbers[name] = f"{len(numbers)}.pt"
        return {"dtype": form["dtype"], "shape": form["shape"], "type": form.get("type"), "data_name": numbers[name]}

    sides = {side: sent(value[side]) for side in _SIDES if side in value}
    head = {"kind": CALL, "key": entry.key, "entry": sides, "autocast": entry.autocast, "rank": rank}
    return Frame(head, tuple(tensors.values()))


def answer_to(frame: Frame, device: str) -> Frame:
    """Run the call in a frame on `device`, and return what it gives; or why it cannot be run.

    The function is looked up among those that a dump may name, and a call that would make far more than it takes is
    refused.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="trainermon-") as name:
            result = _result(Path(name), frame, device)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return Frame({"kind": RESULT}, tuple(leaf.detach().to("cpu") for leaf in found))
    except Exception as error:  # noqa: BLE001  # whatever a call from elsewhere raises here: this host goes on
        why = (str(error).splitlines() or [""])[0][:200]
        return Frame({"kind": FAILED, "reason": f"{type(error).__name__}: {why}"})


def result_like(recorded: Any, tensors: tuple[Tensor, ...]) -> Any:
    """Return `recorded` with these tensors in place of its own, in order.

    Raises:
        FrameError: It has another number of them.
    """
    leaves, spec = pytree.tree_flatten(recorded)
    number = sum(isinstance(leaf, Tensor) for leaf in leaves)
    if number != len(tensors):
        raise FrameError(f"the other host gives {len(tensors)} tensors, expected {number}")
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _result(folder: Path, frame: Frame, device: str) -> object:
    key, value, autocast = frame.head.get("key"), frame.head.get("entry"), frame.head.get("autocast", "")
    if not (isinstance(key, str) and isinstance(value, dict) and isinstance(autocast, str)):
        raise FrameError("the head describes no call")
    (folder / TENSOR_FOLDER).mkdir()
    for number, tensor in enumerate(frame.tensors):
        save_tensor(tensor, folder / TENSOR_FOLDER / f"{number}.pt")
    data = {key: {side: value[side] for side in _SIDES if side in value}}
    entries = parse_dump(folder, RawDump(data=data)).entries
    if len(entries) != 1 or entries[0].direction != FORWARD:
        raise FrameError("the head describes no forward call")
    with torch.no_grad():
        return result_on(device, rebuild(folder, data, entries[0]).call, autocast)
