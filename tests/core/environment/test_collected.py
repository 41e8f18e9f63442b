"""What is collected of machine, packages and code is what others say of them."""

import hashlib
import importlib.metadata
import json
import os
import stat
import subprocess
import sys
import zipfile

import pytest

from trainermon.core.environment.code import collect_code
from trainermon.core.environment.pack import EnvironmentPack, update_pack, write_pack
from trainermon.core.environment.packages import collect_packages, normal_name, same_version
from trainermon.core.environment.secrets import Redactor
from trainermon.core.environment.system import collect_system
from trainermon.core.environment.variables import VariableMeaning, all_variables, allowed_settings, meaning_of


def test_the_packages_are_those_that_pip_lists():
    pytest.importorskip("pip", reason="an environment may have been made without pip")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    found = {name: package.version for name, package in collect_packages(Redactor()).items()}

    assert found == {normal_name(package["name"]): package["version"] for package in listed}


@pytest.mark.parametrize("folder", ["setuptools/_vendor", "ray/thirdparty_files"])
def test_packages_that_a_package_carries_for_itself_are_not_counted(folder, tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    for place, name in ((installed, "installed"), (installed / folder, "carried-along")):
        metadata = place / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        monkeypatch.syspath_prepend(place)

    assert importlib.metadata.version("carried-along") == "1.0"
    found = collect_packages(Redactor())
    assert "installed" in found
    assert "carried-along" not in found


def test_versions_are_equal_as_pep_440_has_it():
    packaging = pytest.importorskip("packaging.version", reason="the base dependencies do not have it")
    text = (
        "1 1.0 1.0.0 v1.0 1.0a1 1.0-alpha.1 1.0rc1 1.0-c1 1.0.post1 1.0-1 1!1.0 1.0+cpu 1.0+cu121 1.0.dev0 1.0.dev 2.0"
    )
    spellings = [*text.split(), "1.0b2", "1.0beta2", "1.0+ubuntu-1", "1.0+ubuntu.1"]

    for one in spellings:
        for other in spellings:
            assert same_version(one, other) is (packaging.Version(one) == packaging.Version(other)), (one, other)


@pytest.mark.extras
def test_the_system_is_what_torchs_own_report_says():
    report = pytest.importorskip("torch.utils.collect_env", reason="the base dependencies have no torch")
    found = collect_system()

    assert report.get_os(report.run) == f"{found['os']} ({found['architecture']})"
    assert report.get_libc_version() == str(found["libc"]).replace(" ", "-")
    assert found["cpu.model"] in report.get_cpu_info(report.run)


def test_the_system_is_what_the_kernel_says():
    found = collect_system()

    assert found["cpu.cores"] == len(os.sched_getaffinity(0))
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert os.uname().release in str(found["kernel"])


def test_a_repository_is_described_without_its_diff(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    script = tmp_path / "train.py"
    script.write_text("lr = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "remote", "add", "origin", "https://me:s3cretpassword@example.com/x.git"], check=True)
    clean = collect_code(tmp_path, [script], Redactor())
    script.write_text("lr = 2  # password is hunter2hunter2\n")
    changed = collect_code(tmp_path, [script], Redactor())

    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    diff = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=True).stdout
    assert (clean["git.commit"], clean["git.dirty"]) == (commit, False)
    assert changed["git.dirty"]
    assert changed["git.diff_sha256"] == hashlib.sha256(diff).hexdigest()
    assert changed["file.train.py"] == hashlib.sha256(script.read_bytes()).hexdigest() != clean["file.train.py"]
    assert "s3cret" not in str(changed)
    assert "hunter2" not in str(changed)


def test_only_known_settings_may_be_kept_by_a_run():
    environ = {"NCCL_ALGO": "Ring", "HOME": "/x", "MY_FLAG": "1", "HF_TOKEN": "abc", "OMP_NUM_THREADS": "4"}

    assert allowed_settings(environ, Redactor()) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}
    assert set(all_variables(environ, Redactor())) == set(environ)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("HCCL_DETERMINISTIC", "numbers"),
        ("NVIDIA_TF32_OVERRIDE", "numbers"),
        ("CUBLAS_WORKSPACE_CONFIG", "numbers"),
        ("NCCL_P2P_DISABLE", "speed"),
        ("MASTER_PORT", "place"),
        ("NCCL_SOCKET_IFNAME", "place"),
        ("WHO_KNOWS", "unknown"),
    ],
)
def test_a_variable_is_known_by_its_name(name, meaning):
    assert meaning_of(name) is VariableMeaning(meaning)


def test_a_pack_is_private_and_holds_what_msprobe_reads(tmp_path):
    path = tmp_path / "folder" / "pack.zip"
    packages = {"torch": {"version": "2.4", "source": "", "record": ""}}
    write_pack(path, EnvironmentPack(sections={"variables": {"A": "1"}, "packages": packages}))
    update_pack(path, {"weights/step0/rank1/weight.json": b"{}"})

    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("env")) == {"A": "1"}
        assert archive.read("pip") == b"torch=2.4\n"
        assert "weights/step0/rank1/weight.json" in archive.namelist()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["pack.zip"]


def test_a_pack_keeps_what_other_ranks_of_the_job_have_written_before_it(tmp_path):
    path = tmp_path / "pack.zip"
    path.write_bytes(b"not a zip")
    for rank in (0, 1, 2):
        update_pack(path, {f"ranks/rank{rank}.json": b"{}", f"weights/step0/rank{rank}/weight.json": b"{}"})
    write_pack(path, EnvironmentPack(sections={}), world_size=2)

    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["ranks/rank1.json", "trainermon.json", "weights/step0/rank1/weight.json"]
