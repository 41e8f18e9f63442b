"""A trusted device that is coarser than float32 excuses what is about as coarse, and nothing else."""

import json

import pytest

from tests.analysis.check.test_check import dumped, plant_nan
from trainermon.cli import main


def scaled(factor):
    return lambda values: values.mul_(factor)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trusted")
    trusted = dumped(folder / "dump", alter=scaled(1 + 1e-3))
    assert main(["check", "calibrate", str(trusted), "-o", str(folder / "baseline.json")]) == 0
    return folder / "baseline.json"


@pytest.mark.parametrize(
    ("alter", "status"),
    [(scaled(1 + 1e-3), 0), (scaled(1 + 2e-3), 0), (scaled(1 + 1e-2), 3), (plant_nan, 3)],
    ids=["as coarse", "about as coarse", "coarser", "NaN"],
)
def test_errors_of_the_size_of_a_trusted_devices_are_warnings(tmp_path, capsys, baseline, alter, status):
    dump = dumped(tmp_path, alter=alter)

    assert main(["check", "run", str(dump), "--exit-code"]) == 3
    assert "as far off as the baseline" not in capsys.readouterr().out
    assert main(["check", "run", str(dump), "--exit-code", "--baseline", str(baseline)]) == status
    assert ("as far off as the baseline" in capsys.readouterr().out) == (status == 0)


def test_other_operations_are_not_excused(baseline):
    worst = json.loads(baseline.read_text())["worst"]

    assert worst["linear.forward.float32"] > 100
    assert worst["gelu.forward.float32"] < 1


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 1, "worst": {"linear": []}}', '{"schema": 2}'])
def test_another_file_is_refused(tmp_path, capsys, text):
    path = tmp_path / "baseline.json"
    path.write_text(text)

    assert main(["check", "run", str(dumped(tmp_path / "dump")), "--baseline", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
