"""The run of the version before: its dead gradient is found by its alerts, which say no condition yet."""

import shutil
from pathlib import Path

from trainermon.analysis.diagnosis.findings import Symptom
from trainermon.analysis.diagnosis.rows.symptoms import find_episodes
from trainermon.exporters.store.tables import open_run

RUN = Path(__file__).parents[3] / "recorded" / "run"


def test_the_dead_gradient_of_a_recorded_run_is_found(tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")

    (episode,) = find_episodes(run, 1, {})

    assert (episode.symptom, episode.rule, episode.first_step, episode.last_step) == (
        Symptom.DIED,
        "gradient-dead",
        9,
        18,
    )
    assert episode.series == {("grad_reduced", "2.weight", "", 0)}


def test_the_rows_of_a_recorded_run_are_read(tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")

    with open_run(run) as connection:
        query = "SELECT step, zeros FROM stats WHERE kind = 'grad_reduced' AND name = '2.weight' ORDER BY step"
        rows = connection.execute(query).fetchall()

    assert [step for step, _ in rows] == list(range(20))
    assert [step for step, zeros in rows if zeros == 3] == list(range(9, 14))
