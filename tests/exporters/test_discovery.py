import json
import os
from pathlib import Path

import pytest

from trainermon.exporters.discovery import clear_targets, write_targets


def test_the_file_lists_one_agent_and_its_labels(tmp_path: Path):
    path = tmp_path / "run.json"

    write_targets(path, "127.0.0.1:9000", {"host": "node-1"})

    assert json.loads(path.read_text()) == [{"targets": ["127.0.0.1:9000"], "labels": {"host": "node-1"}}]
    assert list(tmp_path.iterdir()) == [path], "no unfinished file stays"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_permissions_are_those_asked_for_and_stay(tmp_path: Path, mode: int):
    path = tmp_path / "run.json"
    before = os.umask(0o077)

    try:
        write_targets(path, "[::1]:9000", mode=mode)
    finally:
        os.umask(before)
    written = path.stat().st_mode & 0o777
    clear_targets(path)

    assert (written, path.stat().st_mode & 0o777) == (mode, mode)
    assert json.loads(path.read_text()) == []


def test_clearing_what_is_not_there_makes_nothing(tmp_path: Path):
    clear_targets(tmp_path / "run.json")

    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to("elsewhere")

    with pytest.raises(PermissionError, match="folder is a link, expected a folder"):
        write_targets(tmp_path / "folder/run.json", "127.0.0.1:9000")

    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("address", ["127.0.0.1", ":9000", "host:http", "http://host/metrics"])
def test_an_address_without_port_is_refused(tmp_path: Path, address: str):
    with pytest.raises(ValueError, match="expected host:port"):
        write_targets(tmp_path / "run.json", address)


def test_a_target_label_that_would_rename_ours_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\['rank', 'run'\] are labels of the metrics themselves"):
        write_targets(tmp_path / "run.json", "host:1", {"run": "x", "rank": "0", "host": "node"})
