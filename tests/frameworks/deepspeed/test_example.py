"""The example runs as its first lines say, and what it leaves behind is what it trained."""

import json
from pathlib import Path

import pytest

from tests.journal_rows import RankJournal
from tests.ranks import run_ranks
from trainermon.core.values import Kind

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL_GPT = ["--steps", "2", "--layers", "1", "--width", "32", "--context", "16", "--batch", "2"]


@pytest.mark.parametrize(
    "options", [["--stage", "3"], pytest.param(["--stage", "2", "--offload"], marks=pytest.mark.slow)]
)
def test_it_trains_and_leaves_rows_of_each_ranks_part(tmp_path, options):
    config = json.loads((EXAMPLES / "monitor_config.json").read_text()) | {"run_id": "run", "agent": {"start": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    run_ranks(
        EXAMPLES / "deepspeed_zero.py",
        *SMALL_GPT,
        *options,
        *("--config", str(tmp_path / "config.json")),
        TRAINERMON_SPOOL=str(tmp_path / "spool"),
        TRAINERMON_OUTPUT=str(tmp_path / "output"),
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )

    rows = [RankJournal(tmp_path / "spool" / "run", rank) for rank in (0, 1)]
    assert [sorted(journal.rows) for journal in rows] == [[0, 1]] * 2
    held = [journal.of(1, Kind.PARAM_UPDATED) for journal in rows]
    assert sum(part["head.weight"].count for part in held if "head.weight" in part) == 256 * 32
    assert len(rows[0].of(1, Kind.LOSS)) == 2
