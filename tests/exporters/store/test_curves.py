"""Curves hold what the store holds: numpy over the tensors themselves and DuckDB's own SQL are the truth."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.exporters.recorded_run import BAD_STEP, FEATURE, GRADIENTS, SCALARS, commit, tensors_of
from tests.exporters.runs import LOSS, STEP_TIME, block_of, header_of
from trainermon.core.derived import DERIVED
from trainermon.core.errors import QueryError, StoreError
from trainermon.core.values import Kind, SeriesKey
from trainermon.exporters.store import curves
from trainermon.exporters.store.curves import CurveQuery, encode_curve, read_curve, read_steps, read_table
from trainermon.exporters.store.query import run_query
from trainermon.exporters.store.store import SegmentWriter

NUM_STEPS = 12
RANKS = (0, 1)
NUMBERS = {
    "loss": LOSS,
    "duration_s": STEP_TIME,
    **dict(zip(("global_grad_norm", "loss_scale", "learning_rates.0", "recorded.accuracy"), SCALARS, strict=True)),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("run")
    segments = run / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    commit(segments, range(NUM_STEPS // 2))
    commit(segments, range(NUM_STEPS // 2, NUM_STEPS))
    return run


def grad(number: int, **changes: object) -> CurveQuery:
    return CurveQuery(heat_map="grad_reduced", row=GRADIENTS[number].label, **changes)  # type: ignore[arg-type]


def elements(number: int, step: int, ranks: tuple[int, ...] = RANKS) -> np.ndarray:
    return np.concatenate([tensors_of(rank, step)[GRADIENTS[number]].ravel() for rank in ranks])


def test_a_line_is_what_numpy_makes_of_the_tensors(run_dir: Path) -> None:
    curve = read_curve(run_dir, grad(1))
    (line,) = curve.lines

    assert line.rank is None
    assert curve.stride == 1
    assert line.steps.tolist() == list(range(NUM_STEPS))
    for at, step in enumerate(range(NUM_STEPS)):
        values = elements(1, step)
        finite = values[np.isfinite(values)]
        np.testing.assert_allclose(line.mean[at], np.sqrt(np.mean(finite**2)), rtol=1e-12)
        assert line.nonfinite[at] == (2 if step == BAD_STEP else 0)
    assert (line.low == line.high).all()


def test_each_rank_has_a_line_of_its_own(run_dir: Path) -> None:
    curve = read_curve(run_dir, grad(0, statistic="max", by_rank=True))

    assert [line.rank for line in curve.lines] == list(RANKS)
    for line in curve.lines:
        assert line.rank is not None
        expected = [elements(0, step, (line.rank,)).max() for step in range(NUM_STEPS)]
        np.testing.assert_array_equal(line.high, expected)


@pytest.mark.parametrize("statistic", DERIVED)
def test_every_statistic_is_that_of_the_store(run_dir: Path, statistic: str) -> None:
    sql = {"absmax": "greatest(abs(min), abs(max))"}.get(statistic, statistic)
    where = f"kind = 'grad_reduced' AND name = '{GRADIENTS[2].name}' AND rank = 1"
    truth = run_query(run_dir, f"SELECT ({sql})::DOUBLE FROM stats WHERE {where} ORDER BY step").rows

    line = read_curve(run_dir, grad(2, statistic=statistic, by_rank=True)).lines[1]

    np.testing.assert_allclose(line.mean, [value for (value,) in truth], rtol=1e-12)


def test_no_peak_and_no_nonfinite_element_is_lost_where_steps_share_a_point(run_dir: Path) -> None:
    exact = read_curve(run_dir, grad(1)).lines[0]
    curve = read_curve(run_dir, grad(1, points=4))
    (line,) = curve.lines

    assert curve.stride == 3
    assert line.steps.tolist() == [0, 3, 6, 9]
    for at, first in enumerate(range(0, NUM_STEPS, 3)):
        of_point = exact.mean[first : first + 3]
        assert (line.low[at], line.high[at]) == (of_point.min(), of_point.max())
        np.testing.assert_allclose(line.mean[at], of_point.mean())
    assert line.nonfinite.sum() == 2


def test_only_the_steps_that_were_asked_for(run_dir: Path) -> None:
    (line,) = read_curve(run_dir, grad(1, first=4, last=7)).lines

    assert line.steps.tolist() == [4, 5, 6, 7]
    assert read_curve(run_dir, grad(1, first=100)).lines == []


def test_a_feature_is_a_row_too(run_dir: Path) -> None:
    query = CurveQuery(heat_map="feature/attention_entropy", row="h.0.attn", statistic="mean", by_rank=True)
    line = read_curve(run_dir, query).lines[0]

    expected = [tensors_of(0, step)[FEATURE].mean() for step in range(NUM_STEPS)]
    np.testing.assert_allclose(line.mean, expected, rtol=1e-9)


def test_the_table_has_every_digit_of_the_store(run_dir: Path) -> None:
    table = list(csv.DictReader(io.StringIO(read_table(run_dir, grad(1, by_rank=True)).decode())))
    names = ("min", "max", "sum", "sum_sq", "rms", "nans", "infs")
    sql = (
        f"SELECT step, rank, {', '.join(names)} FROM stats WHERE kind = 'grad_reduced' AND name = '{GRADIENTS[1].name}'"
    )
    truth = run_query(run_dir, f"{sql} ORDER BY step, rank").rows

    assert len(table) == len(truth) == 2 * NUM_STEPS
    for row, expected in zip(table, truth, strict=True):
        assert (int(row["step"]), int(row["rank"])) == expected[:2]
        assert [float(row[name]) for name in names] == [float(value) for value in expected[2:]]


def test_where_nothing_is_finite_the_table_has_no_value(tmp_path: Path) -> None:
    segments = tmp_path / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    key = SeriesKey(Kind.GRAD_REDUCED, "w")
    writer = SegmentWriter(segments)
    writer.add(header_of(0), [key], block_of({key: np.full(4, np.nan)}, [key], step=3))
    writer.seal({}).write()

    query = CurveQuery(heat_map="grad_reduced", row="w", statistic="absmax")
    (row,) = csv.DictReader(io.StringIO(read_table(tmp_path, query).decode()))
    (line,) = read_curve(tmp_path, query).lines

    assert [row[name] for name in ("step", "count", "nans", "nonfinite", "finite")] == ["3", "4", "4", "4", "0"]
    assert {row[name] for name in ("min", "max", "absmax", "mean", "rms", "std")} == {""}
    assert math.isnan(line.high[0])
    assert line.nonfinite[0] == 4


def test_a_row_that_there_is_not_is_an_error_that_says_so(run_dir: Path) -> None:
    with pytest.raises(QueryError, match=r"'no\.such' is no row of 'grad_reduced'"):
        read_curve(run_dir, CurveQuery(heat_map="grad_reduced", row="no.such"))
    with pytest.raises(QueryError, match="unknown statistic 'worst'"):
        grad(0, statistic="worst")
    with pytest.raises(StoreError, match="no such run directory"):
        read_curve(run_dir / "gone", grad(0))


def test_hostile_names_are_only_text(run_dir: Path) -> None:
    with pytest.raises(QueryError, match="no row"):
        read_curve(run_dir, CurveQuery(heat_map="x' OR '1'='1", row="'); DROP VIEW stats; --\0"))


def test_the_binary_format_says_what_the_lines_are(run_dir: Path) -> None:
    query = grad(1, by_rank=True)
    curve = read_curve(run_dir, query)
    content = encode_curve(curve, query)

    size = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + size])
    assert (4 + size) % 8 == 0
    assert header["lines"] == [{"rank": rank, "size": NUM_STEPS} for rank in RANKS]
    columns = np.frombuffer(content, "<f8", offset=4 + size).reshape(2, 5, NUM_STEPS)
    np.testing.assert_array_equal(columns[1][3], curve.lines[1].mean)
    assert not math.isnan(columns[1][4].sum())


def test_numbers_of_the_steps_are_those_that_were_recorded(run_dir: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(read_steps(run_dir).decode())))

    assert [(int(line["step"]), int(line["rank"])) for line in lines] == [
        (step, rank) for step in range(NUM_STEPS) for rank in RANKS
    ]
    for line in lines:
        step, rank = int(line["step"]), int(line["rank"])
        tensors = tensors_of(rank, step)
        squares = sum((tensors[key] ** 2).sum() for key in GRADIENTS)
        for column, key in NUMBERS.items():
            np.testing.assert_equal(float(line[column]), tensors[key].item())
        if (rank, step) == (1, BAD_STEP):
            assert (line["loss"], line["grad_norm"]) == ("nan", "nan")
        else:
            np.testing.assert_allclose(float(line["grad_norm"]), math.sqrt(squares), rtol=1e-12)
        assert (line["clip_ratio"], line["local_grad_norm"]) == ("", "")


def test_numbers_of_some_steps_alone_and_of_too_many_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [line.split(b",")[1] for line in read_steps(run_dir, first=4, last=5).splitlines()] == [
        b"step", b"4", b"4", b"5", b"5"
    ]  # fmt: skip
    assert len(read_steps(run_dir, first=NUM_STEPS).splitlines()) == 1
    monkeypatch.setattr(curves, "MAX_STEP_LINES", 5)
    assert len(read_steps(run_dir, first=4, last=5).splitlines()) == 5
    with pytest.raises(QueryError, match="6 lines, one per step and rank, are more than the 5 of one table"):
        read_steps(run_dir, first=4, last=6)
    with pytest.raises(StoreError, match="no such run directory"):
        read_steps(run_dir / "none")


def test_each_learning_rate_and_recorded_number_has_a_column(tmp_path: Path) -> None:
    groups = [SeriesKey(Kind.STEP, "learning_rate", str(group)) for group in range(11)]
    names = ["b", 'a "quoted", name', "=1+1", "9" * 5000]
    keys = [*groups, *(SeriesKey(Kind.STEP, name) for name in names)]
    store_steps(tmp_path, keys)

    (line,) = csv.DictReader(io.StringIO(read_steps(tmp_path).decode()))

    columns = [f"learning_rates.{group}" for group in range(11)] + [f"recorded.{name}" for name in sorted(names)]
    assert list(line)[-len(columns) :] == columns
    assert [float(line[name]) for name in columns] == [*range(11), 14, 13, 12, 11]
    assert not {"learning_rates", "recorded"} & set(line)


def test_what_only_some_steps_recorded_is_empty_on_the_others(tmp_path: Path) -> None:
    rates = [SeriesKey(Kind.STEP, "learning_rate", str(group)) for group in range(2)]
    a, b = SeriesKey(Kind.STEP, "a"), SeriesKey(Kind.STEP, "b")
    store_steps(tmp_path, [*rates, a, b], [a], [rates[0], b])

    lines = list(csv.DictReader(io.StringIO(read_steps(tmp_path).decode())))

    columns = ("learning_rates.0", "learning_rates.1", "recorded.a", "recorded.b")
    assert [tuple(line[name] for name in columns) for line in lines] == [
        ("0.0", "1.0", "2.0", "3.0"),
        ("", "", "2.0", ""),
        ("0.0", "", "", "3.0"),
    ]


def test_more_recorded_numbers_leave_room_for_fewer_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_steps(tmp_path, [SeriesKey(Kind.STEP, name) for name in "abcde"])

    monkeypatch.setattr(curves, "MAX_STEP_NUMBERS", 5)
    assert len(read_steps(tmp_path).splitlines()) == 2
    monkeypatch.setattr(curves, "MAX_STEP_NUMBERS", 4)
    with pytest.raises(QueryError, match="more than the 0 of one table with 5 numbers a line"):
        read_steps(tmp_path)


def store_steps(run_dir: Path, *steps: Sequence[SeriesKey]) -> None:
    """Store one step after the other, in which the n-th of the first step's series has the value n."""
    keys = list(steps[0])
    segments = run_dir / "nodes" / "host-a" / "segments"
    segments.mkdir(parents=True)
    writer = SegmentWriter(segments)
    header = dataclasses.replace(header_of(0), series=tuple(keys), placements=())
    for step, found in enumerate(steps):
        values = {key: np.array([float(keys.index(key))]) for key in found}
        writer.add(header, keys, block_of(values, keys, step=step))
    writer.seal({}).write()
