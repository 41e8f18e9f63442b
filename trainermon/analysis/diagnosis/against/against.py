"""The first difference between a run and a reference: by stored rows to the step, by dumps to the operation.

Levels are walked down: step, micro step, parallel domain, rank, module, API. Stored rows of both sides tell the step;
dumps of that step, where both sides have them, tell the rest; without them the rows do as far as they reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainermon.analysis.diagnosis.against.dump_differences import DumpDifference, compare_dumps
from trainermon.analysis.diagnosis.against.dumps import below, from_dumps
from trainermon.analysis.diagnosis.against.gradient_chain import gradient_chain
from trainermon.analysis.diagnosis.against.row_differences import RowDifference, find_row_difference
from trainermon.analysis.diagnosis.against.row_pairs import NOISE_GROWTH, NOISE_LIMIT
from trainermon.analysis.diagnosis.against.rows import from_rows
from trainermon.analysis.diagnosis.against.run_verdicts import GRAD_NORM, LOSS, RunVerdict, judge_run
from trainermon.analysis.diagnosis.against.settings import setting_differences
from trainermon.analysis.diagnosis.against.sides import RunSide, lone_dumps, open_side, pair_dumps
from trainermon.analysis.diagnosis.against.splits import open_both
from trainermon.analysis.diagnosis.against.trained_sets import TrainedSets, find_trained_sets
from trainermon.analysis.diagnosis.findings import Diagnosis, DiagnosisVerdict, FaultPhase, NextCollection, Symptom
from trainermon.analysis.diagnosis.next_collection import dump_of_step, more_statistics, together
from trainermon.analysis.diagnosis.wording import counted, named
from trainermon.core.errors import DumpError

MAX_CALLS = 5
MAX_DAMAGED = 2
_NAMES = {LOSS: "loss", GRAD_NORM: "gradient norm"}


class _ComparedDumps(NamedTuple):
    """The dumps of one step, and what of all dumps was not compared.

    Attributes:
        step: The step; None: not known.
        found: How they differ.
        unread: The dumps, of every step that was looked at, of which not all was compared.
        damaged: Why those of them were not that could not be read.
    """

    step: int | None
    found: DumpDifference
    unread: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def diagnose_against(run_dir: Path, reference: Path, *, step: int | None = None) -> Diagnosis:
    """Return where `run_dir` first differs from `reference`, each the directory of a run or of dumps.

    With `step`, only that step is looked at.

    Raises:
        DumpError: a side is no directory of a run or of dumps, or nothing but damaged dumps could be compared.
    """
    ours, theirs = open_side(Path(run_dir)), open_side(Path(reference))
    rows = _compare_rows(ours, theirs, step)
    at_step = rows.step if rows is not None and rows.step is not None else step
    is_split = rows is not None and bool(rows.split)
    dumps = None if is_split else _first_dump_difference(ours, theirs, at_step)
    if rows is None and dumps is not None and not dumps.found.ranks:
        raise DumpError(f"no dump could be compared: {dumps.damaged[0]}")
    if dumps is not None and dumps.found.first is not None:
        diagnosis = _with_unread(from_dumps(ours, dumps.step, dumps.found, rows), dumps)
    elif rows is not None and rows.step is not None:
        diagnosis = from_rows(ours, rows)
    else:
        diagnosis = _equal(ours, rows, dumps)
    trained = None
    if ours.is_run and theirs.is_run:
        trained = _trained_sets(ours, theirs)
        diagnosis = dataclasses.replace(
            with_run_verdicts(diagnosis, judge_run(ours.path, theirs.path, trained)),
            gradient_chain=gradient_chain(ours, theirs, _first_limit(rows), trained),
            setting_differences=setting_differences(ours.path, theirs.path, diagnosis.step),
        )
    return dataclasses.replace(
        diagnosis,
        reference=str(theirs.path),
        collect=_collect(diagnosis, rows, dumps),
        evidence=(*([trained.text] if trained else ()), *_sources(ours, theirs, rows, dumps)),
    )


def with_run_verdicts(diagnosis: Diagnosis, verdicts: Sequence[RunVerdict]) -> Diagnosis:
    """Return `diagnosis` with the verdicts on loss and gradient norm over both runs added.

    If no step stands out but the runs part, the diagnosis gets its conclusion from these.
    """
    diagnosis = dataclasses.replace(diagnosis, run_verdicts=tuple(verdicts))
    parted = [verdict for verdict in verdicts if verdict.differs]
    if diagnosis.verdict is not DiagnosisVerdict.EQUAL or not parted:
        return diagnosis
    names = " and ".join(_NAMES[verdict.quantity] for verdict in parted)
    return dataclasses.replace(
        diagnosis,
        verdict=DiagnosisVerdict.LOCATED,
        symptom=Symptom.DIFFERS,
        headline=f"No step stands out, but over the run the {names} differ{'s' if len(parted) == 1 else ''}",
        step=parted[0].step,
    )


def _compare_rows(ours: RunSide, theirs: RunSide, step: int | None) -> RowDifference | None:
    """Return what the stored rows tell; None if a side has none, or they have no step in common."""
    if not (ours.is_run and theirs.is_run):
        return None
    with open_both(ours, theirs) as both:
        if both is None:
            return None
        found = find_row_difference(both, ours, theirs, step)
    return found if found.num_steps else None


def _trained_sets(ours: RunSide, theirs: RunSide) -> TrainedSets | None:
    with open_both(ours, theirs) as both:
        return None if both is None else find_trained_sets(both)


def _first_limit(rows: RowDifference | None) -> float:
    """Return what passes for noise on the first common step: nothing if the rows differ there and were exact before."""
    if rows is None or rows.step is None or rows.num_before:
        return NOISE_LIMIT
    return min(NOISE_LIMIT, NOISE_GROWTH * rows.noise)


def _first_dump_difference(ours: RunSide, theirs: RunSide, step: int | None) -> _ComparedDumps | None:
    """Return the first step of which the dumps differ, else the first with calls on one side only, else the last.

    None without dumps in common. A step of which all dumps are damaged is passed over.
    """
    shown = one_sided = None
    unread: list[str] = []
    damaged: list[tuple[str, str]] = []
    paired = pair_dumps(ours, theirs, step)
    for at, pairs in paired.items():
        found = compare_dumps(pairs, ours.places)
        damaged += found.damaged
        if found.first is not None:
            return _ComparedDumps(at, found, *_texts(damaged))
        shown = _ComparedDumps(at, found) if found.ranks or shown is None else shown
        if one_sided is None and found.one_sided:
            one_sided = shown
        unread += [rank.pair.label for rank in found.ranks if not rank.comparison.is_whole]
    shown = one_sided or shown
    if shown is None:
        return None
    labels, why = _texts(damaged)
    return shown._replace(unread=(*labels, *unread, *lone_dumps(ours, theirs, step, paired)), damaged=why)


def _texts(damaged: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(label for label, _ in damaged), tuple(why for _, why in damaged)


def _equal(ours: RunSide, rows: RowDifference | None, dumps: _ComparedDumps | None) -> Diagnosis:
    if rows is None and dumps is None:
        return Diagnosis(
            verdict=DiagnosisVerdict.NO_EVIDENCE,
            run_id=ours.run_id,
            headline="Nothing could be compared",
            reason="The two sides have neither stored steps nor dumps of a step and rank in common",
        )
    agreed = [*([_rows_agree(rows)] if rows is not None else []), *([_dumps_agree(dumps)] if dumps is not None else [])]
    reason = ", and ".join(text for one in agreed for text in one.said)
    headline = "No difference from the reference was found" + "".join(one.limits for one in agreed)
    if dumps is not None and dumps.found.one_sided:
        headline = f"No value differs from the reference, but step {dumps.step} has calls on one side only"
        headline += _not_whole(dumps.unread) if dumps.damaged else ""
    return Diagnosis(
        verdict=DiagnosisVerdict.EQUAL,
        run_id=ours.run_id,
        headline=headline,
        reason=reason[:1].upper() + reason[1:],
        step=dumps.step if dumps is not None else None,
        unread=tuple(text for one in agreed for text in one.unread),
    )


class _Agreement(NamedTuple):
    """What is said of rows or dumps that agree: sentences, what was not compared, and how that limits the headline."""

    said: list[str]
    unread: list[str]
    limits: str


def _rows_agree(rows: RowDifference) -> _Agreement:
    noise = "" if rows.is_exact else f" but for noise of up to {rows.noise:.2g}"
    num_steps = counted(rows.num_steps, "step")
    sides = zip(rows.alone, ("this run", "the reference"), strict=True)
    alone = [f"{counted(number, 'step')} of {side} alone" for number, side in sides if number]
    said = [f"the stored rows of {num_steps} agree{noise}", *(f"{one} could not be compared" for one in alone)]
    limits = f" on the {num_steps} that both have" if alone else ""
    limits += "; what one run alone has was not compared" if rows.set_aside else ""
    return _Agreement(said, [*alone, *rows.set_aside], limits)


def _with_unread(diagnosis: Diagnosis, dumps: _ComparedDumps) -> Diagnosis:
    """Return what was found in those dumps that could be read, with a word on the others."""
    if not dumps.unread:
        return diagnosis
    return dataclasses.replace(
        diagnosis,
        headline=f"{diagnosis.headline}{_not_whole(dumps.unread)}",
        reason=". ".join([diagnosis.reason, *dumps.damaged[:MAX_DAMAGED]]),
        unread=dumps.unread,
    )


def _not_whole(unread: Sequence[str]) -> str:
    return f"; {named(unread)} {'was' if len(unread) == 1 else 'were'} not compared as a whole"


def _dumps_agree(dumps: _ComparedDumps) -> _Agreement:
    ranks = counted(len(dumps.found.ranks), "rank")
    said = [f"the dumps of {ranks} differ by no more than rounding"] if dumps.found.ranks else []
    said += dumps.damaged[:MAX_DAMAGED]
    if keys := dumps.found.one_sided:
        said.append(f"only one side calls {', '.join(keys[:MAX_CALLS])}{' ...' if len(keys) > MAX_CALLS else ''}")
    limits = _not_whole(dumps.unread) if dumps.unread else ""
    return _Agreement(said, list(dumps.unread), limits)


def _collect(diagnosis: Diagnosis, rows: RowDifference | None, dumps: _ComparedDumps | None) -> NextCollection | None:
    """Return what would lead further down, on both sides."""
    if diagnosis.verdict is DiagnosisVerdict.NO_EVIDENCE:
        return more_statistics((), "nothing is common to both sides")
    step = diagnosis.step
    if diagnosis.verdict is DiagnosisVerdict.EQUAL or step is None or diagnosis.api:
        return None
    if dumps is not None and dumps.found.first is not None:
        return _functions_too(step, dumps.found)
    if dumps is not None and diagnosis.phase is FaultPhase.OPTIMIZER:
        return None
    kinds = rows.kinds if rows is not None else ()
    return together(
        dump_of_step(step, (), "no dumps of both sides tell the operation"),
        None if diagnosis.module else more_statistics(kinds, "no stored rows tell the module", start_step=step),
    )


def _functions_too(step: int, dumps: DumpDifference) -> NextCollection | None:
    """Return the order for a dump with functions, within the module that is known; None if they were dumped."""
    assert dumps.first is not None
    if any(call.target and not call.key.startswith("Module.") for call in dumps.first.rank.comparison.calls):
        return None
    ranks = sorted({found.event.rank for found in dumps.origins})
    calls = [dumps.first.module_key] if dumps.first.module_key and not dumps.first.is_backward else []
    return dump_of_step(step, ranks, "the dumps have modules only", calls=calls)


def _sources(
    ours: RunSide, theirs: RunSide, rows: RowDifference | None, dumps: _ComparedDumps | None
) -> tuple[str, ...]:
    found: list[str] = []
    if rows is not None:
        found += [f"stored rows: {counted(rows.num_steps, 'step')} that both runs have"]
        found += [rows.split] if rows.split else rows.set_aside
    else:
        without = [side for side in (ours, theirs) if not side.is_run]
        verb = "holds" if len(without) == 1 else "hold"
        why = (
            f"{' and '.join(str(side.path) for side in without)} {verb} dumps only" if without else "no step in common"
        )
        found.append(f"stored rows: none compared, {why}")
    if dumps is not None:
        found += _dump_sources(ours, theirs, dumps.found)
    elif rows is not None and rows.split and ours.dumps and theirs.dumps:
        found.append("dumps: not compared here, where ranks hold other parts; `trainermon compare` merges them")
    else:
        found.append("dumps: none of a step and rank that both sides have")
    return tuple(found)


def _dump_sources(ours: RunSide, theirs: RunSide, dumps: DumpDifference) -> Sequence[str]:
    order = "matched communication" if dumps.is_tied else "the pipeline only: no dump has communication"
    lines = [
        f"dump of rank {rank.rank}: {below(rank.pair.target.directory, ours.path)}, beside the reference's"
        f" {below(rank.pair.golden.directory, theirs.path)} ({rank.comparison.mode.value})"
        for rank in dumps.ranks
    ]
    return [*lines, *([f"ranks ordered by {order}"] if len(dumps.ranks) > 1 else [])]
