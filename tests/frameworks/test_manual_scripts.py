"""Scripts for Megatron-LM and DeepSpeed as msprobe's manual writes them, with its configuration as it is."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.manual_worker import START, STEPS
from tests.ranks import run_ranks
from tests.server_programs import wait_until

HERE = Path(__file__).parent
COLUMNS = ["vpp_stage", "name", "step", "norm", "min", "max", "shape", "dtype"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("framework", "name"),
    [("megatron", "decoder.layers.1.mlp.linear_fc1.weight"), ("deepspeed", "inner.up.weight")],
)
def test_the_manuals_monitor_writes_the_manuals_files(tmp_path, framework, name):
    places: Any = {"MONITOR_OUTPUT_DIR": str(tmp_path / "output"), "TRAINERMON_SPOOL": str(tmp_path / "spool")}

    # the agent ends with the job, and not a minute after it
    given = json.loads((HERE / "manual_monitor_config.json").read_text())
    config = tmp_path / "monitor_config.json"
    config.write_text(json.dumps(given | {"agent": {"linger_s": 0.0}}))

    run_ranks(
        HERE / "manual_worker.py", framework, str(config), world_size=1, **places,
        DS_BUILD_OPS="0",
    )  # fmt: skip

    wait_until(
        lambda: not any((tmp_path / "spool").iterdir()), timeout_s=120, what="the agent to have stored everything"
    )
    (folder,) = (tmp_path / "output").glob("*/csv/*-rank0-*")
    wanted = {f"{kind}_{step}-{step}.csv" for kind in ("grad_unreduced", "grad_reduced") for step in range(START, 8)}
    assert wanted <= {path.name for path in folder.iterdir()}
    for file in wanted:
        with (folder / file).open(newline="") as opened:
            header, *rows = csv.reader(opened)
        assert header == COLUMNS
        row = next(dict(zip(header, row, strict=True)) for row in rows if row[1] == name)
        assert START <= int(row["step"]) < START + STEPS
        norm, least, most = (float(row[op]) for op in ("norm", "min", "max"))
        assert 0 < max(abs(least), abs(most)) <= norm * (1 + 1e-6)
        assert math.isfinite(norm)
