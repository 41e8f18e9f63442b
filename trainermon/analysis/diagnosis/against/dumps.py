"""What the dumps of a step tell of the first difference from a reference: down to the operation and its line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from trainermon.analysis.compare.answer.summary import called_in, odd_within
from trainermon.analysis.compare.items import INPUT as GIVEN_STATE
from trainermon.analysis.compare.items import OUTPUT
from trainermon.analysis.compare.verdicts import CallResult, ResultRow
from trainermon.analysis.diagnosis.against.dump_differences import (
    CallDifference,
    DifferenceCause,
    DumpDifference,
    RankComparison,
    differing_rows,
)
from trainermon.analysis.diagnosis.against.row_differences import RowDifference
from trainermon.analysis.diagnosis.against.rows import (
    MAX_CONTRASTS,
    PHRASES,
    statistics_of,
    step_level,
    tensor_of,
)
from trainermon.analysis.diagnosis.against.sides import RunSide
from trainermon.analysis.diagnosis.domains import describe_domain
from trainermon.analysis.diagnosis.findings import (
    Contrast,
    Diagnosis,
    DiagnosisVerdict,
    FaultPhase,
    LevelFinding,
    PathLink,
    PlaceLevel,
    RankFinding,
    RankRole,
    Symptom,
)
from trainermon.analysis.diagnosis.origin import INPUT, LOSS, MAX_LINKS, MODEL
from trainermon.analysis.diagnosis.wording import counted, rank_list
from trainermon.dump.files.reader import split_key
from trainermon.dump.files.records import FORWARD

DUMPS = "dumps"
WIDESPREAD = 0.5  # more weights than this share differ: they did so before the step, not one by one


def from_dumps(ours: RunSide, step: int | None, dumps: DumpDifference, rows: RowDifference | None) -> Diagnosis:
    """Return the diagnosis made from the dumps of one step, of which at least one call must differ from the reference.

    `dumps` is what differs in them, `rows` what differs in the stored rows (None: not known), `step` the step.
    """
    first = dumps.first
    assert first is not None
    row = _telling(first)
    phase, module = _phase(first), _module(first, row)
    ranks = tuple(sorted({found.event.rank for found in dumps.origins if found.call.key == first.call.key}))
    is_known = bool(first.module_key) and split_key(first.module_key)[0] == module
    return Diagnosis(
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.DIFFERS,
        run_id=ours.run_id,
        headline=_headline(first, module, step),
        reason=". ".join(filter(None, [_reason(first, row), _within(first), _others(dumps, ranks)])),
        step=step,
        rank=first.event.rank,
        module=module,
        class_name=split_key(first.module_key)[1] if is_known else "",
        call=split_key(first.module_key)[3] if is_known else 0,
        micro_step=first.micro_step,
        phase=phase,
        api=first.api,
        tensor=tensor_of(row.target.place, row.target) if row and row.target and row.target.is_tensor else None,
        source=called_in(first.rank.comparison, first.call),
        candidates=_candidates(dumps, first),
        chain=tuple(_chain(first)),
        ranks=tuple(_rank(rank, dumps) for rank in dumps.ranks),
        levels=_levels(ours, step, dumps, rows),
        contrasts=_contrasts(first),
        dump=below(first.rank.pair.target.directory, ours.path),
    )


def below(directory: Path, path: Path) -> str:
    """Return the path of `directory` relative to `path`; the whole path if it is not below, or is `path` itself."""
    inside = directory.is_relative_to(path) and directory != path
    return (directory.relative_to(path) if inside else directory).as_posix()


def _phase(first: CallDifference) -> FaultPhase:
    if first.cause is DifferenceCause.PARAMETER:
        return FaultPhase.PARAMETER
    return FaultPhase.BACKWARD if first.is_backward else FaultPhase.FORWARD


def _module(first: CallDifference, row: ResultRow | None) -> str:
    """Return the innermost module; tensors that a model is given, or given back, come from outside of it."""
    if first.hooked_module:
        return first.hooked_module
    if first.cause is DifferenceCause.GIVEN and first.is_backward:
        return LOSS
    is_tensor = row is None or row.target is None or row.target.is_tensor
    if first.cause is DifferenceCause.GIVEN and first.rank.batch_differs is not False and is_tensor:
        return INPUT
    key = first.module_key
    if first.cause is DifferenceCause.GIVEN and not first.api:
        key = first.rank.parent(key) or ""
    return split_key(key)[0] if key else MODEL


def _headline(first: CallDifference, module: str, step: int | None) -> str:
    place = first.api or module
    if first.api and module and not module.startswith("("):
        place = f"{first.api} of {module}"
    when = "" if step is None else f" in step {step}"
    return f"The run first differs from the reference in {place} on rank {first.event.rank}{when}"


def _reason(first: CallDifference, row: ResultRow | None) -> str:
    name = first.api or split_key(first.call.key)[0]
    slot = row.target.place if row is not None and row.target is not None else "a value"
    if first.hooked_module:
        return "A gradient hook of the script stands on this tensor, and gave or passed on another gradient"
    if first.cause is DifferenceCause.PARAMETER:
        return _reason_of_weight(first, f"{slot} of {name} differed before the forward of the step")
    if first.cause is DifferenceCause.GIVEN:
        if row is not None and row.target is not None and row.golden is not None and not row.target.is_tensor:
            return f"{slot} of {name} is {row.target.max}, {row.golden.max} in the reference"
        return f"{slot} of {name} differed before this call, and no call that was dumped has made it"
    return _reason_of_call(first, name, slot)


def _reason_of_weight(first: CallDifference, alone: str) -> str:
    owners = [call for call in first.rank.comparison.calls if any(_is_weight(row) for row in call.rows)]
    bad = [call for call in owners if any(_is_weight(row) for row in differing_rows(call))]
    if len(owners) > 3 and len(bad) > WIDESPREAD * len(owners):
        return f"Weights of {len(bad)} of {len(owners)} modules differed before the step: it arose in an earlier one"
    return alone


def _reason_of_call(first: CallDifference, name: str, slot: str) -> str:
    size = first.call.output_error
    if math.isnan(size):
        return f"{slot} of {name} is not finite on one side only"
    if not math.isfinite(size):
        return f"What {name} returned differs in its bits, what it was given does not"
    given = f"by {first.call.input_error:.2g}" if first.call.input_error else "not at all"
    return (
        f"What {name} returned differs by {size:.2g}, what it was given {given};"
        f" rounding and that explain {first.call.expected:.2g}"
    )


def _within(first: CallDifference) -> str:
    odd = odd_within(first.rank.comparison, first.call) if not first.api else ()
    return f"Within it {'differs' if len(odd) == 1 else 'differ'} {', '.join(odd[:3])}" if odd else ""


def _others(dumps: DumpDifference, ranks: tuple[int, ...]) -> str:
    others = sorted({found.event.rank for found in dumps.origins} - set(ranks))
    same = f"{rank_list(ranks)} differ in the same call" if len(ranks) > 1 else ""
    return ". ".join(filter(None, [same.capitalize(), f"{rank_list(others)} differ by themselves" if others else ""]))


def _is_weight(row: ResultRow) -> bool:
    return row.target is not None and row.target.state == "parameters"


def _telling(first: CallDifference) -> ResultRow | None:
    """Return the row that shows the difference best: a weight, what was given, or what was returned."""
    rows = differing_rows(first.call)
    states = {DifferenceCause.PARAMETER: "parameters", DifferenceCause.GIVEN: GIVEN_STATE, DifferenceCause.MADE: OUTPUT}
    chosen = [row for row in rows if row.target is not None and row.target.state == states[first.cause]] or rows
    return max(chosen, key=_size, default=None)


def _size(row: ResultRow) -> float:
    relative = row.difference.relative
    return math.inf if relative is not None and math.isnan(relative) else relative or 0.0


def _contrasts(first: CallDifference) -> tuple[Contrast, ...]:
    rows = [
        row for row in first.call.rows if row.target is not None and row.golden is not None and row.target.is_tensor
    ]
    rows.sort(key=lambda row: (row not in differing_rows(first.call), -_size(row)))
    return tuple(_contrast(first, row) for row in rows[:MAX_CONTRASTS])


def _contrast(first: CallDifference, row: ResultRow) -> Contrast:
    assert row.target is not None
    assert row.golden is not None
    return Contrast(
        rank=first.event.rank,
        place=f"{first.call.key}.{row.target.place}",
        value=statistics_of(row.target),
        usual=statistics_of(row.golden),
        relative=row.difference.relative,
        expected=first.call.expected if row.target.state == OUTPUT else None,
    )


def _candidates(dumps: DumpDifference, first: CallDifference) -> tuple[str, ...]:
    others = (found for found in dumps.origins if found is not first and found.call.key != first.call.key)
    return tuple(f"rank {found.event.rank}: {found.call.key}" for found in others)[:MAX_LINKS]


def _chain(first: CallDifference) -> Iterator[PathLink]:
    """Yield links of the path: the call, and the differing calls after it that enclose it or stand beside what does."""
    rank, key = first.rank, first.call.key
    levels: set[str | None] = {None}
    above = rank.parent(key)
    while above is not None and above not in levels:
        levels.add(above)
        above = rank.parent(above)
    direction = first.call.target.direction if first.call.target else FORWARD
    calls = sorted(rank.comparison.calls, key=lambda call: rank.noted(call.key).get("order", 0))
    later = [
        call
        for call in calls
        if call.key != key
        and call.target is not None
        and call.target.direction == direction
        and rank.noted(call.key).get("order", 0) >= first.event.order
        and rank.parent(call.key) in levels
        and _output(call) is not None
    ]
    shown = [first.call, *later]
    omitted = len(shown) - MAX_LINKS
    head = shown if omitted <= 0 else shown[: MAX_LINKS // 2]
    yield from filter(None, (_link(call, 0) for call in head))
    for number, call in enumerate([] if omitted <= 0 else shown[-(MAX_LINKS // 2) :]):
        link = _link(call, omitted if number == 0 else 0)
        if link is not None:
            yield link


def _output(call: CallResult) -> ResultRow | None:
    rows = [row for row in differing_rows(call) if row.target is not None and row.target.state == OUTPUT]
    return max(rows, key=_size, default=None)


def _link(call: CallResult, omitted: int) -> PathLink | None:
    row = _output(call) or next(iter(differing_rows(call)), None)
    if row is None or row.target is None or call.target is None:
        return None
    name, class_name, direction, number = split_key(call.key)
    is_module = call.key.startswith("Module.")
    return PathLink(
        module=name if is_module else call.key,
        class_name=class_name if is_module else "",
        direction=direction,
        call=number if is_module else 0,  # a function's key has it
        tensor=tensor_of(row.target.place, row.target),
        omitted=omitted,
    )


def _rank(rank: RankComparison, dumps: DumpDifference) -> RankFinding:
    is_origin = any(found.event.rank == rank.rank for found in dumps.origins)
    role = RankRole.ORIGIN if is_origin else RankRole.REACHED if rank.differs else RankRole.INNOCENT
    return RankFinding(rank=rank.rank, role=role, replay="none")


def _levels(
    ours: RunSide, step: int | None, dumps: DumpDifference, rows: RowDifference | None
) -> tuple[LevelFinding, ...]:
    first = dumps.first
    assert first is not None
    differing = sorted(rank.rank for rank in dumps.ranks if rank.differs)
    alike = sorted({found.event.rank for found in dumps.origins if found.call.key == first.call.key})
    domain, why = describe_domain(alike, ours.places)
    ordered = "ordered by matched communication" if dumps.is_tied else "ordered by the pipeline"
    of_ranks = f"{rank_list(differing)} of {counted(len(dumps.ranks), 'compared rank')}"
    differ = f"{of_ranks} differ{'s' if len(differing) == 1 else ''}, {ordered}"
    module = _module(first, _telling(first))
    answers = (
        (PlaceLevel.MICRO_STEP, *_micro_step(first)),
        (PlaceLevel.DOMAIN, domain, why or "the run has one rank, or does not tell its groups"),
        (PlaceLevel.RANK, str(first.event.rank), differ if len(dumps.ranks) > 1 else "the only one that was compared"),
        (PlaceLevel.MODULE, module, PHRASES[_phase(first)]),
        (PlaceLevel.API, first.api, _of_api(first)),
    )
    below = (LevelFinding(level=level, answer=answer, reason=why, source=DUMPS) for level, answer, why in answers)
    return (_step(step, rows), *below)


def _step(step: int | None, rows: RowDifference | None) -> LevelFinding:
    if rows is not None and rows.step == step and step is not None:
        return step_level(rows)
    answer = "" if step is None else str(step)
    return LevelFinding(level=PlaceLevel.STEP, answer=answer, reason="the first dumps that differ", source=DUMPS)


def _micro_step(first: CallDifference) -> tuple[str, str]:
    if first.micro_step is None:
        return "", "the dumps do not tell them apart"
    return str(first.micro_step), "that of the first call"


def _of_api(first: CallDifference) -> str:
    if first.api:
        return "the innermost call that what it was given does not explain"
    calls = first.rank.comparison.calls
    if any(call.target and not call.key.startswith("Module.") for call in calls):
        return "no function call within the module differs by itself"
    return "the dumps have modules only"
