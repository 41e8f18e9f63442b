import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moments import numpy_moments
from trainermon.core.errors import QueryError
from trainermon.core.journal import Header
from trainermon.core.values import STATISTICS, Coordinates, Kind, Moments, Placement, SeriesKey, StatBlock
from trainermon.exporters import views
from trainermon.exporters.store.store import SegmentWriter
from trainermon.exporters.views import RunHistory

LOSS = SeriesKey(Kind.LOSS, "loss")
DURATION = SeriesKey(Kind.STEP, "duration_seconds")
GRADS = tuple(SeriesKey(Kind.GRAD_REDUCED, f"h.{layer}.w") for layer in range(3))
KEYS = (*GRADS, LOSS, DURATION)


def header(rank=0, attempt=1, keys=KEYS, placements=None, **coordinates):
    return Header(
        run_id="run",
        attempt=attempt,
        coordinates=Coordinates(rank=rank, world_size=8, **coordinates),
        host="node",
        pid=1,
        started_s=0.0,
        series=tuple(keys),
        placements=tuple(placements or [None] * len(keys)),
    )


def block(step, rows, *, time_s=0.0, series=None):
    """A block of one step; `rows` are the elements of each series."""
    values = np.ascontiguousarray(np.array([numpy_moments(row) for row in rows], np.float64).reshape(-1, 8).T)
    ids = np.arange(len(rows)) if series is None else series
    return StatBlock(step=step, time_s=time_s, series=np.asarray(ids, np.uint32), values=values)


def feed(history, head, step, rows, **options):
    history.add(head, head.series, block(step, rows, **options))


def expecting(*headers):
    history = RunHistory()
    for head in headers:
        history.start(head)
    return history


def decode(answer):
    length = int.from_bytes(answer[:4], "little")
    assert (4 + length) % 4 == 0
    head = json.loads(answer[4 : 4 + length])
    return head, np.frombuffer(answer[4 + length :], "<f4").reshape(len(head["rows"]), head["columns"])


numbers = [0.0, 1.0, -2.0, 0.5]
elements = st.lists(st.sampled_from(numbers), min_size=1, max_size=6) | st.lists(
    st.sampled_from([*numbers, math.nan, math.inf, -math.inf]), max_size=4
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(elements, elements), min_size=1, max_size=5))
def test_a_heat_map_shows_the_elements_of_all_ranks_together(steps):
    keys = (SeriesKey(Kind.ACTV, "h.0", "output.0"),)
    history = expecting(header(0, keys=keys), header(1, keys=keys))

    for step, (of_rank_0, of_rank_1) in enumerate(steps):
        feed(history, header(0, keys=keys), step, [of_rank_0])
        feed(history, header(1, keys=keys), step, [of_rank_1])

    for statistic in ("rms", "absmax", "zero_ratio"):
        _, cells = decode(history.heatmap("actv", statistic, 100))
        for step, parts in enumerate(steps):
            x = np.array([*parts[0], *parts[1]])
            expected = {
                "rms": lambda x: np.sqrt(np.mean(x**2)),
                "absmax": lambda x: np.abs(x).max(),
                "zero_ratio": lambda x: np.mean(x == 0),
            }[statistic]
            value = math.nan if not x.size else math.inf if not np.isfinite(x).all() else expected(x)
            if step < cells.shape[1]:
                np.testing.assert_allclose(cells[0, step], value, rtol=1e-6)
            else:  # nothing was ever there
                assert math.isnan(value)


def test_the_rows_are_in_model_order_over_pipeline_stages_and_merge_micro_steps():
    first = [SeriesKey(Kind.GRAD_UNREDUCED, name, micro_step=micro) for micro in (0, 1) for name in ("z.embed", "h.0")]
    second = [SeriesKey(Kind.GRAD_UNREDUCED, name) for name in ("h.1", "a.head")]
    history = RunHistory()

    feed(history, header(1, keys=second, pp=1, pp_size=2), 0, [[1.0], [1.0]])
    feed(history, header(0, keys=first, pp=0, pp_size=2), 0, [[3.0], [1.0], [4.0], [1.0]])

    head, cells = decode(history.heatmap("grad_unreduced", "absmax", 10))
    assert head["rows"] == ["z.embed", "h.0", "h.1", "a.head"]
    np.testing.assert_array_equal(cells[:, 0], [4, 1, 1, 1])


def test_the_lines_are_mean_loss_merged_norm_and_longest_step():
    history = expecting(header(0), header(1))
    placements = [Placement(dtype="f32", shape=(2,), scale=2.0, in_global_norm=True)] * 3 + [None, None]
    replica = [Placement(dtype="f32", shape=(2,), in_global_norm=False)] * 3 + [None, None]

    feed(history, header(0, placements=placements), 5, [[2.0, 4.0], [6.0], [8.0], [1.0], [0.25]])
    feed(history, header(1, placements=replica, dp=1), 5, [[1.0, 2.0], [3.0], [4.0], [2.0], [0.75]])

    lines = history.lines(["loss", "grad_norm", "step_time"])
    assert lines["steps"] == [5]
    assert lines["series"]["loss"] == [1.5]
    assert lines["series"]["grad_norm"] == [pytest.approx(math.sqrt(1 + 4 + 9 + 16), rel=1e-6)]
    assert lines["series"]["step_time"] == [0.75]


def test_the_loss_of_micro_steps_is_their_mean_over_all_ranks():
    keys = [SeriesKey(Kind.LOSS, "loss", micro_step=number) for number in range(3)]
    history = expecting(header(0, keys=keys), header(1, keys=keys))

    feed(history, header(0, keys=keys), 0, [[1.0], [2.0], [6.0]])
    feed(history, header(1, keys=keys), 0, [[1.0]])

    assert history.lines(["loss"])["series"]["loss"] == [2.0]


def test_numbers_of_the_step_are_merged_as_each_has_to_be():
    keys = [SeriesKey(Kind.STEP, name) for name in ("global_grad_norm", "clip_ratio", "loss_scale", "skipped")]
    keys += [SeriesKey(Kind.STEP, "learning_rate", group) for group in ("0", "1")]
    keys += [SeriesKey(Kind.STEP, name) for name in ("tokens_per_second", "learning_rate", "my_value")]
    history = expecting(header(0, keys=keys), header(1, keys=keys))
    names = ["global_grad_norm", "clip_ratio", "loss_scale", "skipped", "learning_rate", "tokens_per_second"]

    feed(history, header(0, keys=keys), 0, [[3.0], [0.5], [8.0], [0.0], [0.1], [0.3], [100.0], [9.0], [9.0]])
    feed(history, header(1, keys=keys), 0, [[3.0], [0.25], [4.0], [1.0], [0.2], [0.1], [150.0], [9.0], [9.0]])
    (summary,) = history.take_summaries()
    feed(history, header(0, keys=keys), 1, [[math.inf], [math.nan], [8.0]])
    feed(history, header(1, keys=keys), 1, [[math.inf], [0.5], [8.0]])

    lines = history.lines([*names, "step_time"])["series"]
    first = [3.0, 0.25, 4.0, 1.0, 0.3, 250.0]
    assert [lines[name][0] for name in names] == first
    assert [getattr(summary, name) for name in names] == first
    assert [lines[name][1] for name in names] == ["NaN", "NaN", 8.0, None, None, None]
    assert lines["step_time"] == []


def test_rollouts_are_merged_to_the_worst_rank_and_their_mean_ratio():
    names = ["rl_mean_abs", "rl_ratio", "rl_ess"]
    keys = [SeriesKey(Kind.STEP, name) for name in names]
    history = expecting(header(0, keys=keys), header(1, keys=keys))

    feed(history, header(0, keys=keys), 0, [[0.02], [1.0], [0.9]])
    feed(history, header(1, keys=keys), 0, [[0.5], [1.5], [0.4]])

    lines = history.lines(names)["series"]
    assert [lines[name] for name in names] == [[0.5], [1.25], [0.4]]


def test_accelerators_are_merged_to_the_one_that_is_worst_off_and_the_power_of_all():
    names = [*views.ACCELERATOR_LINES]
    keys = [SeriesKey(Kind.STEP, name) for name in names]
    history = expecting(header(0, keys=keys), header(1, keys=keys))

    feed(history, header(0, keys=keys), 0, [[0.9, 0.7], [10e9, 60e9], [400.0, 600.0], [50.0, 70.0], [2e9], [0.0]])
    feed(history, header(1, keys=keys), 0, [[0.3, 0.5], [20e9, 30e9], [200.0, 200.0], [80.0, 60.0], [1e9], [1.0]])

    lines = history.lines(names)["series"]
    assert [lines[name] for name in names] == [[pytest.approx(0.4)], [60e9], [700.0], [80.0], [1e9], [1.0]]
    assert set(names) <= set(history.rank_quantities())


def test_of_many_steps_the_smallest_clip_ratio_is_kept_and_the_largest_rate(monkeypatch):
    monkeypatch.setattr(views, "_LINE_CELLS", 64)
    keys = [SeriesKey(Kind.STEP, "clip_ratio"), SeriesKey(Kind.STEP, "learning_rate", "0")]
    history = RunHistory()

    for step in range(100):
        feed(history, header(keys=keys), step, [[0.125 if step == 51 else 1.0], [2.0 if step == 51 else 1.0]])

    lines = history.lines(["clip_ratio", "learning_rate"])["series"]
    assert len(lines["clip_ratio"]) == 50
    assert (min(lines["clip_ratio"]), max(lines["learning_rate"])) == (0.125, 2.0)


def test_the_waiting_time_of_a_rank_is_that_of_all_its_calls():
    waits = [
        SeriesKey(Kind.COMM, f"dp.{op}", "wait_seconds", call) for op in ("all_reduce", "all_gather") for call in (0, 1)
    ]
    history = expecting(header(0, keys=waits), header(1, keys=waits))
    assert "wait" not in history.rank_quantities()

    feed(history, header(0, keys=waits), 0, [[0.25], [0.5], [1.0], [1.0]])
    feed(history, header(1, keys=waits), 0, [[0.0], [0.0], [0.25], [0.25]])

    np.testing.assert_array_equal(decode(history.ranks("wait", 10))[1], [[2.75], [0.5]])
    assert "wait" in history.rank_quantities()
    head, cells = decode(history.heatmap("comm/wait_seconds", "mean", 10))
    assert head["rows"] == ["dp.all_reduce", "dp.all_gather"]
    np.testing.assert_array_equal(cells[:, 0], [0.1875, 0.625])


def test_only_what_shares_a_scale_shares_a_heat_map():
    keys = [
        SeriesKey(Kind.FEATURE, "h.0", "attention_entropy"),
        SeriesKey(Kind.FEATURE, "h.0", "attention_max_logit"),
        SeriesKey(Kind.FEATURE, "h.1", "attention_entropy"),
        SeriesKey(Kind.FEATURE, "h.1", "expert_load"),
        SeriesKey(Kind.FEATURE, "h.1", "expert_load.top0.expert"),
        SeriesKey(Kind.STATE, "w", "momentum_buffer"),
        SeriesKey(Kind.STATE, "w", "row_var"),
        SeriesKey(Kind.MG_DIRECTION, "w"),
        SeriesKey(Kind.COMM, "dp", "sequence"),
        SeriesKey(Kind.COMM, "dp.all_reduce", "pre.0", 0),
        SeriesKey(Kind.COMM, "dp.all_reduce", "pre.0", 7),
    ]
    history = RunHistory()
    rows = [[1.0, 3.0], [-9.0, -4.0], [1.0], [0.0, 0.75], [17.0], [3.0], [0.5], [1.0, 0.0], [40.0], [3.0], [4.0]]

    feed(history, header(keys=keys), 0, rows)

    sizes = ["rms", "absmax", "zero_ratio"]
    assert [(entry["kind"], entry["statistics"]) for entry in history.heatmaps()] == [
        ("state/momentum_buffer", sizes),
        ("state/row_var", sizes),
        ("mg_direction", ["mean"]),
        ("comm", sizes),
        ("feature/attention_entropy", ["mean", "max"]),
        ("feature/attention_max_logit", ["max", "mean"]),
        ("feature/expert_load", ["max", "zero_ratio"]),
    ]
    shown = {}
    for entry in history.heatmaps():
        head, cells = decode(history.heatmap(entry["kind"], entry["statistics"][0], 10))
        shown[entry["kind"]] = dict(zip(head["rows"], cells[:, 0].tolist(), strict=True))
    assert shown == {
        "state/momentum_buffer": {"w": 3.0},
        "state/row_var": {"w": 0.5},
        "mg_direction": {"w": 0.5},
        "comm": {"dp.all_reduce.pre.0": pytest.approx(math.sqrt(12.5))},
        "feature/attention_entropy": {"h.0": 2.0, "h.1": 1.0},
        "feature/attention_max_logit": {"h.0": -4.0},
        "feature/expert_load": {"h.1": 0.75},
    }
    with pytest.raises(QueryError, match=r"unknown statistic 'rms'; expected one of: mean"):
        history.heatmap("mg_direction", "rms", 10)


def test_replicas_without_placement_count_once_in_the_norm():
    history = RunHistory()

    for rank in range(4):
        feed(history, header(rank, dp=rank, dp_size=4), 0, [[3.0], [4.0], [0.0]], series=[0, 1, 2])

    assert history.lines(["grad_norm"])["series"]["grad_norm"] == [5.0]


def test_a_node_without_a_counted_copy_shows_the_norm_of_its_replicas():
    history = RunHistory()

    for rank in (6, 7):
        feed(history, header(rank, dp=rank, dp_size=8), 0, [[3.0], [4.0], [0.0]], series=[0, 1, 2])

    assert history.lines(["grad_norm"])["series"]["grad_norm"] == [5.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_shown_as_infinity_also_when_steps_are_merged(bad):
    history = RunHistory(max_bytes=3 * 4 * 64 * 5)

    for step in range(500):
        value = bad if step == 123 else 1.0
        feed(history, header(), step, [[1.0], [value], [1.0], [value], [0.1]])

    head, cells = decode(history.heatmap("grad_reduced", "rms", 20))
    column = (123 - head["first_step"]) // head["stride"]
    assert np.argwhere(np.isinf(cells)).tolist() == [[1, column]]
    assert history.lines(["loss"])["series"]["loss"][123] == "NaN"
    assert history.lines(["grad_norm"])["series"]["grad_norm"][123] == "NaN"


def test_a_step_that_one_rank_has_not_reached_is_shown_but_not_complete():
    history = expecting(header(0), header(1))

    feed(history, header(0), 0, [[1.0]] * 5)
    feed(history, header(0), 1, [[1.0]] * 5)
    feed(history, header(1), 0, [[1.0]] * 5)

    assert [summary.step for summary in history.take_summaries()] == [0]
    assert history.lines(["loss"])["steps"] == [0, 1]
    _, cells = decode(history.ranks("loss", 10))
    np.testing.assert_array_equal(cells, [[1, 1], [1, np.nan]])
    _, cells = decode(history.heatmap("grad_reduced", "rms", 10))
    assert cells.shape[1] == 2
    np.testing.assert_array_equal(cells[np.isfinite(cells[:, 1])], 1.0)
    history.end(1)
    assert [summary.step for summary in history.take_summaries()] == [1]


def test_ranks_by_steps_tell_how_late_a_rank_is():
    history = expecting(header(2), header(3))

    feed(history, header(3), 0, [[1.0]] * 5, time_s=100.5)
    feed(history, header(2), 0, [[1.0]] * 5, time_s=100.0)

    head, cells = decode(history.ranks("lag", 10))
    assert head["rows"] == ["rank 2", "rank 3"]
    np.testing.assert_array_equal(cells, [[0.0], [0.5]])


def test_a_new_attempt_replaces_what_it_repeats_and_only_that():
    history = RunHistory()
    for step in range(10):
        feed(history, header(attempt=1), step, [[1.0]] * 5)

    for step in range(6, 8):
        feed(history, header(attempt=2), step, [[2.0]] * 5)
    feed(history, header(attempt=1), 9, [[3.0]] * 5)

    lines = history.lines(["loss"])
    assert lines["steps"] == list(range(8))
    assert lines["series"]["loss"] == [1.0] * 6 + [2.0] * 2
    assert decode(history.heatmap("grad_reduced", "rms", 100))[0]["columns"] == 8


def test_a_history_that_is_filled_again_from_the_segments_is_the_same(tmp_path):
    history, again = expecting(header(0), header(1)), RunHistory()
    writer = SegmentWriter(tmp_path)
    heads = [header(rank, dp=rank, dp_size=2) for rank in range(2)]
    for step in range(40):
        for head in heads:
            rows = [[step, 1.0], [math.nan] if step == 7 else [2.0], [0.0], [step / 10], [0.5 + head.coordinates.rank]]
            feed(history, head, step, rows, time_s=step)
            writer.add(head, head.series, block(step, rows, time_s=step))
        if step % 15 == 0:
            writer.commit({})
    writer.commit({})

    again.refill(tmp_path)

    assert again.lines(["loss", "grad_norm", "step_time"]) == history.lines(["loss", "grad_norm", "step_time"])
    assert again.heatmap("grad_reduced", "rms", 100) == history.heatmap("grad_reduced", "rms", 100)
    assert again.ranks("step_time", 100) == history.ranks("step_time", 100)


def test_memory_stays_within_its_bound():
    keys = [SeriesKey(Kind.GRAD_REDUCED, f"w.{index}") for index in range(3000)]
    head = header(keys=keys)
    values = np.ones((len(STATISTICS), len(keys)))
    history = RunHistory(max_bytes=8 << 20)

    for step in range(600):
        row = StatBlock(step=step, time_s=0.0, series=np.arange(3000, dtype=np.uint32), values=values)
        history.add(head, head.series, row)

    assert history.num_bytes() < 9 << 20


def test_unknown_names_are_refused_with_the_right_ones():
    history = RunHistory()
    feed(history, header(), 0, [[1.0]] * 5)

    with pytest.raises(QueryError, match=r"unknown line 'lss'; expected one of: loss, grad_norm, step_time"):
        history.lines(["lss"])
    with pytest.raises(QueryError, match=r"no heat map of kind 'actv'; expected one of: grad_reduced"):
        history.heatmap("actv", "rms", 10)
    with pytest.raises(QueryError, match=r"unknown statistic 'median'; expected one of: rms"):
        history.heatmap("grad_reduced", "median", 10)


def test_the_moments_of_this_test_are_those_of_the_product():
    row = numpy_moments([0.0, 1.0, math.nan, -math.inf])

    assert Moments(*row) == Moments(4, 0.0, 1.0, 1.0, 1.0, 1, 1, 1)
