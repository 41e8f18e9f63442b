"""Copies of parameters on real ranks: equal in clean runs, and the one that lost a bit is found by step and rank."""

from pathlib import Path

import pytest

from tests.frameworks.launches import Launches, jobs
from tests.frameworks.replicas_worker import FAULTY_RANK, FLIPPED_AT, INTERVAL, NORM, QKV, STEPS, VARIANTS
from tests.journal_rows import spool_named
from trainermon.agent.across_nodes.replicas import ReplicaChecksums
from trainermon.agent.controller.replicas import divergences
from trainermon.agent.follower import JournalFollower
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.journal import BlockRecord, Cursor
from trainermon.core.values import Severity
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter

pytestmark = pytest.mark.distributed

CLEAN = [name for name in VARIANTS if not name.endswith(("-flipped", "-skipped-sync", "-apart"))]
FLIPPED = {
    "ddp-flipped": "first.weight",
    "ddp-bf16-flipped": "first.weight",
    "megatron-flipped": QKV,
    "megatron-bf16-main-flipped": f"{QKV}.main",
    "megatron-distributed-bf16-flipped": QKV,
    "megatron-tp-flipped": NORM,
}
QUICK = {2: ("ddp-bf16", "megatron-distributed-bf16", "ddp-flipped", "megatron-tp-flipped"), 4: ("ddp-flipped",)}
FIRST_CHECK = FLIPPED_AT + 1  # one of the checked steps


@pytest.fixture(scope="module")
def launch(request, tmp_path_factory):
    return Launches(Path(__file__).with_name("replicas_worker.py"), request, tmp_path_factory)


def blocks_of(folder, name):
    """Return headers and blocks of all ranks, in the order of steps."""
    follower = JournalFollower(spool_named(folder / "spool" / name))
    blocks = []
    while news := follower.poll():
        blocks += [(header, record.block) for header, record in news if isinstance(record, BlockRecord)]
    follower.close()
    return sorted(blocks, key=lambda pair: pair[1].step)


def checks_of(folder, name):
    """Return, by step and rank, the checksums of a run by group and name; steps without any are left out."""
    kept = ReplicaChecksums()
    for header, block in blocks_of(folder, name):
        kept.on_block(header, header.series, block)
    found = {}
    for step, groups in kept.digests()["steps"].items():
        for group in groups:
            for rank, held in kept.copies(int(step), group).items():
                mine = found.setdefault(int(step), {}).setdefault(rank, {})
                mine.update({(group, name): checksum for name, checksum in held.items()})
    return found


def alerts_of(folder, name):
    """Return the alerts of the default rules about copies."""
    engine = RuleEngine(load_rules())
    alerts = [
        alert for header, block in blocks_of(folder, name) for alert in engine.evaluate(header, header.series, block)
    ]
    return [alert for alert in alerts if alert.rule.startswith("replica-")]


@pytest.mark.parametrize(("size", "name"), jobs(CLEAN, QUICK))
def test_copies_of_a_clean_run_are_equal_on_every_checked_step(launch, size, name):
    checks = checks_of(launch(size), name)

    assert sorted(checks) == list(range(0, STEPS, INTERVAL))
    assert all(len(reports) == size for reports in checks.values())
    assert [divergences(reports) for reports in checks.values()] == [[]] * len(checks)
    assert alerts_of(launch(size), name) == []
    one = [set(reports[0].items()) for reports in checks.values()]
    assert not set.intersection(*one), "a checksum that does not change sees nothing"


@pytest.mark.parametrize(("size", "name"), jobs(FLIPPED, QUICK))
def test_one_flipped_bit_is_found_by_the_next_check_with_parameter_and_rank(launch, size, name):
    checks = checks_of(launch(size), name)
    before = [reports for step, reports in checks.items() if step <= FLIPPED_AT]

    [found] = divergences(checks[FIRST_CHECK])

    assert [divergences(reports) for reports in before] == [[]] * len(before)
    assert found.copies[1].endswith(FLIPPED[name])
    if size == 2:  # nobody can tell which of two is wrong
        assert (found.ranks, found.others) == ((0, 1), ())
    else:
        assert found.ranks == (FAULTY_RANK,)
        assert found.others == tuple(rank for rank in range(size) if rank != FAULTY_RANK)


@pytest.mark.parametrize(("size", "name"), jobs(FLIPPED, QUICK))
def test_a_flipped_bit_is_one_alert_for_each_rank_that_may_hold_it(launch, size, name):
    alerts = alerts_of(launch(size), name)
    begun = [alert for alert in alerts if alert.step == FIRST_CHECK]

    assert min(alert.step for alert in alerts) == FIRST_CHECK
    assert [(a.rule, a.rank, a.severity) for a in begun] == [
        ("replica-divergence", rank, Severity.CRITICAL) for rank in ((0, 1) if size == 2 else (FAULTY_RANK,))
    ]
    assert all(alert.num_series == 1 and FLIPPED[name] in alert.message for alert in begun)


@pytest.mark.parametrize(("size", "name"), jobs(["ddp-skipped-sync"], {2: (), 4: ("ddp-skipped-sync",)}))
def test_ranks_that_stop_reducing_their_gradients_are_found_at_once(launch, size, name):
    checks = checks_of(launch(size), name)

    found = divergences(checks[FIRST_CHECK])

    assert {each.copies for each in found} == set(checks[FIRST_CHECK][0])
    assert all(each.ranks == tuple(range(size)) for each in found)


def diagnosis_of(folder, name):
    """Store a run and its alerts as an agent does, and return what the diagnosis says of it."""
    run_dir = folder / "output" / name
    writer = SegmentWriter(run_dir / "nodes/node/segments")
    for header, block in blocks_of(folder, name):
        writer.add(header, header.series, block)
    writer.commit({0: JournalPosition(1, Cursor(0, STEPS))})
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for alert in alerts_of(folder, name):
        log.append(alert)
    return diagnose(run_dir)


PARTED = {
    "megatron-tp-dropout-apart": (FaultPhase.FORWARD, "embedding.embedding_dropout", FLIPPED_AT),
    "megatron-tp-activations-flipped": (FaultPhase.PARAMETER, NORM.removesuffix(".weight"), FIRST_CHECK),
}


@pytest.mark.parametrize(("size", "name"), jobs(PARTED, {2: ("megatron-tp-dropout-apart",)}))
def test_what_parted_the_copies_is_a_forward_only_where_it_was_one(launch, size, name):
    diagnosis = diagnosis_of(launch(size), name)

    phase, module, step = PARTED[name]
    assert (diagnosis.phase, diagnosis.step) == (phase, step), render_text(diagnosis)
    assert diagnosis.module.endswith(module)
    assert f"between step {FIRST_CHECK - INTERVAL} (last equal) and step {FIRST_CHECK}" in diagnosis.headline
