"""The post-mortem of a hang or a crash: as JSON for programs, and as Markdown that a person can read at once."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainermon.agent.hang.evidence import RankEvidence, ThreadStack, spans
from trainermon.agent.hang.records import StepRecord
from trainermon.agent.hang.verdict import HangVerdict
from trainermon.core.private_files import replace_file
from trainermon.core.values import Alert, as_plain

FOLDER = "reports"
RULES = ("hang", "rank-dead")
"""The rules whose alerts have a report."""

LOG_LINES = 40
MAX_LOG_BYTES = 16_384
_SHOWN_STEPS = 3
_SHOWN_FRAMES = 25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """Everything that is left of a hang or a crash on one node.

    Attributes:
        rule: `hang` or `rank-dead`.
        run_id: Of the run.
        host: Node.
        attempt: Of the run.
        step: On which it happened.
        time_s: Unix time of this report.
        verdict: Who is to blame.
        ranks: Evidence of every local rank.
        records: By rank, its last steps.
        hints: What else is known: lack of memory, for example.
        log: The last lines of the agent's log.
    """

    rule: str
    run_id: str
    host: str
    attempt: int
    step: int
    time_s: float
    verdict: HangVerdict
    ranks: tuple[RankEvidence, ...]
    records: Mapping[int, Sequence[StepRecord]]
    hints: tuple[str, ...]
    log: tuple[str, ...]


def report_name(alert: Alert, host: str) -> str:
    """Return the file name, without a suffix, of the post-mortem of an alert on the node `host`."""
    return f"post-mortem-{alert.rule}-{host}-attempt{alert.attempt}-step{alert.first_step}"


def report_url(alert: Alert, host: str) -> str | None:
    """Return the URL path of an alert's post-mortem; None for an alert that is neither `hang` nor `rank-dead`."""
    return f"api/reports/{report_name(alert, host)}" if alert.rule in RULES else None


def write_report(folder: Path, name: str, report: PostMortem) -> None:
    """Write the post-mortem to `<name>.json` and `<name>.md` in `folder`, readable by their owner only.

    Raises:
        OSError: They cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    plain = as_plain(report) | {"records": _plain_records(report.records)}
    replace_file(folder / f"{name}.json", json.dumps(plain, indent=1).encode())
    replace_file(folder / f"{name}.md", render_report(report).encode(errors="replace"))


def read_tail(path: Path) -> tuple[str, ...]:
    """Return the last lines of the log file `path`; () where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            return tuple(file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:])
    except OSError:
        return ()


def render_report(report: PostMortem) -> str:
    """Return the post-mortem of a hang or a crash as Markdown."""
    title = "Hang" if report.rule == "hang" else "Crash"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.time_s))
    lines = [
        f"# {title} of run {report.run_id} at step {report.step}",
        "",
        f"**{report.verdict.text}**",
        "",
        f"Seen {when} on node {report.host}, attempt {report.attempt}.",
        *(f"* {hint}" for hint in report.hints),
        "",
        *_table(report),
    ]
    for one in report.ranks:
        lines += ["", *_section(one, report.records.get(one.rank, ()))]
    if report.log:
        lines += ["", "## Agent's log", "", "```", *report.log, "```"]
    return "\n".join(lines) + "\n"


def _table(report: PostMortem) -> Iterator[str]:
    blamed = {culprit.rank: culprit.text for culprit in report.verdict.culprits}
    yield "| rank | finding | phase | step | silent | process | waits in |"
    yield "|---|---|---|---|---|---|---|"
    for one in report.ranks:
        finding = blamed.get(one.rank) or ("waits" if one.rank in report.verdict.waiting else one.life)
        calls = [
            f"{call.op} #{call.sequence} of {group.name}" for group in one.groups or () for call in group.in_flight[:2]
        ]
        cells = [one.rank, finding, one.phase, one.step, f"{one.silent_s:.0f} s", one.process_state or "–"]
        yield f"| {' | '.join(_cell(cell) for cell in [*cells, ', '.join(calls) or '–'])} |"


def _section(one: RankEvidence, records: Sequence[StepRecord]) -> Iterator[str]:
    yield f"## Rank {one.rank}"
    yield ""
    for record in list(records)[-_SHOWN_STEPS:]:
        values = ", ".join(f"{name} {value:.6g}" for name, value in list(record.values.items())[:8])
        yield f"* step {record.step}: {values or 'no numbers'}"
    for group in one.groups or ():
        members = spans(group.ranks) if group.ranks else "members not known"
        yield f"* group {group.name} ({members}): entered #{group.entered}"
    for rung in one.rungs:
        yield f"* {rung.name}: {rung.said}"
    for child in one.children:
        yield f"* child {child.pid} ({child.name}): state {child.state}"
    if one.error:
        yield from ("", "```", *one.error.rstrip().splitlines(), "```")
    for stack in one.stacks:
        yield from _stack_lines(stack, "")
    for child in one.children:
        for stack in child.stacks[:2]:
            yield from _stack_lines(stack, f"child {child.pid}, ")


def _stack_lines(stack: ThreadStack, of: str) -> Iterator[str]:
    yield from (
        "",
        f"{of}{'main thread' if stack.is_main else f'thread {stack.thread}'}, innermost frame first:",
        "",
        "```",
    )
    for frame in stack.frames[:_SHOWN_FRAMES]:
        yield f"{frame.function} ({frame.file}:{frame.line})"
    yield "```"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _plain_records(records: Mapping[int, Sequence[StepRecord]]) -> dict[str, list[dict[str, object]]]:
    return {
        str(rank): [
            {
                "step": record.step,
                "time_s": record.time_s,
                "values": {name: value if math.isfinite(value) else None for name, value in record.values.items()},
            }
            for record in steps
        ]
        for rank, steps in records.items()
    }
