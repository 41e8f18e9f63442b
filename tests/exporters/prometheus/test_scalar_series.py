"""Numbers of the step, process groups, features and shares in the exposition: each as what it is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exporters.expositions import GROUP, MEASURED, comm, read, step
from tests.exporters.runs import LOSS, block_of, header_of
from trainermon.core.catalogue import ROLLOUT_SERIES
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.views import RunHistory


def test_what_a_rank_measures_has_metrics_of_its_own_and_takes_no_place_of_recorded_values():
    exposition = Exposition("run")
    tensors = {key: np.array([value]) for key, (_, value) in MEASURED.items()}
    tensors |= {step(name): np.array([0.25]) for name in ROLLOUT_SERIES}
    tensors |= {step(f"value_{i}"): np.array([float(i)]) for i in range(8)}
    tensors[step("learning_rate", "1")] = np.array([5e-4])
    tensors[step("learning_rate")] = np.array([9.0])  # recorded by the script under the same name

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    values = read(exposition)
    shown = {key[0]: value for key, value in values.items() if "group=1" not in key}
    assert {name: shown[name] for name, _ in MEASURED.values()} == dict(MEASURED.values())
    assert values["trainermon_learning_rate", "rank=0", "group=1"] == 5e-4
    rollouts = {key[-1]: value for key, value in values.items() if key[0] == "trainermon_rollout_value"}
    assert rollouts == {f"name={name}": 0.25 for name in ROLLOUT_SERIES}
    recorded = [key[-1] for key in values if key[0] == "trainermon_recorded_value"]
    assert recorded == [f"name=value_{i}" for i in range(8)]


def test_skipped_steps_and_tokens_add_up_over_steps_and_micro_steps():
    exposition = Exposition("run")
    keys = [step("skipped"), step("global_grad_norm"), *(step("tokens", micro_step=number) for number in range(2))]
    norms = []

    for number, (skipped, norm, tokens) in enumerate([(0, 1, 100), (1, np.inf, 200), (1, np.nan, 300), (0, 2, np.nan)]):
        told = dict(zip(keys, np.array([[skipped], [norm], [tokens], [1.0]]), strict=True))
        known = 1 + number  # the series table grows
        exposition.update(header_of(), keys[:known], block_of({key: told[key] for key in keys[:known]}, keys))
        norms.append(read(exposition).get(("trainermon_global_gradient_norm", "rank=0")))

    values = read(exposition)
    assert values["trainermon_skipped_steps_total", "rank=0"] == 2
    assert values["trainermon_tokens_total", "rank=0"] == 301
    assert norms == [None, None, None, 2]
    assert values["trainermon_nonfinite_elements_total", "rank=0", "kind=step"] == 3


def test_the_loss_is_that_of_the_newest_steps_micro_steps_only():
    exposition = Exposition("run")
    keys = [LOSS, *(SeriesKey(Kind.LOSS, "loss", micro_step=micro_step) for micro_step in range(3))]
    shown = []

    for losses in ({0: 8.0}, {1: 1.0, 2: 2.0, 3: 6.0}, {1: 2.0, 2: 4.0}, {1: np.nan, 2: 5.0}):
        told = {keys[place]: np.array([value]) for place, value in losses.items()}
        exposition.update(header_of(), keys, block_of(told, keys))
        shown.append(read(exposition)["trainermon_loss", "rank=0"])

    assert shown[:3] == [8, 3, 3]
    assert np.isnan(shown[3])  # not the mean of the others: one part of it was not finite


def test_collectives_are_told_by_purpose_and_only_operands_have_a_root_mean_square():
    exposition = Exposition("run")
    keys = [comm("dp", slot) for slot in GROUP]
    waits = [comm("dp.all_reduce", "wait_seconds", 0), comm("dp.all_reduce", "wait_seconds", 1)]
    waits += [comm("dp.broadcast", "wait_seconds")]
    operands = [comm("dp.all_reduce", "pre.0"), comm("dp.all_reduce", "post.0", 1)]
    keys += [*waits, *operands, comm("tp", "sequence")]
    numbers = dict(zip(keys[:9], (3, 40, 1, 1000, 2, 1, 0.5, 0.25, 0.125), strict=True))

    for number in range(2):
        told = {key: np.array([float(value)]) for key, value in numbers.items()}
        told |= {operands[0]: np.full(4, 3.0), operands[1]: np.array([1.0, 7.0]), keys[-1]: np.array([7.0])}
        told[keys[1]] += number * 3
        exposition.update(header_of(), keys, block_of(told, keys, step=number))

    values = read(exposition)
    shown = {key[0]: value for key, value in values.items() if "purpose=dp" in key}
    assert shown == {
        "trainermon_collectives_total": 43,
        "trainermon_collectives_in_flight": 1,
        "trainermon_collective_wait_seconds_total": 1.75,
        "trainermon_collective_wait_duration_seconds_bucket": 6,
        "trainermon_collective_wait_duration_seconds_count": 6,
        "trainermon_collective_wait_duration_seconds_sum": 1.75,
        "trainermon_collective_bytes_total": 2000,
        "trainermon_unseen_collectives_total": 4,
        "trainermon_unfinished_collectives_total": 2,
    }
    buckets = {key[2]: n for key, n in values.items() if key[0] == "trainermon_collective_wait_duration_seconds_bucket"}
    assert [buckets[f"le={bound}"] for bound in ("0.1", "0.3", "1.0", "+Inf")] == [0, 4, 6, 6]
    assert values["trainermon_collectives_total", "rank=0", "purpose=tp"] == 7
    rms = {key[2:]: value for key, value in values.items() if key[0] == "trainermon_collective_operand_rms"}
    assert rms == {("module=dp.all_reduce", "side=pre"): 3, ("module=dp.all_reduce", "side=post"): 5}
    assert values["trainermon_left_out_series",] == 0


def test_features_and_states_are_told_apart_and_shares_are_means():
    exposition = Exposition("run")
    tensors = {
        SeriesKey(Kind.FEATURE, "h.0", "attention_entropy"): np.array([1.0, 3.0]),
        SeriesKey(Kind.FEATURE, "h.0", "attention_max_logit"): np.array([-9.0, -4.0]),
        SeriesKey(Kind.FEATURE, "h.0", "expert_load"): np.array([0.0, 0.75, 0.25]),
        SeriesKey(Kind.FEATURE, "h.0", "expert_load.top0.expert"): np.array([17.0]),
        SeriesKey(Kind.STATE, "w", "momentum_buffer"): np.array([3.0]),
        SeriesKey(Kind.STATE, "w", "row_var"): np.array([1e-6]),
        SeriesKey(Kind.MG_DIRECTION, "w"): np.array([1.0, 1.0, 0.0, 0.5]),
    }

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    values = read(exposition)
    assert {key: value for key, value in values.items() if any(part.startswith("module=") for part in key)} == {
        ("trainermon_feature_mean", "rank=0", "module=h.0", "feature=attention_entropy"): 2,
        ("trainermon_feature_max", "rank=0", "module=h.0", "feature=attention_max_logit"): -4,
        ("trainermon_feature_max", "rank=0", "module=h.0", "feature=expert_load"): 0.75,
        ("trainermon_optimizer_state_rms", "rank=0", "module=w", "state=momentum_buffer"): 3,
        ("trainermon_optimizer_state_rms", "rank=0", "module=w", "state=row_var"): 1e-6,
        ("trainermon_gradient_direction", "rank=0", "module=w"): 0.625,
    }
    assert values["trainermon_left_out_series",] == 0


def test_of_groups_without_end_the_first_are_shown():
    exposition = Exposition("run")
    tensors = {step("learning_rate", str(i)): np.ones(1) for i in range(300)}
    tensors |= {comm(f"other-{i}", slot): np.ones(1) for i in range(300) for slot in ("sequence", "in_flight")}

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    names = [key[0] for key in read(exposition)]
    assert names.count("trainermon_learning_rate") == 8
    assert names.count("trainermon_collectives_total") == names.count("trainermon_collectives_in_flight") == 8


@pytest.mark.parametrize("losses", [[np.nan], [np.inf], [2.0, -np.inf], [np.nan, np.inf]])
def test_the_page_is_told_of_a_loss_that_is_not_finite_and_not_of_a_gap(losses):
    history = RunHistory()
    keys = [SeriesKey(Kind.LOSS, "loss", micro_step=place) for place in range(len(losses))]
    told = {key: np.array([value]) for key, value in zip(keys, losses, strict=True)}
    history.add(header_of(), keys, block_of(told, keys))
    history.end(0)

    # The page reads this text as infinity, and its tile says "not finite"; null would be a dash.
    assert history.latest.as_plain()["loss"] == "NaN"
    assert history.lines(["loss"])["series"]["loss"] == ["NaN"]
