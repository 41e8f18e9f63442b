"""Names, call numbers, nesting and values, held against what mindstudio-probe 26.2 writes for the same model.

`recorded/msprobe_mix.json` is the last line that `oracle_model.py msprobe.pytorch <folder> mix` printed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("oracle_model.py")
RECORDED = Path(__file__).with_name("recorded") / "msprobe_mix.json"
OTHER = Path(__file__).parents[2] / ".venv-bench/bin/python"


def dumped(python, package, folder, level="mix"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(python), str(SCRIPT), package, str(folder), level]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def assert_same(ours, theirs):
    assert len(theirs["outputs"]) > 20
    assert ours["outputs"].keys() == theirs["outputs"].keys()
    assert theirs["parents"].items() <= ours["parents"].items()  # functions that msprobe does not follow hang there too
    for key, numbers in theirs["outputs"].items():
        assert ours["outputs"][key] == pytest.approx(numbers, rel=1e-5, abs=1e-6), key


def test_a_dump_has_the_names_and_values_of_the_recorded_one(tmp_path):
    assert_same(dumped(sys.executable, "trainermon", tmp_path), json.loads(RECORDED.read_text()))


@pytest.mark.slow
@pytest.mark.skipif(not OTHER.exists(), reason="needs mindstudio-probe in .venv-bench; make bench installs it")
@pytest.mark.parametrize("level", ["L1", "mix"])
def test_a_dump_has_the_names_and_values_of_mindstudio_probe(tmp_path, level):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()

    ours = dumped(sys.executable, "trainermon", tmp_path / "ours", level)
    theirs = dumped(OTHER, "msprobe.pytorch", tmp_path / "theirs", level)

    assert_same(ours, theirs)
