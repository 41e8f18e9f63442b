"""`trainermon rules test`: what rules would have said about a run that is stored.

The stored steps of every node pass through the rules in their order, as they did in its agent. What would have fired
is printed by rule: alerts that differ in nothing but the rank are one. What a store does not keep cannot be judged, the
types of tensors, how parameters are spread over ranks, and what only the agent sees; such rules are named.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainermon.alerts.conditions.criteria import Differs, Reported, Saturated
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import AlertRule, load_rules
from trainermon.analysis.diagnosis.wording import counted
from trainermon.core.catalogue import MODULE_SETTINGS_SERIES
from trainermon.core.errors import ConfigError, StoreError
from trainermon.core.strict import build
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.topology import OUTPUT_ROOT
from trainermon.core.values import Alert, AlertState, Kind, Placement, SeriesKey, as_plain
from trainermon.exporters.store.blocks import GrowingTables, read_blocks
from trainermon.exporters.store.query import find_run, flush_agents

BUILT_IN = "default"
FIRED = 3
"""Exit status where a rule fired; 1 and 2 stand for what could not be done, as in every command."""

_EVERYTHING = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleRehearsal:
    """The alerts that rules would have raised in a stored run.

    Attributes:
        alerts: Every alert, as it fired or grew last, by attempt, step and rank.
        ends: By id, the step on which an alert was over; those that are not here were on at the end.
        num_steps: Steps of single ranks that were judged.
        num_series: By rule, how many series of all ranks it looks at.
        faults: By rule, what its condition failed at.
    """

    alerts: tuple[Alert, ...]
    ends: Mapping[str, int]
    num_steps: int
    num_series: Mapping[str, int]
    faults: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand of `trainermon rules` that applies rules to a stored run."""
    parser.add_argument("rules", help=f"YAML file, or {BUILT_IN!r} for the built-in rules")
    parser.add_argument(
        "run",
        nargs="?",
        help=f"run directory, or run id under $TRAINERMON_OUTPUT or ./{OUTPUT_ROOT} (default: the newest)",
    )
    parser.add_argument("--json", action="store_true", help="print the alerts as JSON, one per line")
    parser.epilog = f"Exit status: 0 if no rule fired, {FIRED} if one did, 1 if it could not be found out."


def main(arguments: argparse.Namespace) -> int:
    """Apply alert rules to a stored run, print which alerts they would have raised; return 0 if none, else 3.

    An agent of the run that still runs on this node is first asked to store what it holds.

    Raises:
        RuleError: The rules are wrong.
        QueryError: There is no such run.
        StoreError: Nothing is stored of it, or it cannot be read.
    """
    rules = load_rules(None if arguments.rules == BUILT_IN else arguments.rules)
    run_dir = find_run(arguments.run)
    flush_agents(run_dir)
    with ProgressBar("judging stored steps"):
        rehearsal = rehearse(rules, run_dir)
    if arguments.json:
        sys.stdout.writelines(json.dumps(as_plain(alert)) + "\n" for alert in rehearsal.alerts)
    else:
        sys.stdout.write("\n".join(_report(rules, rehearsal, run_dir)) + "\n")
    return FIRED if rehearsal.alerts else 0


def rehearse(rules: Sequence[AlertRule], run_dir: Path, *, max_steps: int | None = None) -> RuleRehearsal:
    """Return the alerts that `rules` would have raised in a stored run. Cost: about a millisecond per step and rank.

    Of every node at most `max_steps` steps of single ranks are judged, the first ones.

    Raises:
        StoreError: Nothing is stored, or a segment cannot be read.
    """
    alerts: dict[str, Alert] = {}
    ends: dict[str, int] = {}
    num_series = dict.fromkeys((rule.name for rule in rules), 0)
    faults: dict[str, str] = {}
    num_steps = 0

    def note(changes: Sequence[Alert]) -> None:
        for alert in changes:
            if alert.state is AlertState.FIRING:
                alerts[alert.id] = alert
            else:
                ends[alert.id] = alert.step

    for segments in sorted(run_dir.glob("nodes/*/segments")):
        engine, tables = RuleEngine(rules), GrowingTables(partial(read_gradients, run_dir))
        for header, block in itertools.islice(read_blocks(segments, max_rows=_EVERYTHING), max_steps):
            num_steps += 1
            note(engine.evaluate(*tables.translate(header, block)))
        note(engine.leave(tables.ranks()))
        faults.update(engine.faults)
        for rule in rules:
            num_series[rule.name] += sum(rule.on.matches(key) for table in tables.all() for key in table)
    if not num_steps:
        raise StoreError(f"{run_dir}: no step is stored, so no rule can be tried on it")
    found = sorted(alerts.values(), key=lambda alert: (alert.attempt, alert.first_step, alert.rank))
    return RuleRehearsal(alerts=tuple(found), ends=ends, num_steps=num_steps, num_series=num_series, faults=faults)


def read_gradients(run_dir: Path, rank: int) -> dict[SeriesKey, Placement]:
    """Return the series of a rank's gradients as it begins, with placements; empty where its file does not tell."""
    try:
        told = json.loads((run_dir / "ranks" / f"rank{rank:05d}.json").read_bytes())["gradients"]
        return {
            SeriesKey(kind, name, stage=stage): build(Placement, placement)
            for name, stage, *both in told
            for kind, placement in zip((Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED), both, strict=True)
        }
    except (OSError, ValueError, LookupError, TypeError, ConfigError):  # of another version, or dumps alone
        return {}


def _report(rules: Sequence[AlertRule], rehearsal: RuleRehearsal, run_dir: Path) -> Iterator[str]:
    fired: dict[str, list[Alert]] = {}
    for alert in rehearsal.alerts:
        fired.setdefault(alert.rule, []).append(alert)
    yield f"{run_dir}: {rehearsal.num_steps} steps of single ranks, {counted(len(rules), 'rule')}"
    for rule in rules:
        if rule.name in fired:
            yield ""
            yield from _fired(rule, fired[rule.name], rehearsal.ends)
    if not fired:
        yield "no rule would have fired"
    silent = [rule for rule in rules if rule.name not in fired]
    blind = [rule.name for rule in silent if is_blind(rule)]
    yield from _listed("not to be judged from a store", blind)
    unused = [rule.name for rule in silent if rule.name not in blind and not rehearsal.num_series[rule.name]]
    yield from _listed("without any series in this run", unused)
    for name, fault in rehearsal.faults.items():
        yield f"\nswitched off, as its condition failed: {name} ({fault})"


def _fired(rule: AlertRule, alerts: Sequence[Alert], ends: Mapping[str, int]) -> Iterator[str]:
    groups: dict[tuple[int, int], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.attempt, alert.first_step), []).append(alert)
    yield f"{rule.name} ({rule.severity}): {len(groups)} time{'s' if len(groups) > 1 else ''}"
    for (attempt, first_step), members in groups.items():
        ranks = ", ".join(str(alert.rank) for alert in members)
        again = f", attempt {attempt}" if attempt > 1 else ""
        yield f"  from step {first_step}{again}, rank{'s' if len(members) > 1 else ''} {ranks}, {_end(members, ends)}"
        yield f"    {members[0].message.removeprefix(rule.name + ': ')}"


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        width = shutil.get_terminal_size().columns
        text = f"{what}: {', '.join(names)}"
        yield textwrap.fill(text, width, initial_indent="\n", subsequent_indent="  ", break_on_hyphens=False)


def _end(alerts: Sequence[Alert], ends: Mapping[str, int]) -> str:
    if any(alert.id not in ends for alert in alerts):
        return "still on at the end"
    return f"over at step {max(ends[alert.id] for alert in alerts)}"


def is_blind(rule: AlertRule) -> bool:
    """Return whether the rule needs what no store holds."""
    of_all = {Kind.STEP, Kind.COMM} & set(rule.on.kinds) and rule.on.names != (f"{MODULE_SETTINGS_SERIES}.*",)
    compares_copies = isinstance(rule.when, Differs) and not of_all
    return compares_copies or isinstance(rule.when, Reported | Saturated)
