"""What the list says of a run, from few and small reads: `run.json`, the end of the store, the log of alerts.

The newest segments of many runs are read by one query. What was read is kept until the files change, so that looking
again costs a few calls to the file system per run.
"""

# ruff: noqa: S608  (the SQL consists of our own names and of quoted paths)

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainermon.agent.assembly import ALERTS_FILE
from trainermon.agent.hang.crash import ENDS, end_of
from trainermon.agent.hang.open_alerts import RANK_DEAD
from trainermon.agent.runs.folder import RunPlace
from trainermon.agent.web.listener import TARGETS_FILE
from trainermon.alerts.log import AlertLog
from trainermon.core.catalogue import LOSS_SERIES
from trainermon.core.errors import StoreError
from trainermon.core.values import Alert, AlertState, Kind, Severity, as_plain, measured_as_plain
from trainermon.exporters.export import SEGMENTS_FOLDER
from trainermon.exporters.store.segments import (
    METADATA_KEY,
    SegmentMetadata,
    connect,
    cover,
    is_whole,
    quoted,
    reason_of,
    sql_path,
)

MAX_NODES = 16
"""Of so many nodes of a run the newest segment is read for the list."""
MAX_TAGS = 32
ENDED = frozenset({"finished", *ENDS})
"""States of a run whose ranks and agents have all ended."""
_SEVERITIES = tuple(Severity)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One line of the list.

    Attributes:
        key: The run's name in addresses.
        name: Its run id.
        path: Its directory.
        state: `running`, `silent` (its agent has not ended, and nothing was stored for long), `finished`, `stopped`
            (from outside), `interrupted`, `killed`, `failed` (by an exception or an exit status), `crashed`
            (otherwise), or `empty`.
        problem: What cannot be read of it; "" for nothing.
        started_s: Unix time at which its first rank began.
        last_time_s: Unix time of the newest row that is stored.
        attempt: The newest start of the job.
        world_size: Number of ranks.
        nodes: Names of its nodes.
        step: The newest stored step.
        loss: Of that step, the mean over ranks; infinity: it is not finite; None: not recorded.
        alerts_firing: How many alerts fire; one for all ranks that share rule and first step, as on the run's page.
        alerts: How many there were.
        worst: The gravest severity of those that fire, else None.
        end: What became of its newest attempt: `finished`, or how a rank died after which nothing went on.
        tags: What the configuration calls it.
        framework: Which one trains it.
        page: Address of the page of its agent on this machine, if one listens.
    """

    key: str
    name: str
    path: str
    state: str = "empty"
    problem: str = ""
    started_s: float | None = None
    last_time_s: float | None = None
    attempt: int = 0
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    step: int | None = None
    loss: float | None = None
    alerts_firing: int = 0
    alerts: int = 0
    worst: str | None = None
    end: str = "finished"
    tags: tuple[str, ...] = ()
    framework: str = ""
    page: str | None = None

    def as_plain(self) -> dict[str, Any]:
        """Return the line ready for JSON."""
        return {**as_plain(self), "loss": measured_as_plain(self.loss)}


class NewestRows(NamedTuple):
    """What the end of one segment says.

    Attributes:
        metadata: Its footer.
        attempt: Of its newest step.
        step: The newest step.
        loss_sum: Over the finite losses of that step.
        loss_count: How many there are.
        nonfinite: How many were not finite.
    """

    metadata: SegmentMetadata
    attempt: int
    step: int
    loss_sum: float
    loss_count: int
    nonfinite: int


class RunFiles(NamedTuple):
    """The files that the list reads of a run.

    Attributes:
        newest: By node, its newest segment that is whole.
        damaged: Segments that are not.
        logs: The logs of alerts.
        targets: Files in which agents say where they listen.
    """

    newest: Mapping[str, Path]
    damaged: tuple[Path, ...]
    logs: tuple[Path, ...]
    targets: tuple[Path, ...]


def signature_of(run_dir: Path) -> tuple[Any, ...]:
    """Return what changes whenever a file that the list reads does."""
    nodes = sorted(run_dir.glob("nodes/*"))
    paths = [run_dir / "run.json"]
    paths += [node / name for node in nodes for name in (SEGMENTS_FOLDER, ALERTS_FILE, TARGETS_FILE)]
    return tuple(map(_stamp, paths))


def find_files(run_dir: Path) -> RunFiles:
    """Return which files of a run the list reads."""
    newest: dict[str, Path] = {}
    damaged: list[Path] = []
    nodes = sorted(path for path in run_dir.glob("nodes/*") if path.is_dir())
    for node in nodes[:MAX_NODES]:
        for segment in reversed(cover(node / SEGMENTS_FOLDER)):
            if is_whole(segment.path):
                newest[node.name] = segment.path
                break
            damaged.append(segment.path)
    return RunFiles(
        newest=newest,
        damaged=tuple(damaged),
        logs=tuple(node / ALERTS_FILE for node in nodes),
        targets=tuple(node / TARGETS_FILE for node in nodes),
    )


def read_newest_rows(paths: Sequence[Path]) -> dict[Path, NewestRows | str]:
    """Return what the ends of segments say, by path; of one that cannot be read, why. One query for all.

    If it fails, halves are tried, so that one bad file costs the others little.
    """
    if not paths:
        return {}
    import duckdb

    try:
        return dict(_query(paths))
    except (duckdb.Error, OSError, ValueError, LookupError, TypeError, StoreError) as error:
        if len(paths) == 1:
            return {paths[0]: reason_of(error)[:200]}
    middle = len(paths) // 2
    return read_newest_rows(paths[:middle]) | read_newest_rows(paths[middle:])


def _query(paths: Sequence[Path]) -> Iterator[tuple[Path, NewestRows]]:
    by_name = {sql_path(path): path for path in paths}
    listed = f"[{', '.join(map(quoted, by_name))}]"
    with connect() as connection:
        footers = connection.execute(
            f"SELECT file_name, decode(value) FROM parquet_kv_metadata({listed}) WHERE decode(key) = '{METADATA_KEY}'"
        ).fetchall()
        rows = connection.execute(
            "SELECT filename, attempt, step,"
            f" sum(sum) FILTER (name = '{LOSS_SERIES}' AND kind = '{Kind.LOSS}'),"
            f" sum(count - nans - infs) FILTER (name = '{LOSS_SERIES}' AND kind = '{Kind.LOSS}'),"
            f" sum(nans + infs) FILTER (name = '{LOSS_SERIES}' AND kind = '{Kind.LOSS}')"
            f" FROM read_parquet({listed}, union_by_name = true, filename = true)"
            f" WHERE kind IN ('{Kind.LOSS}', '{Kind.STEP}') GROUP BY filename, attempt, step"
            " QUALIFY row_number() OVER (PARTITION BY filename ORDER BY attempt DESC, step DESC) = 1"
        ).fetchall()
    ends = {name: values for name, *values in rows}
    for name, text in footers:
        attempt, step, total, count, bad = ends.get(name) or (0, -1, None, None, None)
        yield (
            by_name[name],
            NewestRows(SegmentMetadata.from_json(text), attempt, step, total or 0.0, count or 0, bad or 0),
        )


def make_facts(place: RunPlace, files: RunFiles, ends: Mapping[Path, NewestRows | str]) -> RunFacts:
    """Return what the list says of a run, all but its state."""
    said, problems = _run_json(place.path / "run.json")
    known = {node: ends[path] for node, path in files.newest.items()}
    problems += [f"{files.newest[node].name} of {node}: {end}" for node, end in known.items() if isinstance(end, str)]
    problems += [f"{path.name} of {path.parts[-3]} is damaged" for path in files.damaged]
    rows = [end for end in known.values() if isinstance(end, NewestRows)]
    started = [time_s for end in rows for time_s in end.metadata.started_s.values() if time_s > 0]
    alerts = [alert for log in files.logs for alert in _alerts_of(log)]
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    attempt, step, loss = _newest(rows)
    config = said.get("config") if isinstance(said.get("config"), Mapping) else {}
    return RunFacts(
        key=place.key,
        name=str(said.get("run_id") or place.path.name),
        path=str(place.path),
        problem="; ".join(problems),
        started_s=min(started, default=_number(said.get("started_s"))),
        last_time_s=max((end.metadata.last_time_s for end in rows), default=None),
        attempt=max(attempt, int(_number(said.get("attempt")) or 0)),
        world_size=int(_number(said.get("world_size")) or 0),
        nodes=tuple(log.parent.name for log in files.logs),
        step=step,
        loss=loss,
        alerts_firing=_num_rows(firing),
        alerts=_num_rows(alerts),
        worst=max((alert.severity for alert in firing), key=_SEVERITIES.index, default=None),
        end=_end(alert.message for alert in firing if alert.rule == RANK_DEAD and alert.attempt >= attempt),
        tags=_tags((config or {}).get("tags")),
        framework=_framework(place.path),
    )


def _end(deaths: Iterable[str]) -> str:
    return max(map(end_of, deaths), key=ENDS.index, default="finished")


def _num_rows(alerts: Sequence[Alert]) -> int:
    """Return how many rows the run's own page has for these alerts: what a rule found on many ranks at once is one."""
    return len({(alert.rule, alert.attempt, alert.first_step, alert.state, alert.severity) for alert in alerts})


def announces(path: Path) -> bool:
    """Whether a file of targets names an address: its agent has not ended."""
    try:
        return bool(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False


def _newest(rows: Sequence[NewestRows]) -> tuple[int, int | None, float | None]:
    """Return attempt and number of the newest step of any node, and its loss over the nodes that have it."""
    reached = [end for end in rows if end.step >= 0]
    if not reached:
        return max((max(end.metadata.attempts, default=0) for end in rows), default=0), None, None
    attempt, step = max((end.attempt, end.step) for end in reached)
    at = [end for end in reached if (end.attempt, end.step) == (attempt, step)]
    if any(end.nonfinite for end in at):
        return attempt, step, math.inf
    count = sum(end.loss_count for end in at)
    return attempt, step, sum(end.loss_sum for end in at) / count if count else None


def _run_json(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        said = json.loads(path.read_bytes())
        if isinstance(said, dict):
            return said, []
        return {}, [f"run.json holds {type(said).__name__}, expected an object"]
    except FileNotFoundError:
        return {}, ["run.json is missing"]
    except OSError as error:
        return {}, [f"run.json cannot be read: {error.strerror}"]
    except (ValueError, RecursionError):
        return {}, ["run.json is not JSON: it was written by halves, or changed"]


def _alerts_of(log: Path) -> list[Alert]:
    with contextlib.suppress(OSError):
        return list({alert.id: alert for alert in AlertLog(log).read()}.values())
    return []


def _framework(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / "ranks" / "rank00000.json").read_bytes())["framework"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _tags(value: Any) -> tuple[str, ...]:
    return tuple(str(tag) for tag in value[:MAX_TAGS]) if isinstance(value, list) else ()


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
