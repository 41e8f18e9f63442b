"""The monitor's check on itself: rows of all ranks against element counts and the framework's own norm."""

import dataclasses
import math

import numpy as np
import pytest

from trainermon.agent.integrity import STEPS_TO_FIRE, IntegrityCheck
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.rules import load_rules
from trainermon.core.catalogue import GLOBAL_NORM_SERIES, LOSS_SCALE_SERIES, SKIPPED_SERIES
from trainermon.core.journal import Header
from trainermon.core.values import AlertState, Coordinates, Kind, Placement, SeriesKey, StatBlock

WHOLE = np.arange(1.0, 11.0)
SCALARS = (GLOBAL_NORM_SERIES, LOSS_SCALE_SERIES, SKIPPED_SERIES)
KEYS = (SeriesKey(Kind.GRAD_REDUCED, "weight"), *(SeriesKey(Kind.STEP, name) for name in SCALARS))


def header(rank, *, attempt=1, world_size=2, **placement):
    at = Placement(**{"dtype": "float32", "shape": (5, 2), "partitioned_over": ("dp",), **placement})
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=world_size),
        host="node",
        pid=1,
        started_s=0.0,
        version="1",
        series=KEYS,
        placements=(at, None, None, None),
    )


def block(step, piece, *, norm, loss_scale=1.0, skipped=0.0, nans=0):
    rows = [[piece.size, piece.min(), piece.max(), piece.sum(), np.square(piece).sum(), 0, nans, 0]]
    rows += [scalar(value) for value in (norm, loss_scale, skipped)]
    values = np.ascontiguousarray(np.array(rows, np.float64).T)
    return StatBlock(step=step, time_s=float(step), series=np.arange(4, dtype=np.uint32), values=values)


def scalar(value):
    if math.isinf(value):
        return [1, math.inf, -math.inf, 0, 0, 0, 0, 1]
    return [1, value, value, value, value**2, value == 0, 0, 0]


def check_into(alerts, **settings):
    engine = RuleEngine(load_rules())
    return IntegrityCheck(lambda statement: alerts.extend(engine.report(statement)), **settings)


def run(pieces, *, steps=range(STEPS_TO_FIRE), check=None, placement=None, **scalars):
    alerts = []
    check = check or check_into(alerts)
    for step in steps:
        for rank, piece in enumerate(pieces):
            check.on_block(header(rank, **(placement or {})), KEYS, block(step, piece, **scalars))
    return alerts


TRUE_NORM = float(np.linalg.norm(WHOLE))


def test_shards_that_add_up_to_the_framework_s_norm_are_no_alert():
    assert run([WHOLE[:7], WHOLE[7:]], norm=TRUE_NORM) == []


def test_the_loss_scale_and_a_static_factor_are_divided_out():
    pieces = [WHOLE[:7] * 64 / 4, WHOLE[7:] * 64 / 4]
    assert run(pieces, norm=TRUE_NORM, loss_scale=64.0, placement={"scale": 1 / 4}) == []


def test_both_numbers_of_a_complex_element_are_counted():
    complex_half = {"dtype": "complex64", "shape": (5,)}
    assert run([WHOLE[:4], WHOLE[4:]], norm=TRUE_NORM, placement=complex_half) == []
    assert run([WHOLE[:4], WHOLE[6:]], norm=TRUE_NORM, placement=complex_half) != []


def test_ranks_that_no_framework_joins_are_not_added_up():
    alone = {"partitioned_over": ()}
    assert run([WHOLE, WHOLE * 2], norm=TRUE_NORM, placement=alone) == []
    assert run([WHOLE, WHOLE * 2], norm=TRUE_NORM) != []


@pytest.mark.parametrize("cut", [(7, 6), (7, 8)], ids=["an element counted twice", "an element that is nowhere"])
def test_shards_that_overlap_or_leave_a_gap_are_an_alert(cut):
    (alert,) = run([WHOLE[: cut[0]], WHOLE[cut[1] :]], norm=TRUE_NORM)

    assert alert.state is AlertState.FIRING
    assert (alert.step, alert.first_step) == (STEPS_TO_FIRE - 1, 0)
    assert f"weight has 10 elements, the shards have {cut[0] + 10 - cut[1]}" in alert.message


def test_a_gradient_that_was_read_too_early_is_an_alert():
    (alert,) = run([WHOLE[:7] * 1.01, WHOLE[7:]], norm=TRUE_NORM)

    assert math.isclose(alert.baseline, TRUE_NORM)
    assert "the framework's own is" in alert.message


@pytest.mark.parametrize("scalars", [{"norm": 1.0, "skipped": 1.0}, {"norm": math.inf}, {"norm": 1.0, "nans": 1}])
def test_a_skipped_or_nonfinite_step_has_no_norm_to_compare(scalars):
    assert run([WHOLE[:7], WHOLE[7:]], **scalars) == []


def test_of_a_norm_that_no_parameter_explains_both_possibilities_are_said():
    (alert,) = run([WHOLE[:7] * 1.01, WHOLE[7:]], norm=TRUE_NORM)

    assert "explained by no parameter" in alert.message
    assert "either the framework computes another norm" in alert.message
    assert "or the monitor reads other gradients" in alert.message


def test_the_parameters_whose_squares_are_the_difference_are_named():
    names = ("layers.0.sink", "layers.1.sink", "layers.0.weight", "layers.1.weight")
    keys = (*(SeriesKey(Kind.GRAD_REDUCED, name) for name in names), SeriesKey(Kind.STEP, GLOBAL_NORM_SERIES))
    split = Placement(dtype="float32", shape=(4,), partitioned_over=("tp",))
    alerts = []
    check = check_into(alerts)
    draw = np.random.default_rng(0)
    for step in range(STEPS_TO_FIRE):
        gradients = draw.standard_normal((2, 4, 2)) * np.array([0.3, 0.3, 1.0, 1.0])[None, :, None]
        norm = math.sqrt(np.square(gradients).sum() - np.square(gradients[1, :2]).sum())  # rank 0's sinks alone count
        for rank, pieces in enumerate(gradients):
            at = Coordinates(rank=rank, world_size=2, tp=rank, tp_size=2)
            told = header(rank)
            told = dataclasses.replace(told, coordinates=at, series=keys, placements=(split,) * 4 + (None,))
            rows = [[2, min(e), max(e), sum(e), np.square(e).sum(), 0, 0, 0] for e in pieces] + [scalar(norm)]
            values = np.ascontiguousarray(np.array(rows, np.float64).T)
            check.on_block(
                told, keys, StatBlock(step=step, time_s=0.0, series=np.arange(5, dtype=np.uint32), values=values)
            )

    (alert,) = alerts
    assert [finding.series.name for finding in alert.findings] == [GLOBAL_NORM_SERIES, *names[:2]]
    assert "the norm with layers.0.sink, layers.1.sink counted on tp 0 only (layers.*.sink)" in alert.message


def test_nothing_is_judged_before_every_rank_of_the_job_was_seen():
    alerts = []
    check = check_into(alerts)
    for step in range(10 * STEPS_TO_FIRE):
        check.on_block(header(0, world_size=3), KEYS, block(step, WHOLE[:2], norm=TRUE_NORM))
    assert alerts == []


def test_with_parameters_left_out_only_elements_are_counted():
    alerts = []
    run([WHOLE[:7] * 2, WHOLE[7:]], check=check_into(alerts, checks_norm=False), norm=TRUE_NORM)
    assert alerts == []


def test_an_alert_ends_when_the_sums_fit_again_and_one_odd_step_is_none():
    alerts = []
    check = check_into(alerts)
    run([WHOLE[:7] * 2, WHOLE[7:]], check=check, norm=TRUE_NORM, steps=[0])
    run([WHOLE[:7], WHOLE[7:]], check=check, norm=TRUE_NORM, steps=[1])
    assert alerts == []
    run([WHOLE[:7] * 2, WHOLE[7:]], check=check, norm=TRUE_NORM, steps=range(2, 8))
    run([WHOLE[:7], WHOLE[7:]], check=check, norm=TRUE_NORM, steps=[8])

    assert [(alert.state, alert.step) for alert in alerts] == [(AlertState.FIRING, 4), (AlertState.RESOLVED, 8)]
    assert alerts[0].id == alerts[1].id
