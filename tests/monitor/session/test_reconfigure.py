"""An edited configuration: at one step on all ranks, or not at all."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.journal_rows import RankJournal, only_spool
from tests.monitor.session.test_containment import STEPS, assert_same_run, train
from tests.ranks import run_ranks
from trainermon.core.control import ControlReader
from trainermon.core.values import Action, Command
from trainermon.exporters.store.store import open_run


def send(places, first_step, config, name="edit"):
    text = config if isinstance(config, str) else json.dumps(config)
    command = Command(id=name, action=Action.CONFIGURE, first_step=first_step, config=text)
    ControlReader(only_spool(places[0]), 0).send([command])


def kinds_by_step(places):
    journal = RankJournal(only_spool(places[0]))
    return {step: {str(key.kind) for key in rows} for step, rows in journal.rows.items()}


def events(places):
    found = [event for event in RankJournal(only_spool(places[0])).events if event["type"] == "configuration"]
    return [(event["status"], event["step"], event["reason"]) for event in found]


def test_a_new_configuration_applies_at_the_step_that_it_names(places):
    wanted = {"mv_distribution": True, "agent": {"start": False}}
    found = train(None, before_step=lambda step: None)
    watched = train(
        {"agent": {"start": False}}, before_step=lambda step: send(places, 3, wanted) if step == 1 else None
    )

    assert_same_run(watched, found)
    moments = ["exp_avg" in kinds_by_step(places)[step] for step in range(STEPS)]
    assert moments == [step >= 3 for step in range(STEPS)]
    assert events(places) == [("applied", 3, "")]


def test_collect_times_counts_from_the_step_on_which_it_applies(places):
    wanted = {"collect_times": 1, "agent": {"start": False}}
    train({"agent": {"start": False}}, before_step=lambda step: send(places, 2, wanted) if step == 0 else None)

    graded = [step for step, kinds in kinds_by_step(places).items() if "grad_reduced" in kinds]
    assert graded == [0, 1, 2]


def test_a_rank_that_is_late_keeps_what_it_has_and_says_so(places, caplog):
    wanted = {"mv_distribution": True, "agent": {"start": False}}
    with caplog.at_level(logging.WARNING, logger="trainermon"):
        train({"agent": {"start": False}}, before_step=lambda step: send(places, 1, wanted) if step == 2 else None)

    assert not any("exp_avg" in kinds for kinds in kinds_by_step(places).values())
    assert events(places) == [("late", 1, "it was to apply from step 1 on, but this rank is at step 3")]
    assert "the new configuration is late, the old one stays" in caplog.text


def test_keys_that_are_read_once_are_named(places, caplog):
    wanted = {"mv_distribution": True, "agent": {"start": False}, "spool_mb": 9, "run_id": "other"}
    with caplog.at_level(logging.WARNING, logger="trainermon"):
        train({"agent": {"start": False}}, before_step=lambda step: send(places, 2, wanted) if step == 1 else None)

    assert events(places) == [("applied", 2, "but run_id, spool_mb: read once, when a run begins")]
    assert "applies from step 2 on, but run_id, spool_mb" in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"wg_distribution": tr', "Expecting value"),
        ({"wg_distribtion": True}, "unknown key; did you mean 'wg_distribution'"),
        ({"targets": ["nowhere"]}, "'nowhere' names no module or parameter"),
    ],
)
def test_what_is_invalid_changes_nothing_and_is_reported(places, config, reason):
    found = train({"agent": {"start": False}}, before_step=lambda step: send(places, 2, config) if step == 1 else None)

    assert_same_run(found, train(None))
    assert sorted(kinds_by_step(places)) == list(range(STEPS))
    ((status, step, text),) = events(places)
    assert (status, step) == ("refused", 2)
    assert reason in text


@pytest.mark.distributed
def test_an_edited_file_comes_into_force_on_the_same_step_of_both_ranks(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dynamic_on": True, "agent": {"wait_s": 20, "linger_s": 0}}))
    places: Any = {"TRAINERMON_SPOOL": str(tmp_path / "spool"), "TRAINERMON_OUTPUT": str(tmp_path / "output")}
    texts = run_ranks(Path(__file__).with_name("reconfigure_worker.py"), str(path), **places)

    (run,) = (tmp_path / "output").glob("*/run.json")
    log = "".join(path.read_text() for path in run.parent.glob("nodes/*/agent.log"))
    assert "did you mean 'wg_distribution'" in log
    announced = re.search(r"applies from step (\d+) on", log)
    assert announced, texts
    rows = open_run(run.parent).execute(
        "SELECT rank, min(step), max(step) FROM stats WHERE kind = 'exp_avg' GROUP BY rank ORDER BY rank"
    )
    first = int(announced[1])
    assert rows.fetchall() == [(0, first, first + 3), (1, first, first + 3)]
