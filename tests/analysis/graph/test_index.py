"""Many graphs: read by several processes, kept in an index, and found there only if nothing has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainermon.analysis.graph import calls, index, reading
from trainermon.cli import main

RECORDED = Path(__file__).parents[1] / "compare" / "recorded"
SOURCES = ("sound", "faulty", "nan", "sound")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of four ranks."""
    for rank, name in enumerate(SOURCES):
        shutil.copytree(RECORDED / name / "step0" / "rank0", tmp_path / "run" / "step0" / f"rank{rank}")
    return tmp_path / "run"


def _said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["graph", *map(str, words)]) == 0
    return capsys.readouterr().out


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_processes_and_the_index_say_what_one_process_says(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tmp_path / f"{name}.html" for name in ("alone", "together", "known")]
    cache = tmp_path / "cache"
    alone = _said(capsys, run, "-o", pages[0], "--no-cache", "--jobs", 1)
    together = _said(capsys, run, "-o", pages[1], "--cache", cache, "--jobs", 2)
    monkeypatch.setattr("trainermon.analysis.graph.levels.read_graph", pytest.fail)  # no dump is read again
    known = _said(capsys, run, "-o", pages[2], "--cache", cache)

    assert alone == together == known
    assert pages[0].read_bytes() == pages[1].read_bytes() == pages[2].read_bytes()
    assert len(_kept(cache)) == len(SOURCES)
    assert (cache.stat().st_mode | _kept(cache)[0].stat().st_mode) & 0o077 == 0


def test_against_another_the_index_has_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (RECORDED / "faulty", RECORDED / "sound", "--json", "--cache", tmp_path)
    first = _said(capsys, *words)
    monkeypatch.setattr("trainermon.analysis.graph.levels.read_graph", pytest.fail)

    assert _said(capsys, *words) == first
    monkeypatch.undo()
    fuzzy = _said(capsys, *words, "--fuzzy")  # another question, so another report
    assert json.loads(fuzzy)[0]["structure"] == json.loads(first)[0]["structure"]
    assert len(_kept(tmp_path)) == 2


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, lambda path: path.write_bytes(b"")])
def test_what_is_damaged_is_read_again_without_a_word(
    damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (RECORDED / "nan", "-o", tmp_path / "page.html", "--cache", tmp_path / "cache")
    first, page = _said(capsys, *words), (tmp_path / "page.html").read_bytes()
    (kept,) = _kept(tmp_path / "cache")
    sound = kept.read_bytes()
    damage(kept)

    assert _said(capsys, *words) == first
    assert (tmp_path / "page.html").read_bytes() == page
    assert kept.read_bytes() == sound


def _replace_unseen(path: Path, content: bytes) -> None:
    """Replace the content of a file such that size and modification time stay."""
    before = path.stat()
    assert len(content) <= before.st_size
    path.write_bytes(content.ljust(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_dump_that_has_changed_is_read_again(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (run, "--rank", 0, "--cache", tmp_path / "cache")
    assert "Everything is finite." in _said(capsys, *words)
    path = run / "step0" / "rank0" / "dump.json"
    _replace_unseen(path, (run / "step0" / "rank2" / "dump.json").read_bytes())

    assert "not finite" in _said(capsys, *words)


def test_a_dump_that_changes_while_it_is_read_is_read_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bad = run / "step0" / "rank0" / "dump.json", run / "step0" / "rank2" / "dump.json"
    read = calls.read_calls

    def read_then_write(directory: Path) -> Any:
        found = read(directory)
        _replace_unseen(path, bad.read_bytes())
        return found

    monkeypatch.setattr(reading, "read_calls", read_then_write)
    words = (run, "--rank", 0, "--cache", tmp_path / "cache")
    assert "Everything is finite." in _said(capsys, *words)
    monkeypatch.undo()

    assert "not finite" in _said(capsys, *words)


def test_what_was_not_used_for_longest_goes_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    for rank in range(3):
        _said(capsys, run, "--rank", rank, "--cache", cache)
        for path in _kept(cache):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    monkeypatch.setattr(index, "MAX_BYTES", sum(path.stat().st_size for path in _kept(cache)))
    before = set(_kept(cache))
    oldest = min(before, key=lambda path: path.stat().st_mtime_ns)
    _said(capsys, run, "--rank", 3, "--cache", cache)

    assert oldest not in _kept(cache)
    assert len(_kept(cache)) == 3


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "x"]])
def test_a_number_of_processes_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["graph", str(RECORDED / "sound"), *words])

    assert "--jobs" in capsys.readouterr().err


def test_a_folder_that_others_write_to_holds_no_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o777)

    assert main(["graph", str(RECORDED / "sound"), "--cache", str(tmp_path)]) == 1
    assert re.search("cannot hold an index of graphs .* choose another with --cache", capsys.readouterr().err)
