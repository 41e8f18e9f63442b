from pathlib import Path

import pytest

from trainermon.exporters.reference import DEFAULT_PATH, main, render_reference
from trainermon.monitor.catalogue import METRICS

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_what_the_catalogue_gives(capsys: pytest.CaptureFixture[str]):
    status = main(["--check", str(ROOT / DEFAULT_PATH)])

    assert (status, capsys.readouterr().out) == (0, ""), "run python -m trainermon.exporters.reference"


def test_a_page_that_is_out_of_date_is_shown_and_then_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "metrics.md"
    path.write_text(render_reference().replace("trainermon_loss`", "trainermon_lost`"))

    stale = main(["--check", str(path)])
    difference = capsys.readouterr().out
    main([str(path)])

    assert stale == 1
    assert "+### `trainermon_loss`" in difference
    assert main(["--check", str(path)]) == 0


def test_a_missing_page_is_out_of_date(tmp_path: Path):
    assert main(["--check", str(tmp_path / "metrics.md")]) == 1


def test_every_metric_has_a_section():
    page = render_reference()

    assert all(f"### `{metric.name}`\n\n{metric.help}\n" in page for metric in METRICS.values())
