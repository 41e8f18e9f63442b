"""Conditions with a limit that is known beforehand: thresholds on averages, ratios of two series, saturation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.alerts.series import INF, NAN, block, feed, header, rules
from trainermon.alerts.engine import RuleEngine
from trainermon.core.values import Alert, AlertState, Kind, Placement, SeriesKey

FIRING, RESOLVED = AlertState.FIRING, AlertState.RESOLVED
SKIPPED = SeriesKey(Kind.STEP, "skipped")
UPDATE, OTHER_UPDATE = SeriesKey(Kind.UPDATE, "a.weight"), SeriesKey(Kind.UPDATE, "b.weight")
PARAM, OTHER_PARAM = SeriesKey(Kind.PARAM_ORIGIN, "a.weight"), SeriesKey(Kind.PARAM_ORIGIN, "b.weight")
RATE, OTHER_RATE = SeriesKey(Kind.STEP, "learning_rate", "0"), SeriesKey(Kind.STEP, "learning_rate", "1")

OFTEN = """
rules:
  - name: often
    severity: warning
    on: {kind: step, names: [skipped], statistic: mean}
    when: {threshold: {above: 0.25, over: 20}}
    keep: {steps: 1}
    summary: "{value}"
"""
RATIO = """
rules:
  - name: ratio
    severity: warning
    on: {kind: update, statistic: rms}
    when: {ratio: {over: param_origin, above: 0.1, times_learning_rate: true}}
    for: 2
    keep: {steps: 1}
    summary: "{worst} {value}"
"""
SATURATED = """
rules:
  - name: near-overflow
    severity: warning
    on: {kind: actv}
    when: {saturated: {share: 0.5}}
    keep: {steps: 1}
    summary: "{worst} {value} of {usual}"
"""


def states(alerts: list[Alert]) -> list[tuple[AlertState, int]]:
    return [(alert.state, alert.step) for alert in alerts]


# -- threshold on an average -------------------------------------------------------------------------------------------


def test_average_is_judged_once_there_are_so_many_values(tmp_path: Path) -> None:
    every_third = [float(step % 3 == 0) for step in range(40)]

    found = feed(
        RuleEngine(rules(tmp_path, OFTEN)), [SKIPPED], (block(step, {0: x}) for step, x in enumerate(every_third))
    )

    assert states(found) == [(FIRING, 19)]
    assert found[0].value == pytest.approx(7 / 20)


def test_average_below_the_limit_is_quiet_and_a_past_burst_is_forgotten(tmp_path: Path) -> None:
    burst = [float(10 <= step < 16) for step in range(60)]

    found = feed(RuleEngine(rules(tmp_path, OFTEN)), [SKIPPED], (block(step, {0: x}) for step, x in enumerate(burst)))

    assert states(found) == [(FIRING, 19), (RESOLVED, 30)]  # 6 of the 20 values up to step 29, 5 of those up to 30


def test_values_that_are_none_do_not_enter_the_average(tmp_path: Path) -> None:
    values = [NAN if step % 2 else 1.0 for step in range(60)]

    found = feed(RuleEngine(rules(tmp_path, OFTEN)), [SKIPPED], (block(step, {0: x}) for step, x in enumerate(values)))

    assert states(found) == [(FIRING, 38)]
    assert found[0].value == 1.0


# -- ratio -------------------------------------------------------------------------------------------------------------


def test_ratio_divides_series_of_one_name_and_takes_the_largest_rate(tmp_path: Path) -> None:
    keys = [OTHER_PARAM, UPDATE, PARAM, OTHER_UPDATE, RATE, OTHER_RATE]
    rows = {
        0: [3.0, -3.0],
        1: [2.0, 2.0],
        2: [4.0, 4.0],
        3: [1.0],
        4: 0.1,
        5: 0.3,
    }  # 0.15 and 0.1, of which one is above

    found = feed(RuleEngine(rules(tmp_path, RATIO)), keys, (block(step, rows) for step in range(3)))

    assert states(found) == [(FIRING, 1)]
    assert [finding.series for finding in found[0].findings] == [UPDATE]
    assert found[0].value == pytest.approx(2.0 / 4.0 * 0.3)


def test_ratio_resolves_when_the_rate_falls(tmp_path: Path) -> None:
    def step(number: int) -> dict[int, float]:
        return {0: 1.0, 1: 1.0, 2: 0.2 if number < 5 else 0.05}

    found = feed(RuleEngine(rules(tmp_path, RATIO)), [UPDATE, PARAM, RATE], (block(n, step(n)) for n in range(10)))

    assert states(found) == [(FIRING, 1), (RESOLVED, 5)]


@pytest.mark.parametrize(
    "rows",
    [{0: 5.0, 2: 0.5}, {0: 5.0, 1: 0.0, 2: 0.5}, {0: 5.0, 1: NAN, 2: 0.5}, {0: NAN, 1: 1.0, 2: 0.5}, {0: 5.0, 1: 1.0}],
    ids=["no divisor", "divisor zero", "divisor nan", "nan", "no rate"],
)
def test_ratio_that_is_not_defined_is_not_judged(tmp_path: Path, rows: dict[int, float]) -> None:
    engine = RuleEngine(rules(tmp_path, RATIO))

    assert feed(engine, [UPDATE, PARAM, RATE], (block(step, rows) for step in range(5))) == []


def test_ratio_finds_a_divisor_that_joins_the_table_later(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, RATIO))
    feed(engine, [UPDATE, RATE], [block(0, {0: 5.0, 1: 0.5})])

    found = feed(engine, [UPDATE, RATE, PARAM], [block(step, {0: 5.0, 1: 0.5, 2: 1.0}) for step in range(1, 4)])

    assert states(found) == [(FIRING, 2)]


def test_ratio_is_right_after_a_restart_of_the_job_with_another_table(tmp_path: Path) -> None:
    engine = RuleEngine(rules(tmp_path, RATIO))
    feed(engine, [UPDATE, PARAM, RATE], [block(step, {0: 1.0, 1: 1.0, 2: 0.01}) for step in range(3)])

    found = feed(engine, [RATE, PARAM, UPDATE], [block(n, {0: 0.01, 1: 1.0, 2: 20.0}) for n in range(3)], attempt=1)

    assert states(found) == [(FIRING, 1)]
    assert found[0].value == pytest.approx(0.2)


# -- saturation --------------------------------------------------------------------------------------------------------


def saturation(tmp_path: Path, dtype: str, values: list[list[float]]) -> list[Alert]:
    engine, key = RuleEngine(rules(tmp_path, SATURATED)), SeriesKey(Kind.ACTV, "h", "output.0")
    placed = dataclasses.replace(header(), series=(key,), placements=(Placement(dtype=dtype, shape=(2,)),))
    steps = (engine.evaluate(placed, [key], block(step, {0: value})) for step, value in enumerate(values))
    return [alert for alerts in steps for alert in alerts]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("float16", 65504.0),
        ("bfloat16", float.fromhex("0x1.FEp127")),
        ("float32", float(np.finfo(np.float32).max)),
        ("float8_e4m3fn", 448.0),
    ],
)
def test_half_of_the_types_largest_number_is_too_much(tmp_path: Path, dtype: str, largest: float) -> None:
    share = [[0.1, 0.2], [0.49, -0.1], [0.0, -0.51], [0.1, 0.2]]

    found = saturation(tmp_path, dtype, [[largest * element for element in each] for each in share])

    assert states(found) == [(FIRING, 2), (RESOLVED, 3)]
    assert found[0].baseline == pytest.approx(largest)


def test_mask_that_holds_the_largest_number_by_design_is_quiet(tmp_path: Path) -> None:
    assert saturation(tmp_path, "float16", [[0.0, -65504.0]] * 5) == []


@pytest.mark.parametrize("values", [[[INF, 1.0]], [[NAN]], [[]]])
def test_what_is_not_finite_is_not_saturated_but_what_stands_beside_it_may_be(
    tmp_path: Path, values: list[list[float]]
) -> None:
    assert saturation(tmp_path, "float16", values) == []
    assert states(saturation(tmp_path, "float16", [*values, [6e4, NAN]])) == [(FIRING, 1)]


@pytest.mark.parametrize("dtype", ["int64", "bool", ""])
def test_type_that_does_not_overflow_or_is_not_known_is_not_judged(tmp_path: Path, dtype: str) -> None:
    assert saturation(tmp_path, dtype, [[1e30]] * 3) == []
