"""Who loads what: the agent never loads torch, a rank never loads what only the agent needs."""

import subprocess
import sys

import pytest

AGENT_ONLY = ["duckdb", "fastapi", "uvicorn", "prometheus_client", "yaml"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "trainermon",
        "trainermon.cli",
        "trainermon.monitor",
        "trainermon.statistics",
        "trainermon.agent.daemon",
        "trainermon.agent.controller.http",
        "trainermon.alerts.engine",
        "trainermon.exporters.prometheus.exposition",
        "trainermon.exporters.store.store",
        "trainermon.dump.files.reader",
        "trainermon.analysis.compare",
        "trainermon.analysis.diagnosis.diagnose",
        "trainermon.dashboards",
    ],
)
def test_import_does_not_load_torch(module):
    assert "torch" not in modules_after(f"import {module}")


def test_the_rank_loads_nothing_of_the_agent():
    loaded = modules_after("from trainermon import TrainerMon")

    assert loaded.intersection(AGENT_ONLY) == set()
    assert not any(name.startswith("trainermon.agent") for name in loaded)


def test_a_loaded_package_is_seen():
    assert "torch" in modules_after("import torch")
