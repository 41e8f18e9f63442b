"""`TrainerMon` on DeepSpeed: what crashed or lied in other monitors works here at every stage."""

import functools
import math

import pytest
import torch

from tests.frameworks.deepspeed.test_truth import launch
from tests.journal_rows import RankJournal
from trainermon.core.catalogue import GLOBAL_NORM_SERIES, LEARNING_RATE_SERIES, LOSS_SCALE_SERIES
from trainermon.core.values import Kind

pytestmark = pytest.mark.distributed

VARIANTS = ("stage0", "stage0_bf16", "stage1", "stage2", "stage3", "stage3_fp16")
PARTITIONED = VARIANTS[2:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    places = {"TRAINERMON_SPOOL": f"{folder}/spool", "TRAINERMON_OUTPUT": f"{folder}/output"}
    launch(folder, "monitor_worker.py", str(folder), size=2, **places)
    return folder


@functools.cache
def journals(trained, variant):
    return [RankJournal(trained / "spool" / variant, rank) for rank in (0, 1)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_trains_to_the_end_with_everything_collected(trained, variant):
    for journal in journals(trained, variant):
        assert sorted(journal.rows) == [0, 1, 2]
        assert not [event for event in journal.events if event["type"] == "detached"]
        for kind in (Kind.ACTV, Kind.ACTV_GRAD):
            assert "head.output.0@1" in journal.of(2, kind)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [Kind.PARAM_ORIGIN, Kind.PARAM_UPDATED, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.UPDATE])
def test_every_weight_is_there_with_all_its_elements(trained, variant, kind):
    numels = torch.load(trained / f"{variant}.pt")["numels"]

    for step in (1, 2):
        held = [journal.of(step, kind) for journal in journals(trained, variant)]
        counts = {name: sum(rows[name].count for rows in held if name in rows) for name in numels}
        copies = 1 if variant in PARTITIONED else 2
        assert counts == {name: copies * numel for name, numel in numels.items()}


@pytest.mark.parametrize(("variant", "copies"), [("stage0", 0), ("stage0_bf16", 2), ("stage1", 2), ("stage3", 1)])
def test_weights_that_the_forward_used_are_there_where_the_engine_steps_copies(trained, variant, copies):
    numels = torch.load(trained / f"{variant}.pt")["numels"]

    held = [journal.of(1, Kind.PARAM_USED) for journal in journals(trained, variant)]

    counts = {name: sum(rows[name].count for rows in held if name in rows) for name in numels}
    assert counts == {name: copies * numel for name, numel in numels.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_accumulated_gradients_are_whole_or_absent_and_micro_steps_always_there(trained, variant):
    numels = torch.load(trained / f"{variant}.pt")["numels"]

    for journal in journals(trained, variant):
        rows = journal.of(1, Kind.GRAD_UNREDUCED)
        accumulated = {name: row for name, row in rows.items() if "@" not in name}
        assert accumulated.keys() == (numels.keys() if variant in VARIANTS[:3] else set())
        for name, numel in numels.items():
            micro = [rows[f"{name}@{micro_step}"] for micro_step in (0, 1)]
            assert [row.count for row in micro] == [numel, numel]
            if accumulated:
                assert accumulated[name].sum == pytest.approx(sum(row.sum for row in micro), abs=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_scheduler_made_before_or_later_works_and_its_rate_belongs_to_the_step(trained, variant):
    rates = torch.load(trained / f"{variant}.pt")["rates"]

    for step, expected in enumerate(rates):
        (journal, _) = journals(trained, variant)
        rows = journal.of(step, Kind.STEP)
        found = [row.sum for label, row in sorted(rows.items()) if label.startswith(LEARNING_RATE_SERIES)]
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_the_merged_norm_over_the_loss_scale_is_the_engines(trained, variant):
    norm = torch.load(trained / f"{variant}.pt")["norm"]
    both = journals(trained, variant)[: 2 if variant in PARTITIONED else 1]

    merged = math.sqrt(sum(row.sum_sq for journal in both for row in journal.of(2, Kind.GRAD_REDUCED).values()))
    told = both[0].of(2, Kind.STEP)
    scale = told[LOSS_SCALE_SERIES].sum if variant == "stage3_fp16" else 1.0
    assert merged / scale == pytest.approx(norm, rel=3e-3)
    assert told[GLOBAL_NORM_SERIES].sum == pytest.approx(norm, rel=1e-6)
