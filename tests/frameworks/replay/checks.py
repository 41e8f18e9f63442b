"""What a test looks at after `job.main`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from trainermon.analysis.diagnosis.diagnose import diagnose
from trainermon.analysis.diagnosis.findings import Diagnosis, RankRole
from trainermon.dump.files.reader import read_dump
from trainermon.dump.files.records import Dump

FAULT_STEP = 2


@dataclasses.dataclass(frozen=True)
class Results:
    """The folder that the ranks wrote to, and what each found, case by case."""

    folder: Path
    of_rank: list[dict[str, Any]]

    @classmethod
    def of(cls, worker: str, folder: Path, *names: str, world_size: int = 2) -> Results:
        """Run the cases of a worker of this folder that are named, or all; a hang ends after a quarter of an hour."""
        script = Path(__file__).with_name(f"{worker}.py")
        run_ranks(script, str(folder), *names, world_size=world_size, timeout_s=900)
        return cls(folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)])

    def diagnosis(self, name: str) -> Diagnosis:
        """Return what the files of a case tell."""
        return diagnose(self.folder / "output" / name / name)

    def dump(self, name: str, rank: int) -> Dump:
        """Return the dump of a rank's replay."""
        return read_dump(
            self.folder / f"output/{name}/{name}/dumps/gradient-nonfinite/attempt1/step{FAULT_STEP}/rank{rank}"
        )


def cases(quick: list[str], slow: list[str]) -> list[Any]:
    """Return the parameters of a test that takes each case by its name."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of the cases for which tests of this file have been chosen."""
    items = [item for item in request.session.items if item.path == request.path]
    return sorted({str(item.callspec.params["name"]) for item in items if isinstance(item, pytest.Function)})


def assert_located(results: Results, name: str) -> None:
    """Check that no bit differed, that every rank replayed the step once, and that the diagnosis is right."""
    found = [of_rank[name] for of_rank in results.of_rank]
    assert all(rank["same"] for rank in found)
    for rank in found:
        (event,) = rank["replays"]
        assert (event["step"], event["reason"]) == (FAULT_STEP, ""), event
        assert event["status"] in ("nonfinite", "clean")
        assert rank["others"] == [], rank["others"]
    diagnosis = results.diagnosis(name)
    fault = found[0]["fault"]
    located = (diagnosis.step, diagnosis.rank, diagnosis.module, diagnosis.phase.value)
    assert located == (FAULT_STEP, fault["rank"], fault["module"], fault["phase"]), diagnosis.headline
    for rank in range(len(found)):
        info = results.dump(name, rank).info
        assert (info.reproduced, info.errors, info.uncovered) == (True, 0, "")
    origins = [finding.rank for finding in diagnosis.ranks if finding.role == RankRole.ORIGIN]
    assert origins == [fault["rank"]]


def assert_gradients(results: Results, name: str, *, number: int) -> None:
    """Check that the replay of a sound step had each of its own gradients to the last bit of their norms."""
    for of_rank in results.of_rank:
        found = of_rank[name]
        assert found["same"]
        assert [event["status"] for event in found["replays"]] == ["clean"]
        assert len(found["gradients"]) == number, found["gradients"]
        assert set(found["gradients"].values()) == {0.0}, found["gradients"]


def assert_ordered(results: Results, name: str, *, number: list[int]) -> None:
    """Check that a dump in the middle of the training changed nothing, and by rank how many parameters it read."""
    for rank, of_rank in enumerate(results.of_rank):
        found = of_rank[name]
        assert found["same"]
        assert [event["status"] for event in found["dumps"]] == ["written"]
        dump = read_dump(results.folder / f"output/{name}/{name}/dumps/order/attempt1/step{FAULT_STEP}/rank{rank}")
        assert (dump.info.errors, dump.info.over_quota) == (0, 0)
        read = [record for entry in dump.entries for record in entry.parameters if record.nans is not None]
        assert len(read) == number[rank]
