"""What Prometheus gets to see of alerts that begin, last and end."""

import dataclasses

from trainermon.core.values import Alert, AlertState, Finding, Kind, SeriesKey, Severity
from trainermon.exporters.prometheus.alert_series import LINGER_S, MAX_SHOWN, AlertSeries

SPIKE = ("loss-spike", Severity.WARNING)
NONFINITE = ("gradient-nonfinite", Severity.FATAL)


def alert(rule=SPIKE, *, rank=0, first_step=5, state=AlertState.FIRING, time_s=1000.0) -> Alert:
    return Alert(
        id=f"{rule[0]}-{rank}-{first_step}",
        rule=rule[0],
        severity=rule[1],
        state=state,
        attempt=0,
        rank=rank,
        step=first_step + 9,
        first_step=first_step,
        time_s=time_s,
        kind=Kind.LOSS,
        value=1.0,
        baseline=0.5,
        num_series=1,
        findings=(),
        message="",
    )


def shown(alerts: list[Alert], *, now_s: float = 1000.0) -> dict[str, float]:
    series = AlertSeries("r", {})
    series.set(alerts, now_s=now_s)
    return {
        prefix.strip(): value
        for _, samples in series.samples()
        for prefix, value in zip(samples.prefixes, samples.values, strict=True)
    }


def first_step(rank: int, rule=SPIKE) -> str:
    return f'trainermon_alert_first_step{{run="r",rank="{rank}",rule="{rule[0]}",severity="{rule[1]}"}}'


def test_an_alert_names_its_rank_and_the_step_on_which_it_began():
    values = shown([alert(rank=3, first_step=812)])

    assert values[first_step(3)] == 812


def test_an_alert_that_is_over_stays_for_a_minute_so_that_a_scrape_finds_it():
    over = alert(state=AlertState.RESOLVED, time_s=1000.0)

    assert shown([over], now_s=1000.0 + LINGER_S - 1)[first_step(0)] == 5
    assert first_step(0) not in shown([over], now_s=1000.0 + LINGER_S + 1)


def test_what_began_and_ended_between_two_scrapes_is_counted():
    values = shown([alert(state=AlertState.RESOLVED), alert(first_step=70)])

    labels = '{run="r",rule="loss-spike",severity="warning"}'
    assert values[f"trainermon_alerts_total{labels}"] == 2
    assert values[f"trainermon_alerts_firing{labels}"] == 1


def test_the_alert_that_is_on_hides_the_one_before_on_the_same_rank():
    before = alert(first_step=5, state=AlertState.RESOLVED)
    on = alert(first_step=70)

    assert shown([on, before])[first_step(0)] == 70
    assert shown([before, on])[first_step(0)] == 70


def test_of_too_many_alerts_the_most_severe_and_oldest_have_series():
    spikes = [alert(rank=rank, first_step=1000 - rank) for rank in range(MAX_SHOWN + 50)]

    values = shown([*spikes, alert(NONFINITE, rank=7, first_step=2000)])

    steps = {name: value for name, value in values.items() if name.startswith("trainermon_alert_first_step")}
    assert len(steps) == MAX_SHOWN
    assert first_step(7, NONFINITE) in steps
    assert first_step(MAX_SHOWN + 49) in steps
    assert first_step(0) not in steps


def test_an_alert_keeps_the_series_that_was_worst_first():
    """Another label would be another alert to Prometheus, and people would be told again."""
    series = AlertSeries("r", {})
    keys = [SeriesKey(Kind.GRAD_REDUCED, f"h.{number}.weight") for number in range(3)]
    findings = [Finding(series=key, value=1.0, baseline=0.5) for key in keys]

    names = []
    for number in range(3):
        worst_first = (*findings[number:], *findings[:number])
        series.set([dataclasses.replace(alert(), findings=worst_first)], now_s=1000.0)
        names += [prefix for _, samples in series.samples() for prefix in samples.prefixes if "first_step" in prefix]

    assert len(names) == 3
    assert {'series="h.0.weight"' in name for name in names} == {True}
