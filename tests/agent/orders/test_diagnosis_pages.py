"""Pages of diagnoses: written once when somebody asks, and anew when the diagnosis has changed."""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainermon.agent.orders.diagnosis_pages import DiagnosisPages
from trainermon.agent.orders.dumps import DumpKey, RunDumps

KEY = DumpKey("a1", 1, 7)
WRITER = """
import pathlib, sys
words = sys.argv[1:]
page = pathlib.Path(words[words.index("--html") + 1])
page.write_text(f"<p>{words[:3]} {len(page.read_text()) if page.exists() else 0}</p>")
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / KEY.folder / "rank0").mkdir(parents=True)
    report = tmp_path / KEY.report
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("{}")
    return tmp_path


def asked(run_dir, *keys, script=WRITER):
    dumps = RunDumps()
    dumps.scan(run_dir)

    async def main():
        with ThreadPoolExecutor(1) as executor:
            pages = DiagnosisPages(run_dir, dumps, executor=executor, command=(sys.executable, "-c", script))
            return await asyncio.gather(*(pages.page(key) for key in keys))

    return asyncio.run(main())


def test_a_page_is_written_once_and_anew_when_the_diagnosis_is_newer(run_dir):
    first, second = asked(run_dir, KEY, KEY)
    assert first == second == f"<p>{[str(run_dir), '--step', '7']} 0</p>".encode()

    page = (run_dir / KEY.report).with_suffix(".html")
    os.utime(run_dir / KEY.report, ns=(page.stat().st_mtime_ns + 1_000_000,) * 2)

    (again,) = asked(run_dir, KEY)
    assert again != first


def test_without_a_diagnosis_there_is_no_page(run_dir):
    (run_dir / KEY.report).unlink()

    assert asked(run_dir, KEY, DumpKey("../../etc", 1, 7)) == [None, None]


def test_a_page_that_cannot_be_written_is_an_error_that_says_why(run_dir):
    with pytest.raises(OSError, match="no dump here"):
        asked(run_dir, KEY, script="raise SystemExit('no dump here')")
