"""Points of a step: their numbers come from whole tensors, and what they are called from docs/exporters.md."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.exporters.expositions import MEASURED, comm
from tests.exporters.expositions import step as step_key
from tests.exporters.influxdb.test_line_protocol import read
from tests.exporters.runs import LOSS, STEP_TIME, LargeRun, block_of
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.exporters.influxdb.points import RankPoints
from trainermon.exporters.store.segment_follower import StoredSeries

DOCUMENT = Path(__file__).parents[3] / "docs" / "exporters.md"


def table_of(keys, *, not_counted=()):
    return [
        StoredSeries(key, 10, Placement(dtype="float32", shape=(10,), in_global_norm=key not in not_counted))
        for key in keys
    ]


def points_of(tensors, *, step=7, budget=300, not_counted=(), table=None):
    """Return, by measurement and the values of its further tags, fields as numbers; and the number left out."""
    keys = list(tensors)
    points = RankPoints("run", 1, table or table_of(keys, not_counted=not_counted), budget=budget)
    lines = points.lines(block_of(tensors, keys, step=step), attempt=2)
    found = {}
    for line in lines.text:
        measurement, tags, fields, time = read(line)
        assert (tags.pop("run"), tags.pop("rank"), time) == ("run", "1", (1_700_000_000 + step) * 1_000_000)
        assert fields["step"] == f"{step}i"
        key = (measurement, *tags.values())
        assert key not in found
        found[key] = {name: float(text.removesuffix("i")) for name, text in fields.items()}
    return found, lines.num_nonfinite


def gradient(name):
    return SeriesKey(Kind.GRAD_REDUCED, name)


def test_a_module_has_one_point_with_what_is_known_of_its_elements():
    values = np.array([0.1, -3.0, 0.0, np.nan, np.inf])

    found, num_nonfinite = points_of({gradient("w"): values})

    finite = values[:3]
    assert found["trainermon_grad_reduced", "w"] == pytest.approx(
        {
            "step": 7,
            "count": 5,
            "nonfinite": 2,
            "zeros": 1,
            "max": 0.1,
            "min": -3.0,
            "mean": finite.mean(),
            "rms": np.sqrt(np.square(finite).mean()),
        },
        rel=1e-15,
    )
    assert found["trainermon_nonfinite_elements", "grad_reduced"]["value"] == 2
    assert num_nonfinite == 2  # gradient_norm and gradient_norm_part: a norm over the rest would look healthy


def test_modules_merge_to_fit_the_budget_and_no_element_is_lost():
    random = np.random.default_rng(0)
    tensors = {gradient(f"h.{i}.{end}"): random.normal(size=10) for i in range(4) for end in ("w", "b")}

    found, _ = points_of(tensors, budget=2 + 4)  # the step's own point and that of the kind, then 4 modules

    modules = {key[1]: fields for key, fields in found.items() if key[0] == "trainermon_grad_reduced"}
    assert set(modules) == {"h.0", "h.1", "h.2", "h.3"}
    for name, fields in modules.items():
        whole = np.concatenate([tensors[gradient(f"{name}.{end}")] for end in ("w", "b")])
        assert fields["rms"] == pytest.approx(np.sqrt(np.square(whole).mean()), rel=1e-12)
        assert (fields["min"], fields["max"], fields["count"]) == (whole.min(), whole.max(), 20)


def test_a_large_model_stays_within_the_budget():
    run = LargeRun(num_layers=80)
    points = RankPoints("run", 0, table_of(run.keys()), budget=97)

    series = {line.split(" ", 1)[0] for line in points.lines(run.block(), attempt=1).text}

    assert 90 <= len(series) <= 97


def test_numbers_of_the_step_are_fields_of_one_point():
    tensors = {LOSS: np.array([1.0, 2.0]), STEP_TIME: np.array([0.25]), gradient("w"): np.array([3.0, 4.0])}
    tensors |= {gradient("copy"): np.array([12.0])}
    tensors |= {key: np.array([value]) for key, (_, value) in MEASURED.items()}

    found, _ = points_of(tensors, not_counted={gradient("copy")})

    assert found["trainermon_step",] == {
        "step": 7,
        "attempt": 2,
        "loss": 1.5,
        "duration_seconds": 0.25,
        "gradient_norm": 13.0,
        "gradient_norm_part": 5.0,
        "global_gradient_norm": 3.5,
        "clip_ratio": 0.25,
        "loss_scale": 65536.0,
        "skipped_steps": 1.0,
        "tokens_per_second": 1e5,
    }
    assert found["trainermon_learning_rate", "0"] == {"step": 7, "value": 3e-4}


def test_what_is_known_of_the_accelerator_has_a_point_of_its_own():
    readings = {step_key("accelerator_power_watts"): np.array([400.0, 500.0]), step_key("accuracy"): np.array([0.5])}

    found, _ = points_of(readings)

    assert found["trainermon_accelerator",] == {"step": 7, "power_watts": 450.0}
    assert found["trainermon_recorded_value", "accuracy"] == {"step": 7, "value": 0.5}
    assert len(found) == 4  # and the step's own, and its elements that are not finite


def test_collectives_have_one_point_per_group():
    tensors = {comm("dp_cp", slot): np.array([value]) for slot, value in (("sequence", 40.0), ("bytes", 1e6))}
    tensors |= {comm("dp_cp.all_reduce", "wait_seconds", call): np.array([0.25]) for call in range(2)}
    tensors |= {comm("embedding", "in_flight"): np.array([1.0])}

    found, _ = points_of(tensors)

    assert found["trainermon_collective", "dp_cp"] == {
        "step": 7,
        "collectives": 40,
        "bytes": 1e6,
        "wait_seconds": 0.5,
    }
    assert found["trainermon_collective", "embedding"] == {"step": 7, "in_flight": 1}


def test_what_is_not_finite_is_not_sent_but_counted():
    found, num_nonfinite = points_of({LOSS: np.array([np.nan]), gradient("w"): np.full(2, np.inf)})

    assert found["trainermon_step",] == {"step": 7, "attempt": 2}
    assert found["trainermon_grad_reduced", "w"] == {"step": 7, "count": 2, "nonfinite": 2, "zeros": 0}
    assert num_nonfinite == 3 + 4  # loss and both norms; min, max, mean, rms
    assert found["trainermon_nonfinite_elements", "loss"]["value"] == 1


def test_a_checksum_is_nobodys_number():
    found, _ = points_of({SeriesKey(Kind.CHECKSUM, "w"): np.ones(1), LOSS: np.ones(1)})

    assert {key[0] for key in found} == {"trainermon_step", "trainermon_nonfinite_elements"}
    assert ("trainermon_nonfinite_elements", "checksum") not in found


def test_what_a_step_does_not_tell_has_no_point():
    keys = [gradient("a"), gradient("b"), step_key("loss_scale"), comm("tp", "sequence")]

    found, _ = points_of({gradient("b"): np.ones(2)}, table=table_of([gradient("b"), *keys[:1], *keys[2:]]))

    assert set(found) == {
        ("trainermon_step",),
        ("trainermon_grad_reduced", "b"),
        ("trainermon_nonfinite_elements", "grad_reduced"),
    }


def test_every_field_and_measurement_is_documented():
    keys = [LOSS, STEP_TIME, *MEASURED, step_key("tokens"), step_key("accuracy"), gradient("w")]
    keys += [comm("dp", slot) for slot in ("count", "sequence", "in_flight", "bytes", "unseen", "unfinished")]
    keys += [comm("dp.all_reduce", "wait_seconds")]
    section = DOCUMENT.read_text(encoding="utf-8").partition("## InfluxDB")[2]
    documented = set(re.findall(r"`(\w+)`", section))

    found, _ = points_of({key: np.ones(1) for key in keys})

    fields = {name for fields in found.values() for name in fields}
    assert {key[0] for key in found} - {"trainermon_grad_reduced"} <= documented
    assert "trainermon_grad_reduced" in section
    assert fields <= documented
