"""The wheel in an empty environment, of every Python that it is for and that this machine has."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.test_packages import built  # noqa: F401  # the fixture

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
LOCK = Path(__file__).parents[2] / "requirements/base.lock"
LOAD = "import ctypes, trainermon; ctypes.CDLL(trainermon.__path__[0] + '/statistics/_moments.so').trainermon_moments"


def interpreter(version):
    """Return a Python of this version: this one, one on the path, or one that pyenv has installed."""
    if version == OWN:
        return sys.executable
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    return str(installed[-1]) if installed else None


@pytest.fixture(params=[v if v == OWN else pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS])
def python(request, built, tmp_path):  # noqa: F811
    """An interpreter in an environment that holds the wheel and the base dependencies."""
    base = interpreter(request.param)
    if base is None:
        pytest.skip(f"there is no Python {request.param} here")
    subprocess.run([base, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    (wheel,) = built.glob("*.whl")
    # Locked where they are locked for this version; elsewhere what pip finds, as a user's pip does.
    install = [python, "-m", "pip", "install", "--quiet"]
    if request.param == OWN:
        subprocess.run([*install, "--require-hashes", "-r", LOCK], check=True)
        install.append("--no-deps")
    subprocess.run([*install, wheel], check=True)
    return python


def run(python, *words, cwd, status=0):
    done = subprocess.run(
        [python.with_name("trainermon"), *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def test_the_installed_wheel_works_without_torch(python, tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "recorded/run", tmp_path / "run")

    assert "compare two dumps" in run(python, "--help", cwd=tmp_path).stdout
    assert "(1 row)" in run(python, "query", "run", "SELECT count(*) AS n FROM stats", cwd=tmp_path).stdout
    assert "gradient-nonfinite" in run(python, "rules", "list", cwd=tmp_path).stdout
    run(python, "rules", "test", "default", "run", cwd=tmp_path, status=3)
    run(python, "dashboards", "write", "grafana", cwd=tmp_path)
    assert "complete -" in run(python, "completion", "bash", cwd=tmp_path).stdout
    assert "needs the package torch" in run(python, "check", "run", "dump", cwd=tmp_path, status=1).stderr
    subprocess.run([python, "-c", LOAD], cwd=tmp_path, check=True)


def test_the_wheel_says_who_made_it_where_and_for_which_glibc(built):  # noqa: F811
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        library = archive.read("trainermon/statistics/_moments.so")

    tag = re.search(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$", wheel.name)
    assert tag, wheel.name
    wheel.with_name("_moments.so").write_bytes(library)
    listed = subprocess.run(
        ["objdump", "-T", wheel.with_name("_moments.so")], capture_output=True, text=True, check=True
    )
    asked_for = {int(minor) for minor in re.findall(r"\(?GLIBC_2\.(\d+)", listed.stdout)}
    assert int(tag[1]) == max({17, *asked_for})
    assert "Requires-Python: >=3.10" in metadata
    assert "Project-URL" not in metadata  # there is none before a release, see test_release.py
    assert "Author: The trainermon maintainers" in metadata
