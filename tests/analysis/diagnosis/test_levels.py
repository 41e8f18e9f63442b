"""The way down that a diagnosis of a non-finite step tells, and what it asks for where the way ends."""

import pytest

from tests.analysis.stored_run import ALL_NAN, FINITE, dump, grad, store
from trainermon import PrecisionDebugger
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import PlaceLevel
from trainermon.analysis.diagnosis.next_collection import write_configurations
from trainermon.analysis.diagnosis.report import render_text
from trainermon.core.config import load_config
from trainermon.core.values import Kind


def tell_places(run_dir, places):
    (run_dir / "ranks").mkdir(exist_ok=True)
    for rank, (dp, tp) in enumerate(places):
        sizes = f'"dp": {dp}, "dp_size": 2, "tp": {tp}, "tp_size": 2'
        text = f'{{"rank": {rank}, "coordinates": {{"rank": {rank}, {sizes}}}}}'
        (run_dir / f"ranks/rank{rank:05d}.json").write_text(text)


def test_every_level_is_told_with_its_source(tmp_path):
    own = grad("fc.weight", Kind.GRAD_UNREDUCED)
    store(tmp_path, {5: {rank: {own: ALL_NAN if rank == 3 else FINITE} for rank in range(4)}})
    for rank in range(4):
        dump(tmp_path, rank, (2.0, 0, 1 if rank == 3 else 0))
    tell_places(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)])

    diagnosis = diagnose(tmp_path)

    assert [level.level for level in diagnosis.levels] == list(PlaceLevel)
    answers = {level.level: (level.answer, level.source) for level in diagnosis.levels}
    assert answers[PlaceLevel.STEP] == ("5", "stored rows, dumps")
    assert answers[PlaceLevel.DOMAIN] == ("tp 1, dp 1", "ranks")
    assert answers[PlaceLevel.RANK] == ("3", "dumps")
    assert answers[PlaceLevel.MODULE] == ("fc", "dumps")
    assert answers[PlaceLevel.API][0] == ""
    assert "domain     tp 1, dp 1: rank 3 and no other" in render_text(diagnosis)


@pytest.fixture
def no_debugger():
    yield
    PrecisionDebugger.close()


@pytest.mark.usefixtures("no_debugger")
def test_without_dumps_and_own_gradients_both_are_asked_for(tmp_path):
    store(tmp_path / "run", {5: {rank: {grad("fc.weight"): ALL_NAN} for rank in range(2)}})

    diagnosis = diagnose(tmp_path / "run")
    write_configurations(diagnosis.collect, tmp_path / "next")

    monitor, notes = load_config(tmp_path / "next/monitor_config.json")
    assert (monitor.replay.enabled, notes) == (True, ())
    config = PrecisionDebugger(tmp_path / "next/config.json").config
    assert (config.level, config.step, config.task) == ("mix", (5,), "statistics")
    assert "next       no replay of the step" in render_text(diagnosis)
