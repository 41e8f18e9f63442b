"""Where the first non-finite value of one rank's step arose, from a dump of all its module calls.

Forward: the first call in execution order whose output is not finite although its inputs are; children end before their
parents, so it is the innermost one. Backward: the first gradient that is not finite, and the call that made it from
finite ones. Infinities on purpose (attention masks) and values that never went anywhere are left out of account.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trainermon.analysis.diagnosis.findings import BadTensor, FaultPhase, PathLink
from trainermon.analysis.diagnosis.order import receives
from trainermon.dump.files.records import BACKWARD, FORWARD, PARAMETERS_GRAD, Dump, EntryRecord, TensorRecord

MODEL = "(model)"
INPUT = "(input)"
LOSS = "(loss)"
OPTIMIZER = "(optimizer)"
MAX_LINKS = 12
# A script that hooks more of its gradients than this watches them all, and the hooks point at nothing.
MAX_HOOKED_SHARE = 0.25
_OTHER_SIDE = {"input": "output", "output": "input"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the first NaN or Inf of one rank's dump arose.

    Attributes:
        phase: In which part of the step.
        module: The module's name; `(input)`, `(loss)` outside of the model.
        class_name: Its class.
        tensor: The bad tensor's statistics.
        reason: Why it is this one, in a sentence.
        order: Its position in the sequence of the step.
        key: The entry of the dump that shows it.
        call: Number of the module's call.
        micro_step: Number of the forward and backward within the step; None: not known.
        stage: The root (virtual pipeline stage) below which it arose.
        source: The line of the user's code that called the module.
        candidates: Modules that cannot be told apart from it.
        chain: The calls through which the bad value went from here to the loss.
    """

    phase: FaultPhase
    module: str
    class_name: str
    tensor: TensorRecord
    reason: str
    order: int
    key: str = ""
    call: int = 0
    micro_step: int | None = None
    stage: int = 0
    source: str = ""
    candidates: tuple[str, ...] = ()
    chain: tuple[PathLink, ...] = ()


def find_origin(dump: Dump) -> Origin | None:
    """Return the `Origin` of the first non-finite value of `dump`; None if the step was sound."""
    only_functions = dump.level == "L1"
    if not dump.nonfinite and not (only_functions and any(_bad(entry.outputs) for entry in dump.entries)):
        return None
    graph = _DumpCalls(dump)
    return _forward_origin(graph) or _parameter_origin(graph) or _made_before(graph, _backward_origin(graph))


def find_hidden_origin(dump: Dump, outer: Origin, seen: Dump) -> Origin | None:
    """Return the `Origin` in `dump` of a bad value within `outer`'s module that went to the rank of `seen`, or None.

    An expert's output may go to other ranks only: here it then looks as if it had gone nowhere. What is not finite in
    both dumps, as scores under a mask, is no such value.
    """
    calls = _DumpCalls(dump)
    common = {entry.key for entry in seen.entries if entry.direction == FORWARD and _bad(entry.outputs)}
    for entry in calls.forwards:
        is_inside = entry.module.startswith(f"{outer.module}.") and entry.micro_step == outer.micro_step
        if is_inside and _bad(entry.outputs) and entry.key not in common and (entry.order or 0) < outer.order:
            return _explained(calls, entry)
    return None


def bad_parameters(dump: Dump) -> list[tuple[str, TensorRecord]]:
    """Return (full name, record) of every parameter that was not finite in a forward, once each, in execution order."""
    found: dict[str, TensorRecord] = {}
    for entry in (*dump.entries, *dump.root):
        for record in entry.parameters if entry.direction == FORWARD else ():
            if record.nonfinite:
                name = record.slot.removeprefix("parameters.")
                found.setdefault(name if entry in dump.root else f"{entry.module}.{name}", record)
    return list(found.items())


def bad_tensor(record: TensorRecord) -> BadTensor:
    """Return a dumped tensor's slot, type, shape and counts, as a diagnosis shows them.

    Counts are -1 in msprobe's dumps.
    """
    return BadTensor(
        slot=record.slot,
        dtype=record.dtype.removeprefix("torch."),
        shape=record.shape,
        count=record.count,
        nans=-1 if record.nans is None else record.nans,
        infs=-1 if record.infs is None else record.infs,
        max=record.max,
        min=record.min,
    )


class _DumpCalls:
    """The entries of a dump, found by key, by parent, and by the tensors that they pass on."""

    def __init__(self, dump: Dump) -> None:
        forwards = [entry for entry in dump.entries if entry.direction == FORWARD]
        # what a buffer held before it was received into is no input
        self.forwards = [dataclasses.replace(entry, inputs=()) if receives(entry.key) else entry for entry in forwards]
        self.backwards = [entry for entry in dump.entries if entry.direction == BACKWARD]
        self.parameter_gradients = [entry for entry in dump.entries if entry.direction == PARAMETERS_GRAD]
        self.root_forwards = [entry for entry in dump.root if entry.direction == FORWARD]
        self.root_backwards = [entry for entry in dump.root if entry.direction == BACKWARD]
        self.by_key = {entry.key: entry for entry in dump.entries}
        self.root_names = {(entry.module, entry.class_name) for entry in dump.root}
        self.producers = _by_order((entry, entry.outputs) for entry in self.forwards)
        self.consumers = _by_order((entry, entry.inputs) for entry in self.forwards)

    def ancestors(self, entry: EntryRecord) -> list[EntryRecord]:
        """Return the enclosing calls, innermost first, without the root."""
        found: list[EntryRecord] = []
        while entry.parent is not None and entry.parent in self.by_key:
            entry = self.by_key[entry.parent]
            found.append(entry)
        return found

    def counterpart(self, entry: EntryRecord, direction: str) -> EntryRecord | None:
        """Return the entry of the same module and call in another direction."""
        stem = entry.key.removesuffix(f".{entry.direction}.{entry.call}")
        return self.by_key.get(f"{stem}.{direction}.{entry.call}")

    def root_of(self, entry: EntryRecord, roots: Sequence[EntryRecord]) -> EntryRecord | None:
        """Return the root's entry of the same micro step."""
        same = [root for root in roots if (root.micro_step, root.stage) == (entry.micro_step, entry.stage)]
        after = [root for root in same if (root.order or 0) >= (entry.order or 0)]
        return next(iter(after or same), None)

    def harmless(self, entry: EntryRecord) -> bool:
        """Return whether a forward's non-finite output went nowhere: what took it, or encloses it, is finite."""
        root = self.root_of(entry, self.root_forwards)
        enclosing = [*self.ancestors(entry), *([root] if root else [])]
        if any(not _bad(outer.outputs) for outer in enclosing):
            return True
        orders = [record.order for record in _bad(entry.outputs)]
        takers = [taker for order in orders if order is not None for taker in self.consumers.get(order, [])]
        return bool(takers) and not any(_bad(taker.outputs) for taker in takers)

    def origin(
        self,
        phase: FaultPhase,
        entry: EntryRecord,
        record: TensorRecord,
        reason: str,
        *,
        follow: EntryRecord | None = None,
    ) -> Origin:
        """Return an origin in a forward; its way is followed from `follow` on if that is not `entry`."""
        return Origin(
            phase=phase,
            module=MODEL if entry in self.root_forwards else entry.module,
            class_name=entry.class_name,
            tensor=record,
            reason=reason,
            order=(follow or entry).order or 0,
            key=entry.key,
            call=entry.call,
            micro_step=entry.micro_step,
            stage=entry.stage,
            source=_source(entry),
            chain=_forward_chain(self, entry, record, follow or entry),
        )


def _forward_origin(calls: _DumpCalls) -> Origin | None:
    first = next((entry for entry in calls.forwards if _bad(entry.outputs) and not calls.harmless(entry)), None)
    return _root_origin(calls) if first is None else _explained(calls, first)


def _explained(calls: _DumpCalls, first: EntryRecord) -> Origin:
    """Return where the non-finite output of `first` arose: there, or where its inputs came from."""
    seen = {first.key}
    while True:
        producer = _producer(calls, first)
        if producer is None or producer.key in seen:
            break
        first = producer
        seen.add(first.key)
    weights = _nonfinite(first.parameters)
    inputs = _bad(first.inputs)
    if weights:
        reason = f"its {weights[0].slot.removeprefix('parameters.')} was not finite when the forward began"
        return calls.origin(FaultPhase.PARAMETER, first, weights[0], reason)
    if not inputs:
        reason = "its output is not finite, its inputs are"
        return calls.origin(FaultPhase.FORWARD, first, _bad(first.outputs)[0], reason)
    return _origin_outside(calls, first, inputs[0])


def _producer(calls: _DumpCalls, entry: EntryRecord) -> EntryRecord | None:
    """Return the call that made a non-finite input of `entry`, if it was a module's call."""
    for record in _bad(entry.inputs):
        for producer in calls.producers.get(record.order or -1, []):
            if producer.key != entry.key and (producer.order or 0) < (entry.order or 0):
                return producer
    return None


def _origin_outside(calls: _DumpCalls, entry: EntryRecord, record: TensorRecord) -> Origin:
    """Return as origin what encloses `entry`: one of its own operations gave `entry` a non-finite input."""
    root = calls.root_of(entry, calls.root_forwards)
    for enclosing in calls.ancestors(entry):
        if not _bad(enclosing.inputs):
            break
        entry, record = enclosing, _bad(enclosing.inputs)[0]
    parent = next(iter(calls.ancestors(entry)), None)
    if parent is None and root is not None and _bad(root.inputs):
        return _given_input(calls, root, _bad(root.inputs)[0], entry)
    outer = parent or root
    weights = _nonfinite(outer.parameters) if outer else []
    before = _last_before(calls, entry)
    place = f"between {before.module} and {entry.module}" if before else f"before {entry.module}"
    if outer is None:
        return calls.origin(FaultPhase.FORWARD, entry, record, "its input was not finite already")
    if weights:
        reason = f"its {weights[0].slot.removeprefix('parameters.')} was not finite when the forward began"
        return calls.origin(FaultPhase.PARAMETER, outer, weights[0], reason, follow=entry)
    reason = f"an operation of its own forward, {place}, made a non-finite value from finite ones"
    given = dataclasses.replace(record, slot=f"{record.slot} of {entry.module}")
    return calls.origin(FaultPhase.FORWARD, outer, given, reason, follow=entry)


def _last_before(calls: _DumpCalls, entry: EntryRecord) -> EntryRecord | None:
    """Return the sibling that ended last before `entry`."""
    before = [
        other
        for other in calls.forwards
        if other.parent == entry.parent
        and other.micro_step == entry.micro_step
        and (other.order or 0) < (entry.order or 0)
        and other.key != entry.key
    ]
    return before[-1] if before else None


def _given_input(calls: _DumpCalls, root: EntryRecord, record: TensorRecord, first: EntryRecord | None) -> Origin:
    reason = "the model was given a batch that is not finite"
    origin = calls.origin(FaultPhase.FORWARD, root, record, reason, follow=first)
    return dataclasses.replace(origin, module=INPUT, class_name="")


def _root_origin(calls: _DumpCalls) -> Origin | None:
    """Return the origin if only the model as a whole returned something non-finite."""
    root = next((entry for entry in calls.root_forwards if _bad(entry.outputs)), None)
    if root is None:
        return None
    weights = _nonfinite(root.parameters)
    if weights:
        return calls.origin(FaultPhase.PARAMETER, root, weights[0], f"its own {weights[0].slot} was not finite")
    if _bad(root.inputs):
        return _given_input(calls, root, _bad(root.inputs)[0], None)
    reason = "an operation of the model's own forward, behind its last module, made it from finite values"
    return calls.origin(FaultPhase.FORWARD, root, _bad(root.outputs)[0], reason)


def _parameter_origin(calls: _DumpCalls) -> Origin | None:
    """Return a parameter that is not finite although everything that was computed with it is."""
    for entry in (*calls.forwards, *calls.root_forwards):
        weights = _nonfinite(entry.parameters)
        if weights:
            reason = f"its {weights[0].slot.removeprefix('parameters.')} was not finite, though its output still was"
            return calls.origin(FaultPhase.PARAMETER, entry, weights[0], reason)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _PlacedGradient:
    """A gradient in one of its places; `of_output` tells whether it is that of an output of the call."""

    entry: EntryRecord
    record: TensorRecord
    of_output: bool


def _backward_origin(calls: _DumpCalls) -> Origin | None:
    places = [
        *(_PlacedGradient(entry, record, of_output=True) for entry in calls.backwards for record in entry.inputs),
        *(_PlacedGradient(entry, record, of_output=False) for entry in calls.backwards for record in entry.outputs),
        *(
            _PlacedGradient(entry, record, of_output=False)
            for entry in calls.parameter_gradients
            for record in entry.outputs
        ),
    ]
    roots = [
        _PlacedGradient(entry, record, of_output=True) for entry in calls.root_backwards for record in entry.inputs
    ]
    bad = [place for place in (*roots, *places) if place.record.nonfinite]
    if not bad:
        return None
    first_order = min(_order(place) for place in bad)
    first = [place for place in bad if _order(place) == first_order]
    hooked = _hooked(first, places)
    if hooked is not None:
        reason = (
            "a gradient hook of the script stands on this tensor, and gave or passed on a gradient that is not finite"
        )
        return _backward(calls, hooked, reason)
    outside = next((place for place in first if place in roots), None)
    if outside is not None:
        reason = "the gradient that the loss gave the model's output was not finite, though the output was"
        return dataclasses.replace(_backward(calls, outside, reason), module=LOSS, class_name="")
    return _made_by(calls, first)


def _made_before(calls: _DumpCalls, origin: Origin | None) -> Origin | None:
    """Return where the forward of the call that `origin` names got a bad value from; `origin` if it had none.

    On rows that are cut off such a value reaches no loss, but its product with a gradient of zero is NaN.
    """
    blamed = calls.by_key.get(origin.key) if origin is not None and origin.module != LOSS else None
    forward = calls.counterpart(blamed, FORWARD) if blamed is not None else None
    if origin is None or forward is None or not (_bad(forward.inputs) or _bad(forward.outputs)):
        return origin
    made = _explained(calls, forward)
    reason = f"{made.reason}; it reached no loss, but in the backward of {forward.module} it made a gradient NaN"
    return dataclasses.replace(made, reason=reason)


def _hooked(first: Sequence[_PlacedGradient], places: Sequence[_PlacedGradient]) -> _PlacedGradient | None:
    share = sum(place.record.hooked for place in places) / max(1, len(places))
    found = [place for place in first if place.record.hooked and place in places]
    if not found or share > MAX_HOOKED_SHARE:
        return None
    return _innermost([place for place in found if place.of_output] or found)


def _made_by(calls: _DumpCalls, first: Sequence[_PlacedGradient]) -> Origin:
    """Return as origin the innermost call that was given finite gradients and gave back this one."""
    returned = [place.entry for place in first if place.of_output]
    passed_on = {entry.key for entry in returned}
    # a module may return a parameter of its own, as layers do that leave adding the bias to others
    lent = {(entry.module, entry.micro_step) for entry in returned}
    makers = [place for place in first if not place.of_output and place.entry.key not in passed_on]
    makers = [
        place
        for place in makers
        if place.entry.direction == BACKWARD or (place.entry.module, place.entry.micro_step) not in lent
    ]
    if not makers:
        place = min(first, key=lambda place: place.entry.module.count("."))
        parent = calls.by_key.get(place.entry.parent or "")
        reason = f"the backward of an operation of its own, behind {place.entry.module}, made it from finite gradients"
        name, class_name = (parent.module, parent.class_name) if parent else (MODEL, "")
        return dataclasses.replace(_backward(calls, place, reason), module=name, class_name=class_name)
    enclosing = {outer.key for place in makers for outer in calls.ancestors(place.entry)}
    innermost = [place for place in makers if place.entry.key not in enclosing]
    blamed = _innermost(innermost)
    names = tuple(dict.fromkeys(place.entry.module for place in innermost if place.entry.module != blamed.entry.module))
    reason = "it was given finite gradients and gave back one that is not"
    if names:
        reason += f"; {', '.join(names)} took the same tensor and cannot be told apart from it"
    return dataclasses.replace(_backward(calls, blamed, reason), candidates=names)


def _innermost(places: Sequence[_PlacedGradient]) -> _PlacedGradient:
    return max(places, key=lambda place: place.entry.module.count("."))


def _backward(calls: _DumpCalls, place: _PlacedGradient, reason: str) -> Origin:
    record = _gradient_of(place.record)
    is_root = (place.entry.module, place.entry.class_name) in calls.root_names
    return Origin(
        phase=FaultPhase.BACKWARD,
        module=MODEL if is_root else place.entry.module,
        class_name=place.entry.class_name,
        tensor=record,
        reason=reason,
        order=place.record.order or 0,
        key=place.entry.key,
        call=place.entry.call,
        micro_step=place.entry.micro_step,
        stage=place.entry.stage,
        source=_source(calls.counterpart(place.entry, FORWARD)),
        chain=_backward_chain(calls, place.entry, record),
    )


def _gradient_of(record: TensorRecord) -> TensorRecord:
    """Return `record` with a slot that says whose gradient it is: a backward's inputs are those of the outputs."""
    side, dot, rest = record.slot.partition(".")
    return dataclasses.replace(record, slot=f"gradient of {_OTHER_SIDE.get(side, side)}{dot}{rest}")


def _backward_chain(calls: _DumpCalls, entry: EntryRecord, record: TensorRecord) -> tuple[PathLink, ...]:
    inner = calls.counterpart(entry, BACKWARD) or entry
    levels = {None, *(outer.key for outer in calls.ancestors(inner))}
    later = [
        _link(other, _gradient_of(_nonfinite(other.outputs)[0]))
        for other in sorted(calls.backwards, key=lambda other: (other.order or 0, -other.module.count(".")))
        if _nonfinite(other.outputs)
        and other.parent in levels
        and other.key != inner.key
        and other.micro_step == entry.micro_step
        and (other.order or 0) >= (record.order or 0)
    ]
    first = _link(entry, record)
    return _compressed([dataclasses.replace(first, module=MODEL) if entry in calls.root_backwards else first, *later])


def _forward_chain(
    calls: _DumpCalls, entry: EntryRecord, record: TensorRecord, start: EntryRecord
) -> tuple[PathLink, ...]:
    """Return the way to the model's output: what encloses the origin, and what comes after on the same levels."""
    levels = {None, *(outer.key for outer in calls.ancestors(start)), start.parent}
    later = [
        _link(other, _bad(other.outputs)[0])
        for other in calls.forwards
        if _bad(other.outputs)
        and other.parent in levels
        and other.key != entry.key
        and other.micro_step == start.micro_step
        and (other.order or 0) >= (start.order or 0)
    ]
    root = calls.root_of(start, calls.root_forwards)
    if root is not None and root.key != entry.key and _bad(root.outputs):
        later.append(dataclasses.replace(_link(root, _bad(root.outputs)[0]), module=MODEL))
    first = _link(entry, record)
    return _compressed([dataclasses.replace(first, module=MODEL) if entry in calls.root_forwards else first, *later])


def _compressed(links: list[PathLink]) -> tuple[PathLink, ...]:
    omitted = len(links) - MAX_LINKS
    if omitted <= 0:
        return tuple(links)
    head, tail = links[: MAX_LINKS // 2], links[-(MAX_LINKS // 2) :]
    return (*head, dataclasses.replace(tail[0], omitted=omitted), *tail[1:])


def _link(entry: EntryRecord, record: TensorRecord) -> PathLink:
    direction = FORWARD if entry.direction == FORWARD else BACKWARD
    return PathLink(
        module=entry.module,
        class_name=entry.class_name,
        direction=direction,
        call=entry.call,
        tensor=bad_tensor(record),
    )


def _source(entry: EntryRecord | None) -> str:
    return entry.stack[0].replace(", \n ", ": ") if entry is not None and entry.stack else ""


def _nonfinite(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    return [record for record in records if record.nonfinite]


def _bad(activations: Iterable[TensorRecord]) -> list[TensorRecord]:
    return [record for record in activations if record.nonfinite and not _mask_like(record)]


def _mask_like(record: TensorRecord) -> bool:
    """Return whether infinities stand beside nothing but zeros and negative numbers: an additive attention mask."""
    return not record.nans and bool(record.infs) and record.max is not None and record.max <= 0


def _order(place: _PlacedGradient) -> int:
    return place.record.order if place.record.order is not None else place.entry.order or 0


def _by_order(entries: Iterable[tuple[EntryRecord, Sequence[TensorRecord]]]) -> dict[int, list[EntryRecord]]:
    found: dict[int, list[EntryRecord]] = {}
    for entry, records in entries:
        for record in records:
            if record.order is not None and record.nonfinite:
                found.setdefault(record.order, []).append(entry)
    return found
