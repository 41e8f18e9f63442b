"""Event files with MindFormers' tags, read back by TensorBoard's own reader; numbers from numpy."""

import dataclasses
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

from tests.exporters.runs import block_of, header_of
from trainermon.core.config import MindFormersConfig
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.export import ExportSettings, make_exporter

EVERYTHING = MindFormersConfig(
    local_norm=("tensorboard", "log"),
    device_local_norm=("tensorboard", "log"),
    local_loss=("tensorboard", "log"),
    device_local_loss=("tensorboard",),
    optimizer_state=("tensorboard",),
    weight_state=("tensorboard",),
    throughput_baseline=4.0,
)
WEIGHT, BIAS = "layers.0.wq.weight", "layers.0.wq.bias"
NUMBERS = {"learning_rate": 0.5, "loss_scale": 1024.0, "global_grad_norm": 3.0, "duration_seconds": 0.25, "samples": 8}
WORLD, REPLICAS = 4, 2


def tensors(step):
    rng = np.random.default_rng(step)
    found = {SeriesKey(Kind.STEP, name): np.array(float(value)) for name, value in NUMBERS.items()}
    found |= {SeriesKey(Kind.LOSS, "loss", micro_step=micro): np.array(2.0 + micro - step / 8) for micro in (0, 1)}
    for kind in (Kind.GRAD_UNREDUCED, Kind.GRAD_REDUCED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM_UPDATED):
        found |= {SeriesKey(kind, WEIGHT): rng.standard_normal((8, 4)), SeriesKey(kind, BIAS): rng.standard_normal(8)}
    found[SeriesKey(Kind.GRAD_UNREDUCED, WEIGHT, micro_step=1)] = rng.standard_normal((8, 4))
    return found


KEYS = list(tensors(0))


def export(run_dir, steps, *, attempt=1, change=None):
    head = header_of(0, world_size=WORLD, attempt=attempt)
    place = dataclasses.replace(head.coordinates, dp_size=REPLICAS, tp_size=2)
    head = dataclasses.replace(head, coordinates=place, series=tuple(KEYS), placements=(None,) * len(KEYS))
    exporter = make_exporter("mindformers", ExportSettings(run_dir=run_dir, mindformers=EVERYTHING))
    for step in steps:
        found = tensors(step)
        if change is not None:
            change(found)
        exporter.write(head, block_of(found, KEYS, step=step))
    exporter.flush()
    exporter.close()


def scalars(folder):
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def norm(*arrays):
    return math.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays))


def test_tags_are_those_of_mindformers(tmp_path):
    export(tmp_path, range(2))

    by_samples = {"learning-rate", "batch-size", "loss", "loss-scale", "grad-norm", "iteration-time", "throughput"}
    assert set(scalars(tmp_path / "mindformers" / "rank_0")) == by_samples | {
        "B-samples-per-day",
        "local_loss",
        "device_accum_local_loss",
        "device_local_norm",
        "weight_norm",
        "throughput_linearity",
        *(f"{metric}/{name}" for metric in ("local_norm", "adam_m_norm", "adam_v_norm") for name in (WEIGHT, BIAS)),
    }
    assert set(scalars(tmp_path / "mindformers" / "rank_0" / "samples")) == {f"{tag}-vs-samples" for tag in by_samples}


def test_values_are_right(tmp_path):
    export(tmp_path, range(3))

    found = {tag: dict(points) for tag, points in scalars(tmp_path / "mindformers" / "rank_0").items()}
    for step in range(3):
        of = tensors(step)
        gradients = [of[SeriesKey(Kind.GRAD_UNREDUCED, name)] for name in (WEIGHT, BIAS)]
        expected = {
            f"local_norm/{WEIGHT}": norm(gradients[0]),
            "device_local_norm": norm(*gradients),
            f"adam_v_norm/{BIAS}": norm(of[SeriesKey(Kind.EXP_AVG_SQ, BIAS)]),
            "weight_norm": norm(*(of[SeriesKey(Kind.PARAM_UPDATED, name)] for name in (WEIGHT, BIAS))),
            "loss": 2.5 - step / 8,
            "batch-size": 16,  # 8 on each of two replicas
            "iteration-time": 250,
            "throughput": 16 / 4 / 0.25,
            "throughput_linearity": 16 / 4 / 0.25 / 4.0,
            "B-samples-per-day": 16 / 0.25 * 86400 / 1e9,
        }
        assert {tag: found[tag][step] for tag in expected} == pytest.approx(expected, rel=1e-6)
    losses = scalars(tmp_path / "mindformers" / "rank_0" / "samples")["loss-vs-samples"]
    assert [at for at, _ in losses] == [16, 32, 48]


def test_the_log_has_what_goes_there(tmp_path):
    export(tmp_path, [7])

    lines = (tmp_path / "mindformers" / "rank_0.log").read_text().splitlines()
    assert "step 7  loss: 1.625" in lines
    assert [line for line in lines if "micro_local_loss" in line] == [
        "step 7  micro_local_loss: 1.125",
        "step 7  micro_local_loss: 2.125",
    ]
    assert not any("adam_m_norm" in line or "weight_norm" in line for line in lines)


@pytest.mark.parametrize("attempt", [1, 2])
def test_steps_that_come_again_stand_there_once(tmp_path, attempt):
    export(tmp_path, range(4))
    export(tmp_path, range(2, 6), attempt=attempt)

    root = tmp_path / "mindformers"
    assert [step for step, _ in scalars(root / "rank_0")["loss"]] == list(range(6))
    assert [at for at, _ in scalars(root / "rank_0" / "samples")["loss-vs-samples"]] == [16 * n for n in range(1, 7)]
    steps = [line.split()[1] for line in (root / "rank_0.log").read_text().splitlines() if " loss:" in line]
    assert steps == [str(step) for step in range(6)]


def test_what_is_not_finite_is_told(tmp_path):
    def spoil(found):
        found[SeriesKey(Kind.GRAD_UNREDUCED, WEIGHT)][0, 0] = np.inf
        found[SeriesKey(Kind.GRAD_UNREDUCED, BIAS)][0] = np.nan

    export(tmp_path, [0], change=spoil)

    found = scalars(tmp_path / "mindformers" / "rank_0")
    assert found[f"local_norm/{WEIGHT}"] == [(0, math.inf)]
    assert math.isnan(found["device_local_norm"][0][1])


def test_what_the_script_does_not_record_is_missing(tmp_path):
    def forget(found):
        for name in ("samples", "learning_rate", "duration_seconds"):
            del found[SeriesKey(Kind.STEP, name)]

    export(tmp_path, [0], change=forget)

    tags = set(scalars(tmp_path / "mindformers" / "rank_0"))
    assert tags.isdisjoint({"batch-size", "learning-rate", "throughput", "throughput_linearity", "iteration-time"})
    assert "loss" in tags
