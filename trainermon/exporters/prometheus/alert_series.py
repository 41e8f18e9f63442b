"""The series of alerts: how many of each rule there are, and on which rank and since which step one is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from trainermon.core.metrics import METRICS
from trainermon.core.values import Alert, AlertState, Severity
from trainermon.exporters.prometheus.openmetrics import MetricSamples, sample_prefix

MAX_SHOWN = 100
"""Most alerts of a node that have a series of their own, the most severe and then the oldest ones."""

LINGER_S = 60.0
"""For so long an alert that is over keeps its series, so that a scrape finds one that was short."""

FIRING = METRICS["trainermon_alerts_firing"]
TOTAL = METRICS["trainermon_alerts_total"]
FIRST_STEP = METRICS["trainermon_alert_first_step"]

_URGENCY = {severity.value: number for number, severity in enumerate(reversed(Severity))}


class AlertSeries:
    """Keeps the metrics in `/metrics` that tell of alerts of one run on one node.

    Args:
        run_id: Value of the label `run`.
        rules: Severity of every known rule by name; they stand at 0 from the start.
    """

    def __init__(self, run_id: str, rules: Mapping[str, Severity]) -> None:
        self._run_id = run_id
        self._rules = [(rule, severity.value) for rule, severity in rules.items()]
        self._firing: Counter[tuple[str, str]] = Counter()
        self._total: Counter[tuple[str, str]] = Counter()
        self._first_steps: dict[tuple[str, str, int], tuple[int, str]] = {}
        self._worst: dict[str, str] = {}  # by alert; what was worst first, as another label is another series

    def __len__(self) -> int:
        """Return the number of series that are always there."""
        return 2 * len({*self._rules, *self._total})

    def set(self, alerts: Collection[Alert], *, now_s: float, muted: Collection[str] = ()) -> None:
        """Replace the alerts that the metrics show.

        Args:
            alerts: Every alert of the run on this node, in its last state.
            now_s: Unix time; an alert that was resolved less than `LINGER_S` ago is still shown.
            muted: The ids of alerts that were silenced: they are counted in the total, but do not fire.
        """
        begun = [alert for alert in alerts if alert.state is not AlertState.PENDING]
        heard = [alert for alert in begun if alert.id not in muted]
        firing = [alert for alert in heard if alert.state is AlertState.FIRING]
        recent = [a for a in heard if a.state is AlertState.RESOLVED and abs(now_s - a.time_s) < LINGER_S]
        self._total = Counter(map(_rule, begun))
        self._firing = Counter(map(_rule, firing))
        # Of two alerts of a rule on a rank the one that is on, or else began last, is written last and stays.
        shown = sorted(recent, key=lambda alert: alert.first_step) + firing
        self._first_steps = {(*_rule(alert), alert.rank): (alert.first_step, self._series_of(alert)) for alert in shown}
        self._worst = {alert.id: self._worst[alert.id] for alert in shown}

    def samples(self) -> Iterator[tuple[str, MetricSamples]]:
        """Yield (metric name, samples) of all series, the first steps of the most urgent alerts only."""
        for metric, counts in ((FIRING, self._firing), (TOTAL, self._total)):
            for rule, severity in {**dict.fromkeys(self._rules), **dict.fromkeys(self._total)}:
                labels = {"run": self._run_id, "rule": rule, "severity": severity}
                yield metric.name, MetricSamples((sample_prefix(metric, labels),), (counts[rule, severity],))
        worst_first = sorted(self._first_steps.items(), key=lambda item: (_URGENCY[item[0][1]], item[1]))
        for (rule, severity, rank), (step, series) in worst_first[:MAX_SHOWN]:
            labels = {"run": self._run_id, "rank": str(rank), "rule": rule, "severity": severity}
            labels |= {"series": series} if series else {}
            yield FIRST_STEP.name, MetricSamples((sample_prefix(FIRST_STEP, labels),), (step,))

    def _series_of(self, alert: Alert) -> str:
        return self._worst.setdefault(alert.id, alert.findings[0].series.label if alert.findings else "")


def _rule(alert: Alert) -> tuple[str, str]:
    return alert.rule, alert.severity.value
