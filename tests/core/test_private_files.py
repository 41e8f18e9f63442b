"""Somebody else may write into the folder above, and may have been there first."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from tests.full_disk import room_for
from trainermon.core.private_files import (
    check_private,
    make_private_directory,
    open_private,
    replace_file,
    replacing,
)

STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077], ids=oct)
def test_every_directory_is_private_whatever_the_umask(tmp_path, umask, mask):
    umask(mask)

    make_private_directory(tmp_path / "root/run/nodes/host", tmp_path / "root/run")

    for path in ("root/run", "root/run/nodes", "root/run/nodes/host"):
        assert mode(tmp_path / path) == 0o700
    assert mode(tmp_path / "root") == 0o777 & ~mask


def test_a_directory_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)

    make_private_directory(tmp_path / "run/nodes", tmp_path / "run")

    assert mode(tmp_path / "run") == 0o755


@pytest.mark.parametrize("open_mode", [0o770, 0o707, 0o1777], ids=oct)
def test_a_directory_that_others_may_write_to_is_refused_with_what_to_do(tmp_path, open_mode):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(open_mode)

    with pytest.raises(PermissionError, match=rf"mode {open_mode:04o}.*expected no write.*chmod go-w {tmp_path}/run'"):
        make_private_directory(tmp_path / "run/nodes", tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", STRANGER, STRANGER)

    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}, expected user 0"):
        make_private_directory(tmp_path / "run/nodes", tmp_path / "run")


def test_a_link_in_the_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "mine")

    with pytest.raises(PermissionError, match="is a link or a file, expected a directory"):
        make_private_directory(tmp_path / "run/nodes", tmp_path / "run")
    assert not (tmp_path / "mine/nodes").exists()


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "run").write_text("")

    with pytest.raises(OSError, match="is a link or a file"):
        check_private(tmp_path / "run")


def test_a_share_that_gives_all_the_same_mode_is_as_private_as_it_can_be(tmp_path, monkeypatch):
    """As CIFS with dir_mode=0777: what is made there has that mode, too."""
    shared = tmp_path / "run"
    shared.mkdir()
    shared.chmod(0o777)
    made = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: shared.stat() if ".probe." in os.fspath(path) else made(path))

    check_private(shared)

    assert list(shared.iterdir()) == []


def test_a_link_is_not_followed_to_write(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log").symlink_to(tmp_path / "precious")

    with pytest.raises(OSError, match="symbolic link") as caught:
        open_private(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert caught.value.errno == errno.ELOOP
    replace_file(tmp_path / "log", b"new")

    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "log").read_bytes() == b"new"
    assert not (tmp_path / "log").is_symlink()


def test_a_file_is_replaced_whole_private_and_without_leftovers(tmp_path, umask):
    umask(0)
    path = tmp_path / "file"
    path.write_bytes(b"before")

    with replacing(path) as file:
        file.write(b"aft")
        file.flush()
        assert path.read_bytes() == b"before"
        file.write(b"er")

    assert path.read_bytes() == b"after"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_as_it_was_when_the_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(file):
        file.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError), replacing(path) as file:
        fail(file)

    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_that_finds_no_room_is_named(tmp_path):
    with room_for(10), pytest.raises(OSError, match=r"File too large: .*kept\.json"):
        replace_file(tmp_path / "kept.json", b"longer than ten bytes")

    assert list(tmp_path.iterdir()) == []
