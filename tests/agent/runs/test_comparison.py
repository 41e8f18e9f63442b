"""Curves of several runs: equal to the store's numbers, thinned without losing what counts, and where two differ."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.dashboards.stored_runs import ELEMENTS, TOKENS, StoredCurves, add_segment, store_run
from trainermon.agent.runs.comparison import compare, matching_series, thin
from trainermon.agent.runs.curves import NUMBERS, RunCurves
from trainermon.agent.runs.first_difference import first_difference
from trainermon.agent.runs.folder import RunPlace
from trainermon.core.errors import QueryError

RMS = json.dumps(["grad_reduced", "h.1.mlp.weight", "", "rms"])
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf])


def run_of(path: Path, curves: StoredCurves) -> RunCurves:
    return RunCurves(RunPlace(path.name, store_run(path, curves)))


def test_curves_are_the_numbers_that_were_recorded(tmp_path: Path) -> None:
    curves = StoredCurves.made(120)
    curves.loss[50] = np.nan
    run = run_of(tmp_path / "run", curves)

    found = run.read([*NUMBERS, RMS])

    assert found.steps.tolist() == list(range(120))
    expected = np.where(np.isnan(curves.loss), np.inf, curves.loss)
    np.testing.assert_allclose(found.columns["loss"], expected, rtol=1e-12)
    np.testing.assert_allclose(found.columns["grad_norm"], np.sqrt(6 * ELEMENTS) * curves.rms, rtol=1e-12)
    np.testing.assert_allclose(found.columns["step_time"], 0.41)
    np.testing.assert_allclose(found.columns["tokens_per_second"], 2 * TOKENS / 0.4)
    np.testing.assert_allclose(found.columns[RMS], curves.rms, rtol=1e-12)
    np.testing.assert_allclose(found.tokens, 2 * TOKENS)


def test_a_series_is_what_a_query_over_its_rows_gives(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(30))
    segments = str(run.place.path / "nodes/node-a/segments/*.parquet")
    rows = duckdb.sql(
        "SELECT step, max(greatest(abs(min), abs(max))) FROM read_parquet($segments)"
        " WHERE kind = 'grad_reduced' AND name = 'wte.weight' GROUP BY step ORDER BY step",
        params={"segments": segments},
    ).fetchall()

    name = json.dumps(["grad_reduced", "wte.weight", "", "absmax"])
    assert list(enumerate(run.read([name]).columns[name].tolist())) == rows


def test_axes_are_steps_seconds_and_tokens(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(5))

    answers = (compare([run], ["loss"], 1000, axis) for axis in ("step", "time", "tokens"))
    steps, seconds, tokens = (answer["runs"][0]["x"] for answer in answers)

    assert steps == [0, 1, 2, 3, 4]
    assert seconds == pytest.approx([0, 0.4, 0.8, 1.2, 1.6], abs=1e-6)
    assert tokens == [2 * TOKENS * count for count in (1, 2, 3, 4, 5)]


def test_a_part_is_told_with_its_neighbours(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(50))

    assert compare([run], ["loss"], 1000, "step", (10, 14))["runs"][0]["steps"] == [9, 10, 11, 12, 13, 14, 15]


def test_what_grows_is_read_again(tmp_path: Path) -> None:
    curves = StoredCurves.made(20)
    run = run_of(tmp_path / "run", dataclasses.replace(curves, loss=curves.loss[:10]))
    before = len(run.read(["loss", RMS]).steps)

    add_segment(run.place.path, curves, range(10, 20))
    after = run.read(["loss", RMS])

    assert (before, len(after.steps), len(after.columns[RMS])) == (10, 20, 20)


@given(arrays.arrays(np.float64, st.integers(1, 400), elements=VALUES), st.integers(16, 40))
def test_thinning_keeps_extremes_ends_and_all_that_is_not_finite_apart(values: np.ndarray, buckets: int) -> None:
    kept = thin([values], buckets)

    assert kept.tolist() == sorted(set(kept.tolist()))
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert len(kept) <= max(2 * buckets, 4 * buckets + 2)
    finite = values[np.isfinite(values)]
    if finite.size:
        assert finite.min() in values[kept]
        assert finite.max() in values[kept]
    width = max(1, -(-len(values) // buckets))
    for begin in range(0, len(values), width):  # no bucket forgets that something in it was not finite
        here = values[begin : begin + width]
        assert np.isinf(here).any() == np.isinf(values[kept[(kept >= begin) & (kept < begin + width)]]).any()


def test_series_are_found_by_all_words(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(3))

    found = matching_series([run, run], "MLP grad")

    assert [series["label"] for series in found["series"]] == ["h.0.mlp.weight", "h.1.mlp.weight"]
    assert found["total"] == 2
    assert json.loads(found["series"][0]["statistics"]["rms"]) == ["grad_reduced", "h.0.mlp.weight", "", "rms"]


@pytest.mark.parametrize("name", ["lost", "[1, 2]", '["a", "b", "c", "evil(1)"]', '["a", "b", "c", 4]', "[" * 5000])
def test_what_names_no_series_is_refused(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(2))

    with pytest.raises(QueryError, match="unknown series"):
        run.read([name])


def test_a_hostile_name_is_a_name(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", StoredCurves.made(2))
    name = json.dumps(["grad_reduced", "x' OR 1 = 1 --", "'; DROP VIEW stats; --", "rms"])

    assert np.isnan(run.read([name]).columns[name]).all()


def test_a_run_that_cannot_be_read_does_not_cost_the_others(tmp_path: Path) -> None:
    good = run_of(tmp_path / "good", StoredCurves.made(4))
    gone = RunCurves(RunPlace("gone", tmp_path / "gone"))

    good_answer, gone_answer = compare([good, gone], ["loss"], 100, "step")["runs"]

    assert good_answer["steps"] == [0, 1, 2, 3]
    assert "no such run directory" in gone_answer["error"]


class TestFirstDifference:
    def differ(self, tmp_path: Path, change: dict[int, float], *, num_steps: int = 30, name: str = "loss") -> dict:
        curves = StoredCurves.made(num_steps)
        loss = curves.loss.copy()
        for step, factor in change.items():
            loss[step] *= factor
        one = run_of(tmp_path / "one", curves)
        other = run_of(tmp_path / "other", dataclasses.replace(curves, loss=loss))
        return first_difference(one, other, name)

    def test_equal_curves_do_not_differ(self, tmp_path: Path) -> None:
        found = self.differ(tmp_path, {})

        assert (found["any"], found["beyond_rounding"]) == (None, None)
        assert found["sentence"] == "The loss is the same on all 30 common steps, 0 to 29."

    def test_rounding_and_what_is_more_are_told_apart(self, tmp_path: Path) -> None:
        found = self.differ(tmp_path, {4: 1 + 1e-9, 17: 1.01, 20: 2})

        assert (found["any"]["step"], found["beyond_rounding"]["step"]) == (4, 17)
        assert found["beyond_rounding"]["relative"] == pytest.approx(0.01 / 1.01)
        assert found["sentence"].startswith("The loss differs by more than rounding from step 17 on: ")
        assert "at all from step 4 on" in found["sentence"]

    def test_rounding_alone_is_called_so(self, tmp_path: Path) -> None:
        found = self.differ(tmp_path, {4: 1 + 1e-9})

        assert found["beyond_rounding"] is None
        assert "by rounding only" in found["sentence"]

    def test_a_loss_that_is_not_finite_on_one_side_differs(self, tmp_path: Path) -> None:
        found = self.differ(tmp_path, {9: math.nan})

        assert found["beyond_rounding"]["step"] == 9
        assert found["sentence"].endswith("against not finite.")

    def test_the_command_compares_the_same_runs(self, tmp_path: Path) -> None:
        folder = tmp_path / "with a space"
        command = self.differ(folder, {1: 2.0})["command"]

        words = ["trainermon", "diagnose", str(folder / "one"), "--against", str(folder / "other")]
        assert shlex.split(command) == words

    def test_a_curve_that_one_has_not_has_no_common_step(self, tmp_path: Path) -> None:
        found = self.differ(tmp_path, {}, name=json.dumps(["actv", "h.0", "output.0", "rms"]))

        assert found["sentence"] == "rms of h.0.output.0 (actv) was recorded by both runs on no common step."
