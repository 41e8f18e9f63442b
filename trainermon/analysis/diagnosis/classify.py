"""Why the first bad operation's result was not finite: what the replay found, else dumped tensors, else statistics.

Decides which operation of a dump belongs to the module that the diagnosis names, and what to collect where nothing
tells. Loads torch only to run a dumped call again.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Sequence

from trainermon.analysis.diagnosis.bounds import proven_cause
from trainermon.analysis.diagnosis.evidence import RankDump
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict, FaultPhase
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, MODEL
from trainermon.core.errors import DumpError
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import BACKWARD, FORWARD, Dump, EntryRecord
from trainermon.dump.files.verdicts import NonfiniteCause, OperationVerdict, Reproducibility

_MIX = "a dump of the same step with level mix and task tensor"
_REPLAY = "a replay of the step (replay.enabled, replay.classify)"

OUTSIDE_REPLAY = (
    "it may lie in what a replay does not contain: a backward through a backward (create_graph), hooks on gradients or"
    " on communication, what the script does between backward and step, a loss outside of the model"
)


def classified(diagnosis: Diagnosis, dumps: Sequence[RankDump]) -> Diagnosis:
    """Return `diagnosis` with the cause of the first bad operation (range, precision, kernel …) added from the dumps.

    So is whether the step gave the same again when it was replayed.
    """
    where = next((entry for entry in dumps if entry.rank == diagnosis.rank), None)
    is_replayed = diagnosis.phase not in (FaultPhase.REDUCTION, FaultPhase.BEFORE_STEP)
    if (
        where is None
        or not is_replayed
        or diagnosis.verdict not in (DiagnosisVerdict.LOCATED, DiagnosisVerdict.NOT_REPRODUCED)
    ):
        return diagnosis
    return dataclasses.replace(
        diagnosis,
        classification=_classification(diagnosis, where.dump),
        reproducibility=where.dump.info.reproducibility,
        reproducibility_reason=where.dump.info.reproducibility_reason,
    )


def _classification(diagnosis: Diagnosis, dump: Dump) -> OperationVerdict:
    if diagnosis.verdict is DiagnosisVerdict.NOT_REPRODUCED:
        return _not_again(dump)
    if diagnosis.phase in (FaultPhase.PARAMETER, FaultPhase.OPTIMIZER) or diagnosis.module == INPUT:
        what = "the batch" if diagnosis.module == INPUT else "the parameter"
        is_huge = diagnosis.tensor is not None and diagnosis.tensor.nans == diagnosis.tensor.infs == 0
        how = "far too large" if is_huge and diagnosis.phase is FaultPhase.PARAMETER else "not finite"
        reason = f"{what} was {how} before anything was computed with it"
        return OperationVerdict(operation="", cause=NonfiniteCause.INHERITED, reason=reason, evidence="the dump")
    return (
        _from_replay(diagnosis, dump)
        or _from_call(dump, _function_calls(diagnosis, dump))
        or _from_call(dump, _module_calls(diagnosis, dump))
        or _unknown(diagnosis, dump)
    )


def absent_of(dumps: Iterable[RankDump]) -> str:
    """Return in words what the steps of `dumps` had that no replay contains; "" if nothing is known."""
    return " and ".join(dict.fromkeys(words for entry in dumps for words in entry.dump.info.absent))


def suspects_device(dump: Dump) -> bool:
    """Return whether a replay says that the device, a kernel or a race is to blame: a forward came out otherwise.

    That a replay is clean says nothing of what it does not contain, as a backward through a backward.
    """
    return dump.info.lost_nonfinite or dump.info.reproducibility is Reproducibility.NOT_REPRODUCIBLE


def _not_again(dump: Dump) -> OperationVerdict:
    if dump.info.reproducibility in (Reproducibility.STATEFUL, Reproducibility.UNKNOWN) or not suspects_device(dump):
        why = dump.info.reproducibility_reason
        is_told = dump.info.reproducibility is not Reproducibility.REPRODUCIBLE and why
        absent = " and ".join(dump.info.absent)
        outside = f"the step had {absent}, which no replay contains" if absent else OUTSIDE_REPLAY
        reason = f"the replay does not show the fault: {why if is_told else outside}"
        return OperationVerdict(
            operation="", cause=NonfiniteCause.UNKNOWN, reason=reason, evidence="the replay", collect=_MIX
        )
    reason = "the same operations on the same inputs gave finite values: the device, a kernel, or a race"
    return OperationVerdict(operation="", cause=NonfiniteCause.KERNEL, reason=reason, evidence="the replay")


def _from_replay(diagnosis: Diagnosis, dump: Dump) -> OperationVerdict | None:
    """Return the first bad operation of the replay in the module that is named, or in a module inside of it."""
    direction = BACKWARD if diagnosis.phase is FaultPhase.BACKWARD else FORWARD
    found = [
        verdict
        for verdict in dump.info.operations
        if verdict.direction == direction and verdict.micro_step == diagnosis.micro_step
    ]
    names = {diagnosis.module, *diagnosis.candidates}
    exact = [verdict for verdict in found if _module_of(verdict) in names]
    inside = [verdict for verdict in found if _module_of(verdict).startswith(f"{diagnosis.module}.")]
    computed = [verdict for verdict in (*exact, *inside) if verdict.cause is not NonfiniteCause.INHERITED]
    first = next(iter([*computed, *exact, *inside]), None)
    return None if first is None else dataclasses.replace(first, reason=f"{first.reason}{_in_float64(dump)}")


def _in_float64(dump: Dump) -> str:
    if dump.info.float64_finite is None:
        return ""
    names = ", ".join(dump.info.float64_modules)
    return f"; with {names} in float64 the step is {'finite' if dump.info.float64_finite else 'not finite either'}"


def _module_of(verdict: OperationVerdict) -> str:
    return split_key(verdict.call)[0] if verdict.call else MODEL


def _function_calls(diagnosis: Diagnosis, dump: Dump) -> list[EntryRecord]:
    """Return the first bad call of a function in the module that is named, where the dump has functions."""
    if diagnosis.module == LOSS or diagnosis.phase is FaultPhase.BACKWARD:
        return []
    by_key = {entry.key: entry for entry in dump.entries}
    calls = [entry for entry in dump.entries if entry.direction == FORWARD and not entry.key.startswith("Module.")]
    if diagnosis.module and diagnosis.module != MODEL:
        calls = [entry for entry in calls if entry.module == diagnosis.module or _is_in(entry, diagnosis, by_key)]
    return [entry for entry in calls if _is_bad(entry)][:1]


def _is_in(entry: EntryRecord, diagnosis: Diagnosis, by_key: dict[str, EntryRecord]) -> bool:
    parent = entry.parent
    while parent is not None:
        if split_key(parent)[0] == diagnosis.module:
            return True
        outer = by_key.get(parent)
        parent = outer.parent if outer is not None else None
    return False


def _module_calls(diagnosis: Diagnosis, dump: Dump) -> list[EntryRecord]:
    return [
        entry
        for entry in dump.entries
        if (entry.module, entry.call, entry.direction) == (diagnosis.module, diagnosis.call, FORWARD)
        and entry.key.startswith("Module.")
        and diagnosis.phase is FaultPhase.FORWARD
    ][:1]


def _is_bad(entry: EntryRecord) -> bool:
    inputs = (*entry.inputs, *entry.parameters)
    return any(record.nonfinite for record in entry.outputs) and not any(record.nonfinite for record in inputs)


def _from_call(dump: Dump, entries: Sequence[EntryRecord]) -> OperationVerdict | None:
    """Return the verdict on a dumped call by its tensors, else by its statistics; None if neither tells."""
    for entry in entries:
        source = entry.stack[0].replace(", \n ", ": ") if entry.stack else ""
        place = OperationVerdict(operation=entry.key, cause=NonfiniteCause.UNKNOWN, reason="", call=entry.parent or "")
        place = dataclasses.replace(place, micro_step=entry.micro_step, stage=entry.stage, source=source)
        judged = _run_again(dump, entry)
        if judged is not None and judged.cause is not NonfiniteCause.UNKNOWN:
            return dataclasses.replace(
                place, cause=judged.cause, reason=judged.reason, evidence="the call run again on its dumped tensors"
            )
        proven = proven_cause(entry)
        if proven is not None:
            return dataclasses.replace(place, cause=proven[0], reason=proven[1], evidence="statistics of its inputs")
    return None


def _run_again(dump: Dump, entry: EntryRecord) -> OperationVerdict | None:
    if not any(record.data_path for record in entry.outputs) or importlib.util.find_spec("torch") is None:
        return None
    from trainermon.replay.dumped_calls import judge_dumped  # loads torch, so only where there is something to run

    try:
        judged = judge_dumped(dump.directory, entry)
    except DumpError:
        return None
    return OperationVerdict(operation=entry.key, cause=judged.cause, reason=judged.reason)


def _unknown(diagnosis: Diagnosis, dump: Dump) -> OperationVerdict:
    within = f"{diagnosis.module}." if diagnosis.module else ""
    bad = next((parameter for parameter in diagnosis.parameters if parameter.name.startswith(within)), None)
    if bad is not None:
        reason = f"{bad.name} was not finite before anything was computed with it"
        return OperationVerdict(operation="", cause=NonfiniteCause.INHERITED, reason=reason, evidence="the dump")
    if diagnosis.module == LOSS:
        reason = "what follows the model is not part of a replay, and no function calls were dumped"
        return OperationVerdict(operation="", cause=NonfiniteCause.UNKNOWN, reason=reason, collect=_MIX)
    if dump.info.replay:
        reason = "no operation of the replay made it from finite values in that module"
        return OperationVerdict(operation="", cause=NonfiniteCause.UNKNOWN, reason=reason, collect=_MIX)
    reason = "the statistics of its inputs do not tell"
    return OperationVerdict(operation="", cause=NonfiniteCause.UNKNOWN, reason=reason, collect=f"{_REPLAY}, or {_MIX}")
