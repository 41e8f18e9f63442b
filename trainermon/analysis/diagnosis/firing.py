"""Which alerts of a run still fire: what is wrong with it besides its values, as a rank that is late."""

from __future__ import annotations

from pathlib import Path

from trainermon.alerts.log import AlertLog
from trainermon.analysis.diagnosis.wording import rank_list
from trainermon.core.values import Alert, AlertState


def firing_alerts(run_dir: Path, attempt: int) -> tuple[str, ...]:
    """Return a text for each rule that still fires, `straggler (rank 1, since step 131)`, the first to fire first.

    Empty if none does in this attempt. Reads the alert logs of all nodes.
    """
    rules: dict[str, list[Alert]] = {}
    for log in sorted(run_dir.glob("nodes/*/alerts.jsonl")):
        for alert in AlertLog(log).open_alerts():
            if alert.state is AlertState.FIRING and alert.attempt == attempt:
                rules.setdefault(alert.rule, []).append(alert)
    since = {rule: min(alert.first_step for alert in alerts) for rule, alerts in rules.items()}
    return tuple(
        f"{rule} ({rank_list(sorted({alert.rank for alert in rules[rule]}))}, since step {since[rule]})"
        for rule in sorted(rules, key=lambda rule: (since[rule], rule))
    )
