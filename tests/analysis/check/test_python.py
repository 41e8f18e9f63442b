"""`from trainermon import check`: the verdicts as values, and as the files of the command."""

import pytest

from tests.analysis.check.test_check import dumped, plant_nan
from trainermon import check
from trainermon.accuracy.judge import Status
from trainermon.core.errors import ConfigError, DumpError


def test_a_report_has_the_calls_of_every_dump_and_writes_files(tmp_path):
    dumped(tmp_path / "dump", alter=plant_nan)

    report = check(tmp_path / "dump", skip=["*.backward"])

    assert [call.key for call in report.of(Status.ERROR)] == ["Functional.linear.0.forward"]
    assert len(report.calls) == 5
    paths = report.save(tmp_path / "out", ["csv", "html"])
    assert {path.parent for path in paths} == {tmp_path / "out" / "step0" / "rank0"}
    assert sorted(path.suffix for path in paths) == [".csv", ".csv", ".html"]


def test_calls_are_chosen_and_run_again(tmp_path):
    directory = dumped(tmp_path, alter=plant_nan)

    [call] = check(str(directory), only=["*linear.0.forward"], devices=["cpu"]).calls

    assert call.cause == "transient: cpu gives the right result now"


def test_what_cannot_be_checked_is_an_error(tmp_path):
    with pytest.raises(DumpError, match="holds no dump"):
        check(tmp_path)
    (tmp_path / "dump.json").write_text("{")
    with pytest.raises(DumpError, match=r"dump\.json"):
        check(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        check(tmp_path, devices=["nowhere"])
