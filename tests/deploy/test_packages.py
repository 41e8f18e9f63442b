"""What is built for others is whole, whatever can be built from: also a checkout without symbolic links."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_PACKED = {"README.md", ".lint", "types.d.ts"}  # for those who work on it
PROMISED = ["alerts", "dashboards", "exporters", "monitor"]


def committed(folder):
    command = ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD", folder]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in names.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution and a wheel of the last commit, checked out where links are plain files."""
    checkout, products = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    clone = ["git", "-c", "core.symlinks=false", "clone", "--quiet", "--depth=1", f"file://{ROOT}", checkout]
    subprocess.run(clone, check=True)
    run = checkout / "trainermon_output" / "run-1"  # as a run leaves it
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", products, checkout]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return products


def test_the_links_at_the_top_lead_into_the_package():
    links = {path.name: path for path in ROOT.iterdir() if path.is_symlink()}

    assert sorted(links) == PROMISED
    assert all(str(path.readlink()) == f"trainermon/{name}" for name, path in links.items())


def test_the_wheel_has_every_module_and_file_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    needed = {name for name in committed("trainermon") if Path(name).name not in NOT_PACKED}

    assert needed - packed == set()


def test_nothing_of_a_run_is_packed(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = [*opened.getnames(), *zipfile.ZipFile(wheel).namelist()]

    assert {name.partition("/")[0].partition("-")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"trainermon"}
    assert [name for name in packed if "trainermon_output" in name] == []


def test_one_wheel_serves_every_version_of_python(built):
    (wheel,) = built.glob("*.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]

    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert libraries == ["trainermon/statistics/_moments.so"]


def test_the_source_distribution_has_tests_docs_and_examples(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}

    for folder in ("trainermon", "tests", "docs", "examples", "helm", "requirements", ".github", ".ci", "SECURITY.md"):
        assert {name for name in committed(folder) if name not in packed} == set()
