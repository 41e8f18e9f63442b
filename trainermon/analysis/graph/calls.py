"""Reads the calls of one dump for its graph: which call each entry is, within which other, in which micro step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainermon.analysis.graph.entries import PlacedEntry, read_entries
from trainermon.analysis.graph.values import GraphValue, ValueUse, values_of
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import split_key, well_formed
from trainermon.dump.files.records import (
    BACKWARD,
    CONSTRUCT_FILE,
    EXTRA,
    FORWARD,
    INFO_FILE,
    PARAMETERS_GRAD,
    PARTIAL_FILE,
)

AFTER = -1
"""The micro step of calls after the last backward: clipping, the optimizer."""
_MODULES = ("Module.", "Cell.")


@dataclass(slots=True, kw_only=True)
class GraphCall:
    """One entry of a dump.

    Attributes:
        key: Its key.
        module: Path of the module, or name of the function.
        class_name: The module's class, or the function's prefix (`Functional`, `Tensor`, `Distributed`).
        direction: `forward`, `backward` or `parameters_grad`.
        number: Which call of that name, from 0.
        began: Sorts the calls within one call as they ran.
        micro_step: From 0; `AFTER`; None until it is known.
        parent: Key of the call that it runs in; None: none.
        values: Its tensors.
        start: Where its text begins in the file, in bytes.
        length: How many bytes it has.
    """

    key: str
    module: str
    class_name: str
    direction: str
    number: int
    began: tuple[int, int]
    micro_step: int | None
    parent: str | None
    values: list[GraphValue]
    start: int
    length: int

    @property
    def is_module(self) -> bool:
        """Whether a module was called, and not a function."""
        return self.key.startswith(_MODULES)


def read_calls(directory: Path) -> tuple[dict[str, GraphCall], str]:
    """Return the calls of the dump in `directory` by key, in the order of its file; and the class of the model.

    That is "model" where the dump does not tell.

    Raises:
        DumpError: There is no dump, or it is damaged.
    """
    with well_formed(directory):
        parents, root = _construct(directory)
        calls = {}
        for position, entry in enumerate(read_entries(directory)):
            calls[entry.key] = _call(entry, position, parents.get(entry.key))
        settle_calls(calls)
    return calls, root


def settle_calls(calls: Mapping[str, GraphCall]) -> None:
    """Find the parents and micro steps of `calls` that are not written."""
    _find_parents(calls)
    _number_micro_steps(calls)


def _construct(directory: Path) -> tuple[Mapping[str, Any], str]:
    """Return the parents by key, and the class of the model."""
    if not (directory / CONSTRUCT_FILE).is_file() and (directory / PARTIAL_FILE).is_file():
        return _partial_construct(directory / PARTIAL_FILE)
    parents = _json(directory / CONSTRUCT_FILE)
    return parents, _root_class(_json(directory / INFO_FILE).get("root", {}))


def _partial_construct(path: Path) -> tuple[Mapping[str, Any], str]:
    from trainermon.dump.files.reader import load_partial

    raw = load_partial(path)
    return raw.construct, _root_class(raw.root)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DumpError(f"{path} is not JSON ({error}): the dump is damaged, or still being written") from error
    return found if isinstance(found, dict) else {}


def _root_class(root: Mapping[str, Any]) -> str:
    return next((split_key(key)[1] for key in root), "model")


def _call(entry: PlacedEntry, position: int, parent: Any) -> GraphCall:
    key, value, start, length = entry
    module, class_name, direction, number = split_key(key)
    extra = value.get(EXTRA) or {}
    values = values_of(value, direction)
    known = number if direction == PARAMETERS_GRAD else extra.get("micro_step")
    return GraphCall(
        key=key,
        module=module,
        class_name=class_name,
        direction=direction,
        number=number,
        began=(_beginning(direction, extra.get("order"), values), position),
        micro_step=known,
        parent=parent[0] if isinstance(parent, list) else parent,
        values=values,
        start=start,
        length=length,
    )


def _beginning(direction: str, order: int | None, values: list[GraphValue]) -> int:
    """Return what sorts a call among its neighbours: a backward begins when it is given its gradient."""
    if direction != BACKWARD:
        return order or 0
    given = [one.identity for one in values if one.use is ValueUse.TAKEN and isinstance(one.identity, int)]
    return max(given, default=order or 0)


def _find_parents(calls: Mapping[str, GraphCall]) -> None:
    """Find parents that are not written: of a backward by its forward, of a parameter's gradients by the backward."""
    last = {(call.module, call.micro_step): call.key for call in calls.values() if call.direction == BACKWARD}
    for call in calls.values():
        if call.direction == PARAMETERS_GRAD:
            by_number = f"Module.{call.module}.{call.class_name}.{BACKWARD}.{call.number}"
            call.parent = last.get((call.module, call.micro_step)) or by_number
        elif call.parent is None and call.direction == BACKWARD:
            forward = calls.get(partner_key(call.key, FORWARD))
            call.parent = partner_key(forward.parent, BACKWARD) if forward is not None and forward.parent else None
        if call.parent not in calls or call.parent == call.key:
            call.parent = None


def partner_key(key: str, direction: str) -> str:
    """Return the key of the same call in `direction`, forward or backward.

    >>> partner_key("Module.fc.Linear.forward.2", "backward"), partner_key("Torch.relu.0.forward", "backward")
    ('Module.fc.Linear.backward.2', 'Torch.relu.0.backward')
    """
    other = FORWARD if direction == BACKWARD else BACKWARD
    head, _, last = key.rpartition(".")
    if last == other:
        return f"{head}.{direction}"
    stem, _, word = head.rpartition(".")
    return f"{stem}.{direction}.{last}" if word == other else key


def _number_micro_steps(calls: Mapping[str, GraphCall]) -> None:
    """Give each outermost call its micro step: what its dump says, else a forward after a backward begins another."""
    outermost = sorted((call for call in calls.values() if call.parent is None), key=lambda call: call.began)
    numbered = [call for call in outermost if call.micro_step is not None and call.direction != PARAMETERS_GRAD]
    if numbered:
        _fill_from_neighbours(outermost)
        return
    current, had_backward = 0, False
    last_backward = max((at for at, call in enumerate(outermost) if call.direction == BACKWARD), default=len(outermost))
    for at, call in enumerate(outermost):
        if call.direction == FORWARD and had_backward:
            current, had_backward = current + 1, False
        had_backward = had_backward or call.direction == BACKWARD
        call.micro_step = AFTER if at > last_backward and call.direction == FORWARD else current


def _fill_from_neighbours(outermost: list[GraphCall]) -> None:
    following: list[int | None] = []
    later: int | None = None
    for call in reversed(outermost):
        later = call.micro_step if call.micro_step is not None and call.is_module else later
        following.append(later)
    following.reverse()
    current, had_backward = 0, False
    partners = {call.key: call for call in outermost}
    for call, later in zip(outermost, following, strict=True):
        if call.micro_step is None:
            forward = partners.get(partner_key(call.key, FORWARD)) if call.direction == BACKWARD else None
            if forward is not None:
                call.micro_step = forward.micro_step
            elif had_backward and call.direction == FORWARD:
                call.micro_step = AFTER if later is None else later
            else:
                call.micro_step = current
        elif call.is_module:
            had_backward = False
            current = call.micro_step
        had_backward = had_backward or call.direction == BACKWARD
