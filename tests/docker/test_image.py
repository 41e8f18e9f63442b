"""The image, as far as it can be had without docker: its file, what its commands install, and that on a read-only root.

The installation is the Dockerfile's own commands, with other paths, by the interpreter of the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.nodes import Run, expected, wait_for
from tests.package_programs import find_wheels
from tests.ports import free_port
from tests.server_programs import CACHE

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
LOCK = ROOT / "requirements" / "image.lock"
MAX_INSTALLED_MB = 220
# As in a pod: another user's number, everything read-only but one folder.
RESTRICTED = """
mount --bind "$1" "$1" && mount -o remount,ro,bind / && shift &&
exec unshare --user --map-user=65532 --map-group=65532 "$@"
"""


def commands():
    """Return the shell commands of the Dockerfile's RUN lines, one by one."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [word.strip() for line in re.findall(r"^RUN (.+)$", text, re.MULTILINE) for word in line.split("&&")]


def sources():
    """Return what `docker build` would send, by the .dockerignore beside the Dockerfile."""
    kept = re.findall(r"^!(.+)$", DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(), re.MULTILINE)
    return [ROOT / name for name in kept]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder that becomes /opt/trainermon; what it holds beside trainermon comes from the cache."""
    source = tmp_path_factory.mktemp("source")
    for path in sources():
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        if path.is_dir():
            shutil.copytree(path, source / path.name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source)
    make, install_lock, install_trainermon = commands()
    key = hashlib.sha256(LOCK.read_bytes() + (ROOT / "requirements/base.lock").read_bytes()).hexdigest()[:8]
    # An environment knows its own place, so this is where it is made and stays.
    place = CACHE / f"image-{sys.version_info[0]}.{sys.version_info[1]}-{key}"
    if not (place / ".complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        for command in (make, install_lock):
            run(command, source, place)
        (place / ".complete").touch()
    run(install_trainermon, source, place)
    return place


def run(command, source, place):
    own = f"{sys.executable} -m pip --disable-pip-version-check --quiet"
    command = command.replace("python -m venv", f"{sys.executable} -m venv").replace("/source", str(source))
    command = re.sub(r"^pip ", f"{own} ", command).replace("/opt/trainermon", str(place))
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_the_linter_has_no_complaint():
    done = subprocess.run(
        [find_wheels("hadolint") / "bin/hadolint", DOCKERFILE], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_everything_that_is_sent_is_there():
    assert all(path.exists() for path in sources())


def test_the_lock_has_the_versions_that_are_tested():
    def pins(name):
        return set(re.findall(r"^[\w.-]+==.+$", (ROOT / "requirements" / name).read_text(), re.MULTILINE))

    assert pins("image.lock") <= pins("dev.lock")


def test_it_holds_what_agent_and_controller_need_and_no_torch(installed):
    code = """
import importlib, json, sys
for name in ("agent.daemon", "agent.loop", "agent.lifecycle.service", "agent.controller.controller",
             "agent.controller.http", "agent.controller.discovery", "alerts.prometheus.rules", "exporters.store.query"):
    importlib.import_module(f"trainermon.{name}")
import importlib.metadata as metadata
print(json.dumps([sorted(d.name.lower() for d in metadata.distributions()), "torch" in sys.modules]))
"""
    done = subprocess.run([installed / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    names, has_torch = json.loads(done.stdout)
    assert not has_torch
    assert {"aiohttp", "duckdb", "influxdb-client", "trainermon"} <= set(names)
    assert not {"torch", "pip", "ray", "pyarrow"} & set(names)


def test_it_is_small(installed):
    size = sum(path.lstat().st_size for path in installed.rglob("*"))

    assert size < MAX_INSTALLED_MB * 1e6, f"{size / 1e6:.0f} MB are installed"


def test_its_rules_can_be_read(installed):
    """Files beside the code, runbooks among them, are in the package too."""
    done = subprocess.run(
        [installed / "bin/trainermon", "rules", "prometheus"], capture_output=True, text=True, check=False, cwd="/"
    )

    assert done.returncode == 0, done.stderr
    assert "alert: TrainermonHang" in done.stdout


def test_an_agent_works_as_another_user_on_a_read_only_root(installed, tmp_path):
    sandbox = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", RESTRICTED, "sh", tmp_path]
    if subprocess.run([*sandbox, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this kernel gives nobody a namespace of their own")
    probe = subprocess.run([*sandbox, "touch", "/tmp/probe"], check=False, capture_output=True, text=True)
    assert "Read-only file system" in probe.stderr
    port = free_port()
    options = ["--spool", tmp_path / "spool", "--host=0.0.0.0", f"--port={port}", "--log-to-stderr"]
    run_ = Run(tmp_path)
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(
            [*sandbox, installed / "bin/trainermon", "node", *options],
            stderr=log,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        )
    try:
        rank = run_.rank()
        rank.steps(0, 20)
        wait_for(lambda: node.poll() is not None or run_.status().get("url"), "an agent with a page")
        assert b"trainermon_step{" in run_.get("metrics"), (tmp_path / "log").read_text()
        rank.end()
        run_.gone()
    finally:
        node.terminate()
        node.wait(60)
        run_.close()
    assert run_.stored() == expected(0, range(20))
    assert f"page http://127.0.0.1:{port}/" in (tmp_path / "log").read_text()
