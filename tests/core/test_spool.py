from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainermon.core import spool
from trainermon.core.errors import SpoolError
from trainermon.core.spool import RankLock, open_spool, rank_alive, rank_pid, remove_spool, spool_of, try_enter

ROOT_MOUNT = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"
HOLDER = """
import os, sys
from pathlib import Path
from trainermon.core.spool import RankLock
lock = RankLock(Path(sys.argv[1]), 3)
{then}
os.write(1, b"ready\\n")
sys.stdin.read()
"""


def start_holder(directory: Path, then: str = "") -> subprocess.Popen[bytes]:
    """Return a process that holds rank 3, is ready, and ends when its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(then=then), str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def everything_is_stored() -> bool:
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def mounts(monkeypatch):
    def install(*lines: str) -> None:
        monkeypatch.setattr(spool, "_read_mountinfo", lambda: "\n".join([ROOT_MOUNT, *lines]) + "\n")

    return install


def test_the_root_comes_from_the_environment_or_is_per_user(monkeypatch):
    monkeypatch.setenv("TRAINERMON_SPOOL", "/scratch/spool")
    assert spool.spool_root() == Path("/scratch/spool")

    monkeypatch.setenv("TRAINERMON_SPOOL", "")
    assert spool.spool_root() in (Path(f"{place}/trainermon-{os.getuid()}") for place in ("/dev/shm", "/var/tmp"))


SHM = "30 27 0:25 / /dev/shm rw,nosuid,nodev shared:2 - tmpfs tmpfs rw"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("mount", "size", "user", "expected"),
    [
        (SHM, 12 * GIB, (0, False), "/dev/shm"),
        (SHM, 12 * GIB, (0, True), "/dev/shm"),
        (SHM, 12 * GIB, (1000, False), "/dev/shm"),
        (SHM, 12 * GIB, (1000, True), "/var/tmp"),  # logind clears away what is theirs when they log out
        (SHM, 64 << 20, (0, False), "/var/tmp"),  # a container's
        (SHM.replace("tmpfs tmpfs", "ext4 /dev/sda"), 12 * GIB, (0, False), "/var/tmp"),
        ("", 12 * GIB, (0, False), "/var/tmp"),
    ],
)
def test_the_spool_is_in_memory_where_there_is_room_and_it_is_left_alone(machine, mount, size, user, expected):
    machine(mount, size, user)

    assert spool.spool_root() == Path(f"{expected}/trainermon-{user[0]}")


@pytest.fixture
def machine(mounts, monkeypatch, tmp_path):
    """Install what is mounted at /dev/shm, how large it is, and who runs beside which logind."""

    def install(mount, size, user):
        uid, has_logind = user
        mounts(*[mount] * bool(mount))
        monkeypatch.delenv("TRAINERMON_SPOOL", raising=False)
        monkeypatch.setattr(spool, "LOGIND", tmp_path if has_logind else tmp_path / "missing")
        monkeypatch.setattr(os, "getuid", lambda: uid)
        monkeypatch.setattr(spool, "_size_bytes", lambda _path: size)

    return install


def test_journals_take_a_sixteenth_of_the_memory_at_most(monkeypatch):
    monkeypatch.setattr(spool, "_size_bytes", lambda _path: 64 * GIB)

    assert spool.memory_share_bytes(Path("/dev/shm/trainermon-0/run"), 8) == 64 * GIB // 16 // 8
    assert spool.memory_share_bytes(Path("/scratch/spool/run"), 8) > 1 << 60


def test_a_spool_is_private_and_opens_again(tmp_path):
    root = tmp_path / "not" / "yet"

    directory = open_spool(root / "job-1")

    assert directory == root / "job-1"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert open_spool(root / "job-1") == directory


@pytest.mark.parametrize(
    "run_id", ["", ".", "..", "../x", "a/b", "/x", "-x", ".hidden", "a b", "a\n", "a\0", "é", "x" * 129]
)
def test_a_run_id_that_is_no_plain_name_is_refused(tmp_path, run_id):
    with pytest.raises(SpoolError, match=r"run id .* cannot be used: expected 1 to 128"):
        spool_of(run_id, tmp_path / "output", tmp_path)
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None)
@given(st.text(max_size=140))
def test_an_accepted_run_id_stays_one_name_inside_the_root(run_id):
    try:
        spool._check_run_id(run_id)
    except SpoolError:
        return
    assert os.path.normpath(f"/root/{run_id}") == f"/root/{run_id}"
    assert len(run_id.encode()) <= 128


@pytest.mark.parametrize(
    "filesystem",
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "fuse",
        "fuse.sshfs",
        "fuse.juicefs",
    ],
)
def test_a_network_file_system_is_refused_before_anything_is_written(tmp_path, mounts, filesystem):
    mounts(f"40 27 0:40 / {tmp_path} rw - {filesystem} server:/export rw")

    with pytest.raises(SpoolError, match=f"lies on a {filesystem} file system.*TRAINERMON_SPOOL"):
        open_spool(tmp_path / "spool" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "tmpfs", "overlay", "btrfs", "fuse.fuse-overlayfs", "fuseblk"])
def test_a_local_file_system_is_accepted(tmp_path, mounts, filesystem):
    mounts(f"40 27 0:40 / {tmp_path} rw - {filesystem} none rw")

    assert open_spool(tmp_path / "run").is_dir()


def test_the_file_system_of_a_path_is_that_of_the_innermost_last_mount():
    mountinfo = "\n".join(
        [
            ROOT_MOUNT,
            "30 27 0:30 / /mnt rw - ext4 /dev/vdb rw",
            "31 30 0:31 / /mnt/a\\040b\\134c rw shared:2 master:1 - nfs4 server:/a\\040-\\040b rw",
            "32 30 0:32 / /mnt/twice rw - nfs server:/x rw",
            "33 30 0:33 / /mnt/twice rw - xfs /dev/vdc rw",
            "broken line",
            "",
        ]
    )

    assert spool.filesystem_type(Path("/nowhere/x"), mountinfo) == "ext4"
    assert spool.filesystem_type(Path("/mnt/a b\\c/deep/x"), mountinfo) == "nfs4"
    assert spool.filesystem_type(Path("/mnt/a b\\cd"), mountinfo) == "ext4"
    assert spool.filesystem_type(Path("/mnt/twice"), mountinfo) == "xfs"
    assert spool.filesystem_type(Path("/mnt/twice"), "") == ""


def test_the_file_system_is_that_behind_a_symbolic_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    mountinfo = f"{ROOT_MOUNT}\n40 27 0:40 / {tmp_path}/far rw - lustre mgs:/fs rw"

    assert spool.filesystem_type(tmp_path / "link" / "spool", mountinfo) == "lustre"


def test_this_machine_tells_the_file_system_of_proc():
    assert spool.filesystem_type(Path("/proc/self"), spool._read_mountinfo()) == "proc"


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    open_spool(tmp_path / "run")
    monkeypatch.setattr(os, "getuid", lambda: 4242)

    with pytest.raises(SpoolError, match=r"belongs to user \d+, expected user 4242.*TRAINERMON_SPOOL"):
        open_spool(tmp_path / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_root_that_somebody_else_linked_is_refused(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 4242, 4242, follow_symlinks=False)

    with pytest.raises(SpoolError, match="belongs to user 4242"):
        open_spool(link / "run")


def test_a_run_directory_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SpoolError, match="cannot write to the spool"):
        open_spool(tmp_path / "run")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_run_directory_that_others_may_write_is_refused(tmp_path, mode):
    open_spool(tmp_path / "run").chmod(mode)

    with pytest.raises(SpoolError, match=f"has mode 0{mode:o}.*chmod go-w"):
        open_spool(tmp_path / "run")


def test_a_root_that_others_may_write_must_be_sticky_or_a_volume(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(SpoolError, match="has mode 0777"):
        open_spool(tmp_path / "run")

    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert open_spool(tmp_path / "run").is_dir()

    monkeypatch.undo()
    tmp_path.chmod(0o1777)
    assert open_spool(tmp_path / "run").is_dir()


def test_an_unusable_place_is_named_with_the_variable_that_changes_it(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(SpoolError, match=r"cannot write to the spool at .*/file/run: .*Set TRAINERMON_SPOOL"):
        open_spool(tmp_path / "file" / "run")
    with pytest.raises(SpoolError, match=r"cannot write to the spool at /proc/trainermon/run"):
        open_spool(Path("/proc/trainermon") / "run")


def test_a_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(SpoolError, match="Permission denied"):
        open_spool(tmp_path / "run")


def test_ranks_are_known_by_their_files(tmp_path):
    for name in (
        "rank00003.page",
        "rank00003.lock",
        "rank00000.1700000000000000.jnl",
        "rank123456.cmd",
        "agent.json",
        "rankx",
    ):
        (tmp_path / name).write_text("")

    assert spool.list_ranks(tmp_path) == [0, 3, 123456]
    assert spool.list_ranks(tmp_path / "gone") == []


def test_a_rank_is_alive_exactly_while_its_process_is(tmp_path):
    assert not rank_alive(tmp_path, 3)
    process = start_holder(tmp_path)
    try:
        assert (rank_alive(tmp_path, 3), rank_pid(tmp_path, 3)) == (True, process.pid)
        assert (rank_alive(tmp_path, 4), rank_pid(tmp_path, 4)) == (False, 0)
    finally:
        end(process)
    assert not rank_alive(tmp_path, 3)


def test_asking_in_the_rank_itself_does_not_give_its_lock_away(tmp_path):
    process = start_holder(
        tmp_path, then="from trainermon.core.spool import rank_alive; assert rank_alive(lock._path.parent, 3)"
    )
    try:
        assert rank_alive(tmp_path, 3)
    finally:
        end(process)


def test_a_second_process_of_the_same_rank_is_refused_with_the_pid_of_the_first(tmp_path):
    process = start_holder(tmp_path)
    try:
        with pytest.raises(
            SpoolError, match=rf"rank 3 of this run is already running on this node as pid {process.pid}"
        ):
            RankLock(tmp_path, 3)
    finally:
        end(process)

    RankLock(tmp_path, 3).close()


def test_attaching_twice_in_one_process_is_refused_and_keeps_the_first(tmp_path):
    first = RankLock(tmp_path, 3)

    with pytest.raises(SpoolError, match="already locked by this process"):
        RankLock(tmp_path, 3)
    assert (rank_alive(tmp_path, 3), rank_pid(tmp_path, 3)) == (True, os.getpid())
    assert holder_seen_from_outside(tmp_path)

    first.close()
    first.close()
    assert not rank_alive(tmp_path, 3)
    assert not holder_seen_from_outside(tmp_path)


def holder_seen_from_outside(directory: Path) -> bool:
    code = (
        "import sys; from pathlib import Path; from trainermon.core.spool import rank_alive\n"
        "print(rank_alive(Path(sys.argv[1]), 3))"
    )
    return subprocess.run([sys.executable, "-c", code, directory], capture_output=True, check=True).stdout == b"True\n"


def test_a_forked_child_neither_releases_nor_keeps_the_lock(tmp_path):
    then = """
if os.fork() == 0:
    lock.close()  # as an exit handler of a data loader would
    os.write(1, b"child %d\\n" % os.getpid())
    sys.stdin.read()
    os._exit(0)
"""
    process = start_holder_with_child(tmp_path, then)
    child = process.child
    try:
        assert rank_alive(tmp_path, 3), "the child's close released the parent's lock"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # the child lives on
        assert not rank_alive(tmp_path, 3), "the child keeps its dead parent alive"
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


class ParentAndChild(subprocess.Popen[bytes]):
    child: int = 0


def start_holder_with_child(directory: Path, then: str) -> ParentAndChild:
    process = ParentAndChild(
        [sys.executable, "-c", HOLDER.format(then=then), str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    lines = sorted([process.stdout.readline(), process.stdout.readline()])
    assert lines[1] == b"ready\n"
    process.child = int(lines[0].split()[1])
    return process


def test_a_link_in_place_of_the_lock_is_refused(tmp_path):
    (tmp_path / "rank00003.lock").symlink_to(tmp_path / "other")

    with pytest.raises(SpoolError, match=r"rank00003\.lock"):
        RankLock(tmp_path, 3)
    assert not (tmp_path / "other").exists()


def test_removing_a_spool_leaves_foreign_files(tmp_path):
    directory = open_spool(tmp_path / "run")
    for name in (
        "rank00000.page",
        "rank00000.5.jnl",
        "rank00000.cmd",
        ".rank00000.cmd.0123456789abcdef.tmp",
        "agent.json",
        "agent.status.json",
    ):
        (directory / name).write_text("")
    (directory / "precious.txt").write_text("")

    assert not remove_spool(directory, everything_is_stored)
    assert [path.name for path in directory.iterdir()] == ["precious.txt"]

    (directory / "precious.txt").unlink()
    assert remove_spool(directory, everything_is_stored)
    assert not directory.exists()
    assert remove_spool(directory, everything_is_stored)


def test_a_spool_with_a_living_rank_is_not_removed(tmp_path):
    directory = open_spool(tmp_path / "run")
    process = start_holder(directory)
    try:
        assert not remove_spool(directory, everything_is_stored)
        assert (directory / "rank00003.lock").exists()
    finally:
        end(process)
    assert remove_spool(directory, everything_is_stored)


def test_a_spool_with_records_that_are_stored_nowhere_is_not_removed(tmp_path):
    directory = open_spool(tmp_path / "run")
    (directory / "rank00000.5.jnl").write_text("")

    assert not remove_spool(directory, lambda: False)
    assert (directory / "rank00000.5.jnl").exists()


def test_it_is_asked_what_is_stored_when_nobody_can_write_any_more(tmp_path):
    directory = open_spool(tmp_path / "run")
    asked = []

    def nobody_comes_in():
        asked.append(try_enter(directory))
        return True

    assert remove_spool(directory, nobody_comes_in)
    assert asked == [None]


REMOVER = """
import os, sys
from pathlib import Path
from trainermon.core.spool import remove_spool
os.write(1, b"ready\\n")
while os.getppid() == int(sys.argv[2]):
    remove_spool(Path(sys.argv[1]), lambda: True)
"""


def test_a_rank_that_starts_while_its_spool_is_removed_has_one(tmp_path):
    """The agent of the attempt before removes the spool at just this moment."""
    command = [sys.executable, "-c", REMOVER, str(tmp_path / "spool" / "run"), str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    removed = 0
    try:
        for _ in range(3000):
            lock = RankLock(open_spool(tmp_path / "spool" / "run"), 0)
            directory = tmp_path / "spool" / "run"
            (directory / "rank00000.page").write_text("the first file of this attempt")
            before = directory.stat().st_ino
            (directory / "rank00000.1.jnl").write_text("and another one")
            assert len(list(directory.iterdir())) == 3
            assert directory.stat().st_ino == before
            lock.close()
            removed += wait_until_gone(directory)
            if removed == 30:
                break
    finally:
        end(process)
    assert removed == 30, "the two processes did not meet"


def wait_until_gone(directory: Path) -> bool:
    deadline_s = time.monotonic() + random.uniform(0, 0.002)
    while time.monotonic() < deadline_s:
        if not directory.exists():
            return True
    return False


def test_a_removal_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "_ENTER_S", 0.05)
    directory = open_spool(tmp_path / "run")
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    with pytest.raises(SpoolError, match="is being removed by a process that does not come to an end"):
        RankLock(directory, 3)
    os.close(descriptor)
    RankLock(directory, 3).close()


def test_a_lock_has_a_place_only_below_a_spool(tmp_path):
    with pytest.raises(SpoolError, match=r"cannot write to the spool at .*rank00003\.lock: No such file"):
        RankLock(tmp_path / "no" / "spool", 3)
