"""The calls of several ranks as those of one model, as `trainermon compare` puts them together."""

from __future__ import annotations

from trainermon.analysis.compare.items import MODULE, OUTPUT, PARAMETERS, DumpCall, DumpRow, DumpRows
from trainermon.analysis.graph.calls import GraphCall, settle_calls
from trainermon.analysis.graph.values import GraphValue, ValueUse, value_of
from trainermon.dump.files.records import BACKWARD, PARAMETERS_GRAD


def calls_of_rows(rows: DumpRows) -> dict[str, GraphCall]:
    """Return the calls of `rows` by key, in their order.

    What a tensor looks like stands for its identity: merged rows have no order. Micro steps begin where a forward
    follows a backward.
    """
    calls = {call.key: _call(call, position, rows.parents.get(call.key)) for position, call in enumerate(rows.calls)}
    settle_calls(calls)
    return calls


def _call(call: DumpCall, position: int, parent: str | None) -> GraphCall:
    path, _, name = call.name.rpartition(".")
    is_module = call.family == MODULE
    is_gradient = call.direction == PARAMETERS_GRAD
    return GraphCall(
        key=call.key,
        module=path if is_module else call.name,
        class_name=name if is_module else call.family,
        direction=call.direction,
        number=call.number,
        began=(0, position),
        micro_step=call.number if is_gradient else None,
        parent=parent,
        values=[_value(item, call.direction) for item in call.items if _is_shown(item, call.direction)],
        start=0,
        length=0,
    )


def _is_shown(item: DumpRow, direction: str) -> bool:
    return item.is_tensor and item.dtype is not None and (direction != BACKWARD or item.state != PARAMETERS)


def _value(item: DumpRow, direction: str) -> GraphValue:
    form = {
        "dtype": item.dtype,
        "shape": list(item.shape or ()),
        "Max": item.max,
        "Min": item.min,
        "Mean": item.mean,
        "Norm": item.norm,
        "nans": item.nans,
        "infs": item.infs,
    }
    return value_of(_use(item, direction), item.place, form)


def _use(item: DumpRow, direction: str) -> ValueUse:
    if direction == PARAMETERS_GRAD or item.state == OUTPUT:
        return ValueUse.GIVEN
    return ValueUse.HELD if item.state == PARAMETERS else ValueUse.TAKEN
