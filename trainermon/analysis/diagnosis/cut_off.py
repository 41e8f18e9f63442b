"""Where a bad value of the forward arose that reached no loss, but made a gradient NaN, by the operations of a replay.

A product with a gradient of zero is NaN where the other factor is infinite, as on rows that are cut off. The rows of
modules show such a value only if a module took or gave it.
"""

from __future__ import annotations

import dataclasses

from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.origin import LOSS, MODEL, Origin
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, Dump


def followed_to_forward(dump: Dump, origin: Origin) -> Origin:
    """Return as origin the operation of the forward whose bad value the named backward was spoilt by.

    That is so if no operation of the backward made its bad gradient from finite values: then one that the forward had
    left did. `origin` itself where an operation of the backward did, no operation is known to be bad, the loss gave the
    gradient, or a hook of the script stands on it.
    """
    if origin.phase is not FaultPhase.BACKWARD or origin.module == LOSS or origin.tensor.hooked:
        return origin
    known = [found for found in dump.info.operations if found.micro_step == origin.micro_step and not found.is_mask]
    made = next((found for found in known if found.direction == FORWARD), None)
    # a backward that only goes on with what it was given has no verdict
    if made is None or any(found.direction == BACKWARD for found in known):
        return origin
    module, class_name, _, call = split_key(made.call) if made.call else (MODEL, "", "", 0)
    entry = next((entry for entry in (*dump.entries, *dump.root) if entry.key == made.call), None)
    reason = (
        f"{made.operation} in its forward made a non-finite value from finite ones; it reached no loss, but in the"
        f" backward of {origin.module} it made a gradient NaN"
    )
    return dataclasses.replace(
        origin,
        phase=FaultPhase.FORWARD,
        module=module,
        class_name=class_name,
        reason=reason,
        order=origin.order if entry is None else entry.order or 0,
        key=made.call,
        call=call,
        stage=made.stage,
        source=made.source,
        candidates=(),
    )
