"""Laws on real trainings of two ranks, each with one silent error, judged from what the monitor wrote."""

import dataclasses
import functools
from pathlib import Path

import pytest

from tests.alerts.laws import reduced_by_hand
from tests.alerts.laws.training import CUT_FROM, STEPS, WRONG_FROM
from tests.journal_rows import only_spool
from tests.ranks import run_ranks
from trainermon.agent.integrity import IntegrityCheck
from trainermon.alerts.conditions.criteria import BreaksLaw
from trainermon.alerts.engine import RuleEngine
from trainermon.alerts.log import AlertLog
from trainermon.alerts.rules import load_rules
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import FaultPhase
from trainermon.core.journal import BlockRecord, Cursor, Header, HeaderRecord, JournalReader, SeriesRecord
from trainermon.core.values import Alert, AlertState, StatBlock
from trainermon.exporters.store.segments import JournalPosition
from trainermon.exporters.store.store import SegmentWriter
from trainermon.monitor.taps.loop.lost_gradients import AFTER

MEGATRON, MEGATRON_STEPS = Path(__file__).with_name("megatron_training.py"), 6
DEEPSPEED, DEEPSPEED_STEPS = Path(__file__).with_name("deepspeed_training.py"), 6
BY_HAND = Path(__file__).with_name("reduced_by_hand.py")
SOUND = ("sequence parallel", "context parallel", "tied stages", "experts", "per-token loss", "clipped shards")
TRAINING = Path(__file__).with_name("training.py")
LAWS = {rule.name for rule in load_rules() if isinstance(rule.when, BreaksLaw)}


def written(spool: Path, rank: int) -> list[tuple[Header, StatBlock]]:
    """Return every step of a rank, with the header as it was then."""
    header, found = None, []
    reader = JournalReader(spool, rank)
    while records := reader.poll():
        for record in records:
            match record:
                case HeaderRecord():
                    header = record.header
                case SeriesRecord():
                    series, placements = header.series + record.keys, header.placements + record.placements
                    header = dataclasses.replace(header, series=series, placements=placements)
                case BlockRecord():
                    found.append((header, record.block))
    return found


@functools.cache
def alerts_of(fault: str, folder: Path) -> list[Alert]:
    run_ranks(TRAINING, fault, str(folder))
    return judged(folder, STEPS)


def steps_of(folder: Path) -> list[tuple[Header, StatBlock]]:
    spool = only_spool(folder)
    steps = [step for rank in range(2) for step in written(spool, rank)]
    return sorted(steps, key=lambda step: (step[1].step, step[0].coordinates.rank))


def judged(folder: Path, num_steps: int) -> list[Alert]:
    """Return what fires by the default rules in what two ranks wrote."""
    engine, steps = RuleEngine(load_rules()), steps_of(folder)
    assert len(steps) == 2 * num_steps
    found = [alert for header, block in steps for alert in engine.evaluate(header, header.series, block)]
    assert not engine.faults
    return [alert for alert in found if alert.state is AlertState.FIRING]


@pytest.mark.parametrize(
    ("fault", "rule", "first_step"),
    [
        ("still", "parameters-stand-still", WRONG_FROM),
        ("own", "reduction-not-linear", WRONG_FROM),
        ("own", "reduced-gradients-differ", WRONG_FROM),
        ("lost on one", "reduced-gradients-differ", WRONG_FROM),
        ("late", "reduction-not-linear", WRONG_FROM),
        ("sharded, own part clipped", "clip-factors-differ", WRONG_FROM),
        ("sharded, gathered", "model-not-optimizers-copy", WRONG_FROM + 2),
        ("clipped on one", "clip-factors-differ", WRONG_FROM),
        ("averaged twice", "reduction-scaled-twice", WRONG_FROM),
        ("not cleared", "gradients-not-cleared", WRONG_FROM + 1),
        ("lost", "no-gradient", WRONG_FROM),
        ("nothing on one", "rank-without-gradient", WRONG_FROM),
        ("no gradient", "no-gradient", WRONG_FROM),
        ("same data", "ranks-share-data", 0),
        ("cut", "parameter-without-gradient", 20),
        ("unfrozen", "reduced-gradients-differ", WRONG_FROM + 1),
        ("replaced", "reduced-gradients-differ", WRONG_FROM + 1),
        ("cut later", "gradient-lost", CUT_FROM + AFTER),
    ],
)
def test_the_broken_law_is_named_with_the_step_on_which_it_broke(
    tmp_path: Path, fault: str, rule: str, first_step: int
) -> None:
    found = {alert.rule: alert for alert in alerts_of(fault, tmp_path)}

    assert rule in found
    assert found[rule].first_step == first_step
    follows = {"gradients-not-cleared"} if fault == "still" else set()  # its optimizer clears other tensors, too
    assert LAWS & set(found) <= {rule, "reduction-not-linear", "reduced-gradients-differ", *follows}


@pytest.mark.parametrize(
    ("fault", "phase"), [("lost on one", FaultPhase.REDUCTION), ("rate on one", FaultPhase.OPTIMIZER)]
)
def test_what_parts_copies_is_the_reduction_or_the_optimizer(tmp_path: Path, fault: str, phase: FaultPhase) -> None:
    spool, run_dir = tmp_path / "spool", tmp_path / "run"
    run_ranks(TRAINING, fault, str(spool))
    writer = SegmentWriter(run_dir / "nodes/node/segments")
    for header, block in steps_of(spool):
        writer.add(header, header.series, block)
    writer.commit({0: JournalPosition(1, Cursor(0, STEPS))})
    log = AlertLog(run_dir / "nodes/node/alerts.jsonl")
    for alert in judged(spool, STEPS):
        log.append(alert)

    diagnosis = diagnose(run_dir)

    assert (diagnosis.phase, diagnosis.step) == (phase, WRONG_FROM)


def test_modules_that_are_set_otherwise_on_one_rank_are_told_on_the_first_step(tmp_path: Path) -> None:
    found = [alert for alert in alerts_of("set on one", tmp_path) if alert.rule == "module-settings-differ"]

    assert {(alert.rank, alert.first_step) for alert in found} == {(0, 0), (1, 0)}
    assert {finding.series.slot for alert in found for finding in alert.findings} == {"Network"}


def test_batches_that_come_twice_are_told(tmp_path: Path) -> None:
    assert {alert.rule for alert in alerts_of("twins", tmp_path)} & LAWS == {"inputs-come-twice"}


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "unfrozen in time",
        "one batch",
        "summed",
        "clipped",
        "sharded, clipped",
        "sharded, each parameter clipped",
        "sharded, gathered and released",
    ],
)
def test_nothing_is_said_of_a_sound_training(tmp_path: Path, fault: str) -> None:
    assert alerts_of(fault, tmp_path) == []


def test_the_alert_names_parameters_size_and_what_rounding_explains(tmp_path: Path) -> None:
    (alert, *_) = [alert for alert in alerts_of("cut", tmp_path) if alert.rule == "parameter-without-gradient"]

    assert {finding.series.name for finding in alert.findings} == {"embed.weight", "first.weight", "first.bias"}
    assert "3 of 7" in alert.message


def checked(folder: Path) -> list[Alert]:
    """Return what the agent finds of shards and norms that do not add up."""
    found: list[Alert] = []
    engine = RuleEngine(load_rules())
    check = IntegrityCheck(lambda statement: found.extend(engine.report(statement)))
    for header, block in steps_of(folder):
        check.on_block(header, header.series, block)
    assert check.num_checked == MEGATRON_STEPS
    return found


def test_megatron(tmp_path: Path) -> None:
    run_ranks(MEGATRON, str(tmp_path), "unmarked norm", "uncounted weights", "shared experts", *SOUND)

    (uncounted,) = checked(tmp_path / "uncounted weights")
    names = ", ".join(f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(2))
    assert f"which is the norm with {names} counted on tp 0 only" in uncounted.message

    alerts = {alert.rule: alert for alert in judged(tmp_path / "unmarked norm", MEGATRON_STEPS)}
    unmarked = alerts["reduced-gradients-differ"]
    norms = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    assert {finding.series.name for finding in unmarked.findings} == norms
    assert unmarked.first_step == 0
    shared = {alert.rank: alert for alert in judged(tmp_path / "shared experts", MEGATRON_STEPS)}
    assert {(alert.rule, alert.first_step) for alert in shared.values()} == {("experts-share-gradients", 0)}
    for rank, alert in shared.items():
        named = {finding.series.name.split("local_experts.")[1][0] for finding in alert.findings}
        assert named == {str(2 * rank), str(2 * rank + 1)}
    for name in SOUND:
        assert not LAWS & {alert.rule for alert in judged(tmp_path / name, MEGATRON_STEPS)}, name
        assert checked(tmp_path / name) == [], name


def test_what_the_script_reduces_is_judged_as_the_optimizer_finds_it(tmp_path: Path) -> None:
    run_ranks(BY_HAND, str(tmp_path), *reduced_by_hand.SOUND, *reduced_by_hand.UNREDUCED)

    for name in reduced_by_hand.SOUND:
        assert judged(tmp_path / name, reduced_by_hand.STEPS) == [], name
    for name in reduced_by_hand.UNREDUCED:
        alerts = {alert.rule: alert for alert in judged(tmp_path / name, reduced_by_hand.STEPS)}
        named = {finding.series.name for finding in alerts["reduced-gradients-differ"].findings}
        assert (named, alerts["reduced-gradients-differ"].first_step) == ({*reduced_by_hand.IGNORED}, 0), name


def test_deepspeed(tmp_path: Path) -> None:
    sound = [f"stage {stage}" for stage in range(4)]
    run_ranks(DEEPSPEED, str(tmp_path), "lost on one", *sound)

    found = {alert.rule: alert for alert in judged(tmp_path / "lost on one", DEEPSPEED_STEPS)}
    assert found["reduced-gradients-differ"].first_step == 0
    for name in sound:
        assert not LAWS & {alert.rule for alert in judged(tmp_path / name, DEEPSPEED_STEPS)}, name
        assert checked(tmp_path / name) == [], name
