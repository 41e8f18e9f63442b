import contextlib
import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exporters.expositions import ALONE, OF_ACCELERATOR, read
from tests.exporters.runs import LOSS, STEP_TIME, LargeRun, block_of, header_of
from tests.server_programs import find_program
from trainermon.core.metrics import METRICS
from trainermon.core.values import Alert, AlertState, Kind, Placement, SeriesKey, Severity
from trainermon.exporters.prometheus.budget import SeriesBudget
from trainermon.exporters.prometheus.exposition import Exposition
from trainermon.exporters.prometheus.openmetrics import OPENMETRICS, TEXT

RULES = {"nonfinite_gradient": Severity.FATAL, "loss_spike": Severity.WARNING}

OF_AGENT, OF_RANK = 25, 27
"""Series of an agent, and of a rank without those of its modules."""


def gradient(name: str) -> SeriesKey:
    return SeriesKey(Kind.GRAD_REDUCED, name)


def belongs(name: str, module: str) -> bool:
    parent, _, last = module.rpartition(".")
    if "-" in last:
        first, end = map(int, last.split("-"))
        return any(name.startswith(f"{parent}.{i}.") for i in range(first, end + 1))
    return name == module or name.startswith(f"{module}.")


def alert(rule: str, number: int, *, state: AlertState = AlertState.FIRING) -> Alert:
    return Alert(
        id=f"{rule}-{number}",
        rule=rule,
        severity=RULES.get(rule, Severity.INFO),
        state=state,
        attempt=1,
        rank=0,
        step=number,
        first_step=number,
        time_s=0.0,
        kind=Kind.LOSS,
        value=1.0,
        baseline=0.0,
        num_series=1,
        findings=(),
        message="",
    )


def test_a_rank_shows_step_loss_duration_and_place():
    exposition = Exposition("run")
    tensors = {LOSS: np.array([2.0, 3.0]), STEP_TIME: np.array([0.2])}

    exposition.update(header_of(1), list(tensors), block_of(tensors, list(tensors), step=7))

    values = read(exposition)
    assert values["trainermon_step", "rank=1"] == 7
    assert values["trainermon_last_step_timestamp_seconds", "rank=1"] == 1.7e9 + 7
    assert values["trainermon_loss", "rank=1"] == 2.5
    assert values["trainermon_step_duration_seconds_bucket", "rank=1", "le=0.1"] == 0
    assert values["trainermon_step_duration_seconds_bucket", "rank=1", "le=0.25"] == 1
    place = ("trainermon_rank_info", "rank=1", "dp=1", "tp=0", "pp=0", "cp=0", "ep=0")
    assert values[place] == 1
    sizes = ("dp_size=1", "tp_size=1", "pp_size=1", "cp_size=1", "ep_size=1")
    run_info = ("trainermon_run_info", "attempt=1", *sizes, "version=1 0.1")
    assert values[run_info] == 1
    assert values["trainermon_world_size",] == 2
    assert values["trainermon_ranks",] == 1


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_merged_modules_have_the_root_mean_square_of_all_their_elements(limit: int, seed: int):
    random = np.random.default_rng(seed)
    names = [f"h.{i}.{module}.{end}" for i in range(3) for module in ("attn", "mlp") for end in ("weight", "bias")]
    tensors = {gradient(name): random.normal(size=random.integers(1, 50)) for name in names}
    keys = list(tensors)
    fixed = OF_RANK + -(-OF_AGENT // 2)  # what a rank and its half of the agent have without modules
    exposition = Exposition("run", budget=SeriesBudget(per_rank=fixed + limit))

    exposition.update(header_of(), keys, block_of(tensors, keys))

    values = read(exposition)
    shown = {key[-1].removeprefix("module="): v for key, v in values.items() if key[0] == "trainermon_gradient_rms"}
    assert 1 <= len(shown) <= limit
    for module, value in shown.items():
        parts = [tensor for key, tensor in tensors.items() if belongs(key.name, module)]
        assert value == pytest.approx(np.sqrt(np.square(np.concatenate(parts)).mean()), rel=1e-12)
    norm = np.linalg.norm(np.concatenate(list(tensors.values())))
    assert values["trainermon_gradient_norm", "rank=0"] == pytest.approx(norm, rel=1e-12)


def test_the_parts_of_all_ranks_make_up_the_jobs_gradient_norm():
    exposition = Exposition("run")
    random = np.random.default_rng(0)
    replicated, own = random.normal(size=100), {rank: random.normal(size=30) for rank in range(2)}
    keys = [gradient("replicated"), gradient("sharded")]
    for rank in range(2):
        tensors = dict(zip(keys, (replicated, own[rank]), strict=True))
        placements = [
            Placement(dtype="float32", shape=(100,), replicated_over=("dp",), in_global_norm=rank == 0),
            Placement(dtype="float32", shape=(60,), offset=30 * rank, length=30, partitioned_over=("dp",)),
        ]
        exposition.update(header_of(rank), keys, block_of(tensors, keys), placements=placements)

    values = read(exposition)

    parts = [values["trainermon_gradient_norm_part", f"rank={rank}"] for rank in range(2)]
    assert math.hypot(*parts) == pytest.approx(np.linalg.norm(np.concatenate([replicated, *own.values()])))
    held = np.linalg.norm(np.concatenate([replicated, own[1]]))
    assert values["trainermon_gradient_norm", "rank=1"] == pytest.approx(held)


def test_a_checksum_is_nobodys_number():
    exposition = Exposition("run")
    tensors = {SeriesKey(Kind.CHECKSUM, "w"): np.ones(1), gradient("w"): np.array([np.nan])}

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    values = read(exposition)
    assert [key for key in values if "checksum" in str(key[1:])] == []
    assert values["trainermon_nonfinite_elements_total", "rank=0", "kind=grad_reduced"] == 1


def test_what_is_not_finite_is_counted_and_has_no_sample_but_the_loss():
    exposition = Exposition("run")
    weight, bias = gradient("w"), gradient("b")
    keys = [LOSS, weight, bias]
    good = {LOSS: np.array([2.0]), weight: np.ones(4), bias: np.ones(2)}
    bad = {LOSS: np.array([np.nan]), weight: np.full(4, np.inf), bias: np.array([np.nan, 3.0])}

    exposition.update(header_of(), keys, block_of(good, keys))
    before = read(exposition)
    for step in (1, 2):
        exposition.update(header_of(), keys, block_of(bad, keys, step=step))
    after = read(exposition)

    assert before["trainermon_nonfinite_elements_total", "rank=0", "kind=loss"] == 0
    assert after["trainermon_nonfinite_elements_total", "rank=0", "kind=loss"] == 2
    assert after["trainermon_nonfinite_elements_total", "rank=0", "kind=grad_reduced"] == 10
    gone = {key[0] for key in before.keys() - after.keys()}
    norms = {"trainermon_gradient_norm", "trainermon_gradient_norm_part"}
    assert gone == {"trainermon_gradient_rms"} | norms
    assert math.isnan(after.pop(("trainermon_loss", "rank=0")))
    assert after["trainermon_gradient_rms", "rank=0", "module=b"] == 3
    assert all(math.isfinite(value) for value in after.values())


def test_other_recorded_values_are_shown_by_name_and_not_without_end():
    exposition = Exposition("run")
    tensors = {SeriesKey(Kind.STEP, f"value_{i}"): np.array([float(i)]) for i in range(9)} | {LOSS: np.ones(1)}

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    shown = {key[-1]: value for key, value in read(exposition).items() if key[0] == "trainermon_recorded_value"}
    assert shown == {f"name=value_{i}": i for i in range(8)}


def test_of_activations_the_outputs_are_shown_and_all_calls_merged():
    exposition = Exposition("run")
    tensors = {
        SeriesKey(Kind.ACTV, "h.0", "input.0"): np.full(3, 100.0),
        SeriesKey(Kind.ACTV, "h.0", "output.0"): np.full(3, 1.0),
        SeriesKey(Kind.ACTV, "h.0", "output.0", call=1): np.full(3, 7.0),
        SeriesKey(Kind.ACTV, "", "output.0", micro_step=1): np.full(2, 3.0),
    }

    exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors)))

    values = read(exposition)
    shown = {key[-1]: value for key, value in values.items() if key[0] == "trainermon_activation_rms"}
    assert shown == {"module=h.0": 5.0, "module=(root)": 3.0}
    assert values["trainermon_left_out_series",] == 0


def test_rows_that_are_not_in_a_block_keep_their_last_value():
    exposition = Exposition("run")
    tensors = {gradient("w"): np.ones(4), LOSS: np.array([2.0])}
    keys = list(tensors)
    exposition.update(header_of(), keys, block_of(tensors, keys, step=0))

    exposition.update(header_of(), keys, block_of({LOSS: np.array([4.0])}, keys, step=1))

    values = read(exposition)
    assert values["trainermon_gradient_rms", "rank=0", "module=w"] == 1
    assert values["trainermon_loss", "rank=0"] == 4


def test_series_that_join_the_table_are_shown_and_the_others_keep_their_values():
    exposition = Exposition("run")
    keys = [gradient("a"), gradient("b")]
    exposition.update(header_of(), keys[:1], block_of({keys[0]: np.full(2, 5.0)}, keys))

    exposition.update(header_of(), keys, block_of({keys[1]: np.full(2, 6.0)}, keys))

    values = read(exposition)
    shown = {key[-1]: value for key, value in values.items() if key[0] == "trainermon_gradient_rms"}
    assert shown == {"module=a": 5, "module=b": 6}


def test_a_new_attempt_forgets_values_and_keeps_counting():
    exposition = Exposition("run")
    tensors = {gradient("w"): np.array([np.nan, 1.0]), LOSS: np.array([2.0]), STEP_TIME: np.array([1.0])}
    keys = list(tensors)
    exposition.update(header_of(attempt=1), keys, block_of(tensors, keys, step=900))

    exposition.update(header_of(attempt=2), keys, block_of({STEP_TIME: np.array([1.0])}, keys, step=800))

    values = read(exposition)
    assert values["trainermon_step", "rank=0"] == 800
    assert ("trainermon_loss", "rank=0") not in values
    assert ("trainermon_gradient_rms", "rank=0", "module=w") not in values
    assert values["trainermon_nonfinite_elements_total", "rank=0", "kind=grad_reduced"] == 1
    assert values["trainermon_step_duration_seconds_count", "rank=0"] == 2


def test_a_step_without_its_duration_is_not_counted_again():
    exposition = Exposition("run")
    keys = [LOSS, STEP_TIME]
    exposition.update(header_of(), keys, block_of({STEP_TIME: np.array([1.0])}, keys, step=0))

    exposition.update(header_of(), keys, block_of({LOSS: np.array([1.0])}, keys, step=1))

    assert read(exposition)["trainermon_step_duration_seconds_count", "rank=0"] == 1


def test_a_rank_that_is_removed_and_every_rank_after_the_run_has_no_series():
    exposition = Exposition("run")
    for rank in range(3):
        exposition.update(header_of(rank), [LOSS], block_of({LOSS: np.ones(1)}, [LOSS]))

    exposition.remove_rank(1)
    exposition.remove_rank(17)
    ranks = {part for key in read(exposition) for part in key if part.startswith("rank=")}
    exposition.end_run()
    exposition.set("trainermon_skipped_records_total", 3, rank=0)
    after = read(exposition)

    assert ranks == {"rank=0", "rank=2"}
    assert not {part for key in after for part in key if part.startswith("rank=")}
    assert after["trainermon_ranks",] == 0


def test_jobs_of_more_than_64_ranks_share_one_histogram_per_node():
    exposition = Exposition("run")
    for rank in range(2):
        header = header_of(rank, world_size=65, local_world_size=8)
        exposition.update(header, [STEP_TIME], block_of({STEP_TIME: np.ones(1)}, [STEP_TIME], step=5))

    values = read(exposition)
    exemplar = exposition.render(OPENMETRICS)[0].decode()
    exposition.end_run()

    counts = {key: value for key, value in values.items() if key[0] == "trainermon_step_duration_seconds_count"}
    assert counts == {("trainermon_step_duration_seconds_count",): 2}
    assert '# {rank="1",step="5"} 1.0' in exemplar
    assert not any("duration_seconds_bucket" in key[0] for key in read(exposition))


def test_every_known_rule_stands_at_zero_from_the_start():
    values = read(Exposition("run", rules=RULES))

    for rule, severity in RULES.items():
        assert values["trainermon_alerts_firing", f"rule={rule}", f"severity={severity}"] == 0
        assert values["trainermon_alerts_total", f"rule={rule}", f"severity={severity}"] == 0


def test_every_counter_of_the_agent_stands_at_zero_from_the_start():
    counters = [metric.name for metric in METRICS.values() if metric.type == "counter" and metric.labels == ("run",)]

    values = read(Exposition("run"))

    assert {values[name,] for name in counters if "cpu" not in name} == {0.0}


def test_firing_alerts_are_shown_and_each_is_counted_once():
    exposition = Exposition("run", rules=RULES)
    spike = ("rule=loss_spike", "severity=warning")
    seen = []

    first, second, third = (alert("loss_spike", number) for number in range(3))
    pending = alert("loss_spike", 9, state=AlertState.PENDING)
    over = [dataclasses.replace(one, state=AlertState.RESOLVED) for one in (first, second)]
    for alerts in ([first, pending], [first, second], [first, second], over, [*over, third]):
        exposition.set_alerts(alerts, now_s=1e9)
        values = read(exposition)
        names = ("trainermon_alerts_firing", "trainermon_alerts_total")
        seen.append([values[place] for place in ((name, *spike) for name in names)])

    assert seen == [[1, 1], [2, 2], [2, 2], [0, 2], [1, 3]]


def test_an_alert_of_a_rule_that_was_not_announced_is_shown_too():
    exposition = Exposition("run", rules=RULES)

    exposition.set_alerts([alert("hang", 1)], now_s=1e9)

    assert read(exposition)["trainermon_alerts_firing", "rule=hang", "severity=info"] == 1


def test_values_of_agent_and_rank_are_set_and_added():
    exposition = Exposition("run")
    exposition.update(header_of(), [LOSS], block_of({LOSS: np.ones(1)}, [LOSS]))

    exposition.set("trainermon_journal_lag_seconds", 0.25)
    exposition.add("trainermon_errors_total")
    exposition.add("trainermon_errors_total", 2)
    exposition.set("trainermon_skipped_records_total", 3, rank=0)

    values = read(exposition)
    assert values["trainermon_journal_lag_seconds",] == 0.25
    assert values["trainermon_errors_total",] == 3
    assert values["trainermon_skipped_records_total", "rank=0"] == 3
    assert values["trainermon_lost_files_total", "rank=0"] == 0


@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("trainermon_stranger", None, r"'trainermon_stranger' is no metric of the agent .* there are \['trainermon_"),
        ("trainermon_step", 0, r"'trainermon_step' is no metric of a rank that is set from outside"),
        ("trainermon_errors_total", 0, r"'trainermon_errors_total' is no metric of a rank"),
    ],
)
def test_a_value_that_is_not_in_the_catalogue_is_refused(name: str, rank: int | None, message: str):
    exposition = Exposition("run")

    with pytest.raises(ValueError, match=message):
        exposition.set(name, 1.0, rank=rank)
    with pytest.raises(ValueError, match=message):
        exposition.add(name, 1.0, rank=rank)


def test_the_agent_tells_its_own_cost():
    ticks = iter([10.0, 10.5, 20.0, 20.25])
    exposition = Exposition("run", clock=lambda: next(ticks))
    first = read(exposition)

    values = read(exposition)

    assert values["trainermon_collection_duration_seconds",] == 0.5
    assert values["trainermon_exposed_series",] == len(first)
    assert values["trainermon_agent_cpu_seconds_total",] == pytest.approx(sum(os.times()[:2]), abs=1.0)
    rss = psutil.Process().memory_info().rss
    assert values["trainermon_agent_resident_memory_bytes",] == pytest.approx(rss, rel=0.1)


def test_both_formats_hold_the_same_values():
    exposition = large_exposition(clock=lambda: 0.0)
    changing = {"trainermon_agent_cpu_seconds_total", "trainermon_agent_resident_memory_bytes"}
    changing |= {"trainermon_exposed_series", "trainermon_collection_duration_seconds"}

    formats = [read(exposition, accept=accept) for accept in (OPENMETRICS, TEXT)]

    text, openmetrics = ({key: v for key, v in found.items() if key[0] not in changing} for found in formats)
    assert text == openmetrics
    assert len(text) > 1000


def large_exposition(**options) -> Exposition:
    """Return the exposition of 8 ranks with 300 series each, all metrics in it."""
    exposition = Exposition("run", rules=RULES, **options)
    kinds = [kind for kind in Kind if kind not in {Kind.LOSS, Kind.STEP}]
    run = LargeRun(num_layers=32, kinds=kinds, others=ALONE)
    for rank in range(8):
        header = header_of(rank, world_size=8, local_world_size=8)
        exposition.set_accelerator(rank, dict.fromkeys(OF_ACCELERATOR, 0.5), uuid=f"GPU-{rank}", model="H100")
        exposition.update(header, run.keys(), run.block(seed=rank), placements=run.placements())
    set_all(exposition, ranks=[None, *range(8)])
    exposition.set_alerts([alert("loss_spike", 0)], now_s=0.0)
    return exposition


def set_all(exposition: Exposition, *, ranks: Iterable[int | None]) -> None:
    """Set every metric of the ranks, and of the agent (None), that does not come from blocks."""
    for metric in METRICS.values():
        label = {name: "x" for name in metric.labels if name not in ("run", "rank")}
        for rank in ranks:
            with contextlib.suppress(ValueError):
                exposition.set(metric.name, 1.5, rank=rank, **label)


def test_70_b_parameters_on_1024_ranks_stay_within_every_limit():
    run = LargeRun(num_layers=80)
    keys, placements = run.keys(), run.placements()
    assert len(keys) == 723 * 3 + 3
    exposition = Exposition("run", rules={f"rule_{i}": Severity.WARNING for i in range(12)})
    for local_rank in range(8):
        header = header_of(1016 + local_rank, world_size=1024, local_world_size=8)
        exposition.update(header, keys, run.block(), placements=placements)

    values = read(exposition)

    assert len(values) * 1024 / 8 <= 100_000
    assert len(values) >= 0.85 * 100_000 / 128, "the budget is there to be used"
    layers = {key[-1] for key in values if key[0] == "trainermon_gradient_rms" and "layers" in key[-1]}
    assert len(layers) >= 16, "the profile over depth stays"
    assert "module=model.layers.76-79" in layers
    shown_by_their_own_name = 3 * 3  # embedding, last norm, head
    assert values["trainermon_rolled_up_series",] == 8 * (723 * 3 - shown_by_their_own_name)
    assert values["trainermon_left_out_series",] == 0


@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (8, 8), (64, 64), (128, 128), (16384, 8)])
def test_ranks_and_nodes_of_every_size_stay_within_their_limits(world_size: int, local_world_size: int):
    run = LargeRun(num_layers=80 if local_world_size < 64 else 20, kinds=[Kind.GRAD_REDUCED, Kind.ACTV])
    exposition = Exposition("run", rules=RULES)
    keys, block, placements = run.keys(), run.block(), run.placements()
    for rank in range(local_world_size):
        header = header_of(rank, world_size=world_size, local_world_size=local_world_size)
        exposition.update(header, keys, block, placements=placements)

    values = read(exposition)

    limit = min(300, 100_000 // world_size, 5_000 // local_world_size)
    assert len([key for key in values if "rank=0" in key]) <= limit
    assert len([key for key in values if any(part.startswith("rank=") for part in key)]) <= limit * local_world_size
    assert len(values) <= 5_000
    assert all(key[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") in METRICS for key in values)


@pytest.mark.parametrize(
    ("limit", "own", "left_out"),
    [(0, 0, 32), (1, 1, 31), (16, 16, 16), (17, 17, 14), (18, 18, 14), (31, 31, 0), (32, 32, 0), (100, 32, 0)],
)
def test_a_budget_that_is_too_small_leaves_out_the_least_wanted_and_says_so(limit: int, own: int, left_out: int):
    agent = OF_AGENT  # of the rank 16 that stand alone, then a histogram with 14, then 2 modules
    exposition = Exposition("run", budget=SeriesBudget(per_node=agent + limit))
    tensors = {STEP_TIME: np.ones(1), LOSS: np.ones(1), gradient("a"): np.ones(2), gradient("b"): np.ones(2)}
    keys = list(tensors)

    exposition.update(header_of(world_size=1, local_world_size=1), keys, block_of(tensors, keys))

    set_all(exposition, ranks=[0])
    values = read(exposition)
    assert len([key for key in values if "rank=0" in key]) == own
    assert values["trainermon_left_out_series",] == left_out
    assert (("trainermon_step", "rank=0") in values) == (limit > 0)
    assert len(values) <= agent + limit


def test_what_has_more_elements_is_shown_in_more_detail():
    exposition = Exposition("run", budget=SeriesBudget(per_node=OF_AGENT + OF_RANK + 3))
    keys = [gradient(f"{module}.{end}") for module in "ab" for end in "wx"]
    small, shard = Placement(dtype="float32", shape=(9, 9)), Placement(dtype="float32", shape=(40, 40), length=100)
    tensors = {key: np.ones(2) for key in keys}

    block = block_of(tensors, keys)
    exposition.update(header_of(local_world_size=1), keys, block, placements=[small, small, shard, shard])

    shown = {key[-1] for key in read(exposition) if key[0] == "trainermon_gradient_rms"}
    assert shown == {"module=a", "module=b.w", "module=b.x"}


@pytest.mark.server
@pytest.mark.parametrize("make", [lambda: Exposition("run", rules=RULES), large_exposition], ids=["small", "full"])
def test_promtool_finds_nothing_to_complain_about(make: Callable[[], Exposition]):
    (exposition := make()).render()
    body, _ = exposition.render()

    result = subprocess.run([find_program("promtool"), "check", "metrics"], input=body, capture_output=True)

    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_the_full_exposition_has_every_metric_of_the_catalogue():
    exposition = large_exposition()
    exposition.render()

    names = {key[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for key in read(exposition)}

    assert names == set(METRICS)


def test_importing_the_exporter_loads_no_torch():
    code = "import sys, trainermon.exporters.prometheus.exposition; sys.exit('torch' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_norm_with_an_element_that_is_not_finite_has_no_sample():
    exposition = Exposition("run")
    for step, last in enumerate((1.0, np.nan)):
        tensors = {gradient("a"): np.array([3.0, 4.0]), gradient("b"): np.array([0.0, last])}
        exposition.update(header_of(), list(tensors), block_of(tensors, list(tensors), step=step))
        values = read(exposition)
        for name in ("trainermon_gradient_norm", "trainermon_gradient_norm_part"):
            assert math.isfinite(values.get((name, "rank=0"), math.nan)) is (step == 0)
