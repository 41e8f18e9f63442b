"""A disk that answers nobody: training goes on beside it, and what was to be written comes when it answers again."""

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
DEADLINE_S = 90

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, TOOLS)), reason="needs root, and a disk of its own to freeze"
)


class Disk:
    """An ext4 file system on a loop device."""

    def __init__(self, folder):
        self.path = folder / "disk"
        self.is_frozen = False
        self.path.mkdir()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        mounted = subprocess.run(["mount", "-o", "loop", image, self.path], check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip(f"no loop device can be mounted here: {mounted.stderr.decode()}")
        self.path.chmod(0o700)

    def freeze(self):
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True)
        self.is_frozen = True

    def thaw(self):
        if self.is_frozen:
            subprocess.run(["fsfreeze", "--unfreeze", self.path], check=True)
        self.is_frozen = False

    def remove(self):
        self.thaw()
        subprocess.run(["umount", "--lazy", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    yield disk
    disk.remove()


WORKER = """
import json, sys
import torch
from torch import nn
from trainermon import TrainerMon

def train(monitor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if monitor is not None:
        monitor.set_monitor(model, optimizer)
        print("attached", flush=True)
        sys.stdin.readline()
    for step in range(40):
        loss = model(torch.randn(4, 8)).square().mean()
        if step == 20:
            loss = loss * torch.inf
        loss.backward()
        if step == 20:
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        if monitor is not None:
            monitor.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]

expected = train(None)
monitor = TrainerMon(json.loads(sys.argv[1]))
print("same" if train(monitor) == expected else "other", flush=True)
sys.stdin.readline()
monitor.close()
print("closed", flush=True)
"""


class Training:
    """A training process that waits after `set_monitor` and before `close`."""

    def __init__(self, output, *, environment, prefix=(), **config):
        self.run = output / "run"
        plain = {"run_id": "run", "xy_distribution": True, "print_struct": True, "wg_distribution": True, **config}
        environment = {**os.environ, "TRAINERMON_OUTPUT": str(output), **environment}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", WORKER, json.dumps(plain)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.answer() == "attached"

    def answer(self):
        """Return what it says next; a process that waits for a frozen disk says nothing, and cannot even be killed."""
        said, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        return self.process.stdout.readline().strip() if said else "nothing"

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        """Leave nothing behind; the disk must answer again."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("has_agent", [False, True], ids=["alone", "with an agent"])
def test_training_ends_beside_an_output_that_hangs_and_the_dump_comes_later(disk, tmp_path, has_agent):
    agent = {"start": has_agent, "linger_s": 0, "wait_s": 30}
    training = Training(disk.path, environment={"TRAINERMON_SPOOL": str(tmp_path / "spool")}, agent=agent)
    try:
        disk.freeze()
        assert training.go_on() == "same"
        disk.thaw()
        assert training.go_on() == "closed"
    finally:
        disk.thaw()
        training.end()

    assert list(Path(training.run / "dumps/gradient-nonfinite/attempt1").glob("step*/rank0/dump.json"))
    assert (training.run / "module_struct/rank0/module_struct.json").exists()


def test_training_ends_beside_a_local_disk_that_hangs(disk, tmp_path):
    """By default the spool is in memory where there is room; the disk lies where it would be otherwise."""
    script = f'mount -t tmpfs -o size=16g tmpfs /dev/shm && mount --bind {disk.path} /var/tmp && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    output = tmp_path / "output"
    training = Training(output, environment={"TRAINERMON_SPOOL": ""}, prefix=prefix, agent={"start": False})
    try:
        disk.freeze()
        assert training.go_on() == "same"
        assert training.go_on() == "closed"
    finally:
        disk.thaw()
        training.end()

    assert list((output / "run").glob("dumps/gradient-nonfinite/attempt1/step*/rank0/dump.json"))
    assert not (disk.path / "trainermon-0").exists()
