"""What the files of a run tell about one step: dumps of its ranks, stored statistics, alerts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainermon.analysis.compare.merging.places import find_places
from trainermon.analysis.diagnosis.domains import in_pipelines, read_places
from trainermon.analysis.diagnosis.execution_order import Flow, in_execution_order, read_flows
from trainermon.analysis.diagnosis.rows.spoilt_buffers import SPOILT_BUFFERS, buffer_notes
from trainermon.analysis.diagnosis.unread import DumpReading, unreplayed_ranks
from trainermon.core.catalogue import GRADIENT_AT_STEP
from trainermon.core.errors import DumpError, StoreError
from trainermon.core.events import Unreplayed
from trainermon.core.values import Kind
from trainermon.dump.files.records import DUMP_FILE, PARTIAL_FILE, Dump, TensorRecord
from trainermon.exporters.store.blocks import first_unreadable
from trainermon.exporters.store.segments import reason_of
from trainermon.exporters.store.store import open_run

if TYPE_CHECKING:
    import duckdb

_PLACE = re.compile(r"dumps/([^/]+)/attempt(\d+)/step(\d+)/rank(\d+)$")
# What is never non-finite on purpose; activations may be (masks).
WEIGHT_KINDS = (Kind.PARAM_ORIGIN, Kind.PARAM_USED)
"""Weights of the step: what the optimizer holds, and what the forward used where that is something else."""
SURE_KINDS = (Kind.LOSS, Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, *WEIGHT_KINDS, Kind.PARAM_UPDATED)
_MAX_ROWS = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class NonfiniteRow:
    """One stored row of statistics with NaN or Inf in it; the fields are the columns of the store's table `stats`.

    `slot` is which tensor of a call (`output.0`), `stage` the virtual pipeline stage, `micro_step` the forward and
    backward within the step (None: once per step). `count`, `nans` and `infs` are numbers of elements, `min` and `max`
    those of the finite ones.
    """

    kind: str
    name: str
    slot: str
    call: int
    micro_step: int | None
    stage: int
    rank: int
    step: int
    count: int
    nans: int
    infs: int
    min: float | None
    max: float | None

    @property
    def fingerprint(self) -> None:
        """Always None: the statistics leave out NaN and Inf, so they do not tell whether two tensors are equal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankDump:
    """The dump of one rank.

    Attributes:
        rank: The rank.
        path: The dump's folder, relative to the run directory.
        dump: What was read from it.
    """

    rank: int
    path: str
    dump: Dump


class LargeWeight(NamedTuple):
    """A parameter that holds an unusually large element on a rank.

    Attributes:
        name: The parameter.
        rank: The rank.
        size: Magnitude of its largest finite element.
    """

    name: str
    rank: int
    size: float


class StepUpdate(NamedTuple):
    """What the optimizer of a rank had to work with on a step.

    Attributes:
        grad_norm: L2 norm of the gradients; None: not stored.
        rates: Learning rate of each group; () if not stored.
        finite: Parameters that are known to have been finite behind it.
    """

    grad_norm: float | None
    rates: tuple[float, ...]
    finite: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """All that is known about one step of a run, for its diagnosis.

    Attributes:
        run_id: The run.
        step: The step; None: none is bad.
        attempt: The start of the job.
        dumps: The dumps of the step, one per rank that has one.
        rows: The stored rows of the step with non-finite elements, without masks and buffers that began so.
        rows_before: Those of the stored step before it.
        updates_before: By rank, what its optimizer had to work with on that step.
        kinds: Which kinds of rows were stored at all.
        step_before: The stored step before it; None: there is none.
        bad_since: The first of the stored steps right before it of which none was finite; None if the last one was.
        ranks: Which ranks have rows.
        modules: The modules in the order in which they are called, as far as that is known, else defined; () if the run
            does not tell.
        largest: A few words on the largest finite element of the step.
        large_weights: The largest parameters before the step.
        num_steps: How many steps of the attempt are stored.
        is_asked_for: Whether the step was named, not found.
        alerts: Messages of alerts on it.
        places: By rank, its position on each axis of parallelism.
        notes: What the reader should know, in sentences.
        unreplayed: By rank, a replay of the step that left no dump.
        unread: Folders of dumps that could not be read, or not as a whole, within the run's; of the step, if one is
            asked for.
    """

    run_id: str
    step: int | None = None
    attempt: int | None = None
    dumps: tuple[RankDump, ...] = ()
    rows: tuple[NonfiniteRow, ...] = ()
    rows_before: tuple[NonfiniteRow, ...] = ()
    updates_before: Mapping[int, StepUpdate] = dataclasses.field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    step_before: int | None = None
    bad_since: int | None = None
    ranks: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    largest: str = ""
    large_weights: tuple[LargeWeight, ...] = ()
    num_steps: int = 0
    is_asked_for: bool = False
    alerts: tuple[str, ...] = ()
    places: Mapping[int, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreplayed: Mapping[int, Unreplayed] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()


class _DumpPlace(NamedTuple):
    id: str
    attempt: int
    step: int
    rank: int
    path: Path


def gather(run_dir: Path, step: int | None = None) -> StepEvidence:
    """Collect from the run directory all that is known about `step`; without one, about the first step with NaN or Inf.

    That step is looked for in the newest attempt.

    Raises:
        DumpError: there is no such run directory, or nothing is known of `step`.
    """
    if not run_dir.is_dir():
        raise DumpError(f"{run_dir} is not a directory: expected the directory of a run (<output>/<run id>)")
    places = list(_places(run_dir))
    evidence = StepEvidence(
        run_id=run_id_of(run_dir),
        modules=modules_of(run_dir),
        places=read_places(run_dir),
        is_asked_for=step is not None,
    )
    reading = DumpReading()
    with open_store(run_dir) as connection:
        folder = run_dir / "dumps" if places else run_dir
        places = places or list(_loose_places(run_dir))
        reading.miss(folder, {(place.step, place.rank) for place in places}, step)
        chosen = _choose_step(places, connection, step, reading)
        if chosen is None and step is not None:
            raise DumpError(_no_such_step(run_dir, step, places, connection))
        if chosen is None:
            return evidence
        attempt, step = chosen
        of_step = [place for place in places if (place.attempt, place.step) == chosen]
        dumps = _read_dumps(run_dir, of_step, reading)
        evidence = dataclasses.replace(
            evidence,
            step=step,
            attempt=attempt,
            dumps=dumps,
            unreplayed=unreplayed_ranks(run_dir, step),
            notes=reading.sentences(),
            unread=tuple(path.relative_to(run_dir).as_posix() for path in reading.gaps),
            places=in_pipelines(evidence.places, _stages(dumps)),
        )
        if connection is None:
            return evidence
        found = _with_store(evidence, connection, attempt, step)
        notes = [] if found.rows else buffer_notes(connection, attempt, run_dir)
        return dataclasses.replace(found, notes=(*found.notes, *notes))


def _stages(dumps: Sequence[RankDump]) -> dict[int, tuple[int, int | None]]:
    infos = {entry.rank: entry.dump.info for entry in dumps if entry.dump.info.pipeline_size > 1}
    return {rank: (info.pipeline_stage, info.replica) for rank, info in infos.items()}


def _places(run_dir: Path) -> Iterator[_DumpPlace]:
    for path in sorted(run_dir.glob("dumps/*/attempt*/step*/rank*")):
        match = _PLACE.search(path.as_posix())
        if match and ((path / DUMP_FILE).exists() or (path / PARTIAL_FILE).exists()):
            yield _DumpPlace(match[1], int(match[2]), int(match[3]), int(match[4]), path)


def _loose_places(folder: Path) -> Iterator[_DumpPlace]:
    """Yield the dumps at or below a folder that is no run, of ours or of msprobe's."""
    with contextlib.suppress(DumpError):
        for number, place in enumerate(find_places(folder)):
            rank = number if place.rank is None else place.rank
            yield _DumpPlace("", place.attempt or 1, place.step or 0, rank, place.directory)


def _first_bad(
    places: Sequence[_DumpPlace], before: Mapping[int, int], reading: DumpReading, *, is_all_there_is: bool
) -> tuple[int, int] | None:
    """Return attempt and step of the newest attempt's first dumps that show that their step went wrong; None: none do.

    Those from the step on that `before` has of the attempt are not read.
    """
    newest = max((place.attempt for place in places), default=0)
    for step in sorted({place.step for place in places if place.attempt == newest}):
        if step >= before.get(newest, step + 1):
            break
        chosen = (place.path for place in places if (place.attempt, place.step) == (newest, step))
        if any(_is_bad(reading.read(path), is_all_there_is=is_all_there_is) for path in chosen):
            return newest, step
    return None


def _is_bad(dump: Dump | None, *, is_all_there_is: bool) -> bool:
    """Return whether a dump shows that its step went wrong: replays are made of no other, ordered dumps of any.

    Results of functions may be masks: they count only where no stored rows tell more.
    """
    if dump is None:
        return False  # another dump or the rows must tell
    is_of_functions = is_all_there_is and dump.level == "L1"
    results = _records(dump) if is_of_functions else ()
    return dump.info.replay or dump.nonfinite or any(record.nonfinite for record in results)


def _records(dump: Dump) -> Iterator[TensorRecord]:
    return (record for entry in dump.entries for record in entry.outputs)


@contextlib.contextmanager
def open_store(run_dir: Path) -> Iterator[duckdb.DuckDBPyConnection | None]:
    """Return a context with a DuckDB connection to the run's stored tables; None in it if nothing has been stored.

    Raises:
        StoreError: A segment cannot be read; that may come out only when its rows are.
    """
    import duckdb

    try:
        connection = open_run(run_dir)
    except StoreError:
        if any(run_dir.glob("nodes/*/segments/*.parquet")):
            raise
        connection = None
    try:
        yield connection
    except duckdb.Error as error:
        said = StoreError(f"{run_dir}: what is stored cannot be read: {reason_of(error)}")
        raise (first_unreadable(run_dir) or said) from error
    finally:
        if connection is not None:
            connection.close()


def _choose_step(
    places: Sequence[_DumpPlace], connection: duckdb.DuckDBPyConnection | None, step: int | None, reading: DumpReading
) -> tuple[int, int] | None:
    """Return attempt and number of `step`; without one, of the first step that went wrong, or else of the last one."""
    dumped = [(place.attempt, place.step) for place in places]
    if step is not None:
        found = [pair for pair in dumped if pair[1] == step]
        if connection is not None:
            found += connection.execute("SELECT DISTINCT attempt, step FROM stats WHERE step = ?", [step]).fetchall()
        return _first_of_newest(found)
    stored = [] if connection is None else _stored_bad(connection)
    bad = _first_bad(places, dict(stored), reading, is_all_there_is=connection is None)
    found = [*stored, *([bad] if bad is not None else [])]
    if found:
        return _first_of_newest(found)
    if connection is not None:
        dumped = connection.execute("SELECT attempt, max(step) FROM stats GROUP BY attempt").fetchall() or dumped
    return max(dumped, default=None)


def _first_of_newest(found: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    newest = max((attempt for attempt, _ in found), default=None)
    return min((pair for pair in found if pair[0] == newest), default=None)


def _stored_bad(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, int]]:
    """Return each attempt that has stored rows that are not finite and must be, with the first step of these."""
    kinds = ", ".join(f"'{kind}'" for kind in SURE_KINDS)
    query = f"""
        SELECT attempt, min(step) FROM stats
        WHERE nans + infs > 0 AND (kind IN ({kinds}) OR slot = '{GRADIENT_AT_STEP}'
            OR (attempt, step, rank, kind, name, slot) IN ({SPOILT_BUFFERS})) GROUP BY attempt
    """  # noqa: S608  # our own names
    return connection.execute(query).fetchall()


def _no_such_step(
    run_dir: Path, step: int, places: Sequence[_DumpPlace], connection: duckdb.DuckDBPyConnection | None
) -> str:
    known = {place.step for place in places}
    if connection is not None:
        query = "SELECT min(step), max(step), arg_min(step, abs(step - ?)) FROM stats"
        known.update(found for found in connection.execute(query, [step]).fetchall()[0] if found is not None)
    if not known:
        return f"{run_dir} holds no dump and no stored statistics of step {step}, nor of any other step"
    nearest = min(known, key=lambda other: abs(other - step))
    return (
        f"step {step} is not known in {run_dir}: expected one of the steps {min(known)} to {max(known)},"
        f" as far as they were stored or dumped; the nearest is --step {nearest}"
    )


def _read_dumps(run_dir: Path, places: Sequence[_DumpPlace], reading: DumpReading) -> tuple[RankDump, ...]:
    """Return the best dump of each rank that has one that can be read.

    A replay is better than an ordered dump, a complete one better than a cut off one.
    """
    best: dict[int, RankDump] = {}
    for place in places:
        dump = reading.read(place.path)
        if dump is None:
            continue
        known = best.get(place.rank)
        if known is None or _worth(dump) > _worth(known.dump):
            path = place.path.relative_to(run_dir).as_posix()
            best[place.rank] = RankDump(rank=place.rank, path=path, dump=dump)
    return tuple(best[rank] for rank in sorted(best))


def _worth(dump: Dump) -> tuple[bool, bool, int]:
    return dump.info.replay, dump.info.complete, len(dump.entries)


def _with_store(evidence: StepEvidence, connection: duckdb.DuckDBPyConnection, attempt: int, step: int) -> StepEvidence:
    def column(query: str, *values: object) -> list[Any]:
        return [row[0] for row in connection.execute(query, list(values)).fetchall()]

    before = column("SELECT max(step) FROM all_stats WHERE attempt = ? AND step < ?", attempt, step)[0]
    kinds = "SELECT DISTINCT kind FROM all_stats WHERE attempt = ? AND step = ?"
    ranks = column("SELECT DISTINCT rank FROM all_stats WHERE attempt = ? AND step = ? ORDER BY rank", attempt, step)
    alerts = "SELECT DISTINCT message FROM alerts WHERE attempt = ? AND first_step = ? AND state = 'firing' ORDER BY 1"
    rows = _rows(connection, attempt, step)
    return dataclasses.replace(
        evidence,
        rows=rows,
        rows_before=_rows(connection, attempt, before),
        updates_before=_updates(connection, attempt, before),
        modules=in_execution_order(
            evidence.modules, [flow for one in (before, step) for flow in _flows(connection, one)]
        ),
        largest=_largest(connection, attempt, step),
        large_weights=_large_weights(connection, attempt, step),
        num_steps=column("SELECT count(DISTINCT step) FROM all_stats WHERE attempt = ?", attempt)[0],
        kinds=frozenset(map(str, column(kinds, attempt, step))),
        step_before=before,
        bad_since=_bad_since(connection, attempt, step),
        ranks=tuple(ranks),
        alerts=tuple(map(str, column(alerts, attempt, step))),
    )


def _flows(connection: duckdb.DuckDBPyConnection, step: int | None) -> list[Flow]:
    return [] if step is None else read_flows(connection, step)


def _large_weights(connection: duckdb.DuckDBPyConnection, attempt: int, step: int) -> tuple[LargeWeight, ...]:
    """Return the parameters before the step, or what is stored of them, largest element first."""
    kinds = ", ".join(f"'{kind}'" for kind in WEIGHT_KINDS)
    query = f"""
        SELECT name, rank, greatest(abs(min), abs(max)) AS size FROM all_stats
        WHERE attempt = ? AND step = ? AND kind IN ({kinds}) AND finite > 0
        ORDER BY size DESC, rank LIMIT 8
    """  # noqa: S608  # our own name
    return tuple(LargeWeight._make(row) for row in connection.execute(query, [attempt, step]).fetchall())


def _rows(connection: duckdb.DuckDBPyConnection, attempt: int, step: object) -> tuple[NonfiniteRow, ...]:
    query = f"""
        SELECT {", ".join(field.name for field in dataclasses.fields(NonfiniteRow))} FROM all_stats
        WHERE attempt = ? AND step = ? AND nans + infs > 0 AND kind <> '{Kind.STEP}'
            AND (kind <> '{Kind.BUFFER}' OR (attempt, step, rank, kind, name, slot) IN ({SPOILT_BUFFERS}))
        ORDER BY rank, kind, name, slot LIMIT {_MAX_ROWS}
    """  # noqa: S608  # our own column names
    rows = (NonfiniteRow(*row) for row in connection.execute(query, [attempt, step]).fetchall())
    return tuple(row for row in rows if not _mask_like(row))


def _updates(connection: duckdb.DuckDBPyConnection, attempt: int, step: object) -> dict[int, StepUpdate]:
    numbers = "SELECT rank, grad_norm, learning_rates FROM step_values WHERE attempt = ? AND step = ?"
    query = f"""
        SELECT rank, name FROM all_stats WHERE attempt = ? AND step = ? AND kind = '{Kind.PARAM_UPDATED}'
        GROUP BY rank, name HAVING sum(nans + infs) = 0
    """  # noqa: S608  # our own name
    finite: dict[int, set[str]] = {}
    for rank, name in connection.execute(query, [attempt, step]).fetchall():
        finite.setdefault(rank, set()).add(name)
    rows = connection.execute(numbers, [attempt, step]).fetchall()
    return {
        rank: StepUpdate(norm, tuple(rate for rate in rates or () if rate is not None), frozenset(finite.pop(rank, ())))
        for rank, norm, rates in rows
    } | {rank: StepUpdate(None, (), frozenset(names)) for rank, names in finite.items()}


def _bad_since(connection: duckdb.DuckDBPyConnection, attempt: int, step: int) -> int | None:
    kinds = ", ".join(f"'{kind}'" for kind in SURE_KINDS if kind != Kind.PARAM_UPDATED)
    query = f"""
        WITH known AS (
            SELECT step, bool_or(nans + infs > 0) AS bad FROM all_stats
            WHERE attempt = $attempt AND step < $step AND kind IN ({kinds}) GROUP BY step
        )
        SELECT min(step) FROM known WHERE bad AND step > (SELECT coalesce(max(step), -1) FROM known WHERE NOT bad)
    """  # noqa: S608  # our own names
    row = connection.execute(query, {"attempt": attempt, "step": step}).fetchone()
    return None if row is None else row[0]


def _mask_like(row: NonfiniteRow) -> bool:
    """Return whether infinities stand beside nothing but zeros and negative numbers: an additive attention mask."""
    finite = row.count > row.nans + row.infs
    return row.kind == Kind.ACTV and not row.nans and finite and row.max is not None and row.max <= 0


def _largest(connection: duckdb.DuckDBPyConnection, attempt: int, step: int) -> str:
    """Return a few words on the largest finite element of the step; whole numbers given are names, masks no values."""
    query = """
        SELECT kind, name, slot, rank, greatest(abs(min), abs(max)) AS size FROM all_stats
        WHERE attempt = ? AND step = ? AND finite > 0 AND kind NOT IN ('step', 'loss', 'checksum')
            AND NOT (kind = 'actv' AND max <= 0 AND zeros > 0)
            AND NOT (kind = 'comm' AND NOT starts_with(slot, 'pre.') AND NOT starts_with(slot, 'post.'))
            AND NOT (kind = 'actv' AND NOT starts_with(slot, 'output') AND size < 16777216
                AND trunc(min) = min AND trunc(max) = max AND trunc(sum) = sum AND trunc(sum_sq) = sum_sq)
        ORDER BY size DESC LIMIT 1
    """
    row = connection.execute(query, [attempt, step]).fetchone()
    if row is None:
        return ""
    kind, name, slot, rank, size = row
    return f"the largest element is {size:.3g}, in {kind} of {name}{f' {slot}' if slot else ''} on rank {rank}"


def run_id_of(run_dir: Path) -> str:
    """Return the name of a run: what its run.json says, else that of the directory."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(json.loads((run_dir / "run.json").read_bytes()).get("run_id") or run_dir.resolve().name)
    return run_dir.resolve().name


def modules_of(run_dir: Path) -> tuple[str, ...]:
    """Return the names of the modules in definition order, rank by rank where ranks have different ones; empty if none.

    A stage of a pipeline has none but its own.
    """
    names: dict[str, None] = {}
    for path in sorted(run_dir.glob("ranks/rank*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            modules = json.loads(path.read_bytes()).get("modules")
            if isinstance(modules, list):
                names |= dict.fromkeys(map(str, modules))
    return tuple(names)
