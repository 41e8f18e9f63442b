"""Who loads what: the agent never loads torch, a rank never loads what only the agent needs."""

import subprocess
import sys

AGENT_ONLY = ["duckdb", "fastapi", "uvicorn", "prometheus_client", "yaml"]
WITHOUT_TORCH = [
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
]


def printed_by(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def modules_after(statement: str) -> set[str]:
    return set(printed_by(f"{statement}\nimport sys; print('\\n'.join(sys.modules))"))


def those_after_which(package: str, modules: list[str]) -> list[str]:
    """Return which modules, imported in turn by one process, find a package loaded: the first one has loaded it.

    What is loaded stays, so none passes because of what another one has imported.
    """
    lines = [f"import {name}\nif '{package}' in sys.modules: print('{name}')" for name in modules]
    return printed_by("\n".join(["import sys", *lines]))


def test_import_does_not_load_torch():
    assert those_after_which("torch", WITHOUT_TORCH) == []


def test_the_rank_loads_nothing_of_the_agent():
    loaded = modules_after("from trainermon import TrainerMon")

    assert loaded.intersection(AGENT_ONLY) == set()
    assert not any(name.startswith("trainermon.agent") for name in loaded)


def test_a_loaded_package_is_seen():
    assert "yaml" in modules_after("import yaml")
    assert those_after_which("yaml", ["json", "yaml", "csv"]) == ["yaml", "csv"]
