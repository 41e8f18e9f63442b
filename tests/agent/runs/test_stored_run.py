"""A run's page from its files gives the answers that the agent gave while it lived."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dashboards.stored_runs import KEYS, StoredCurves, add_segment, alert_of, header, store_run
from trainermon.agent.runs.command import listed
from trainermon.agent.runs.comparison import compare
from trainermon.agent.runs.curves import RunCurves
from trainermon.agent.runs.facts import RunFacts
from trainermon.agent.runs.folder import RunPlace
from trainermon.agent.runs.run_list import RunList
from trainermon.agent.runs.stored_run import StoredRun
from trainermon.alerts.rules import DEFAULT_RULES
from trainermon.exporters.views import LINES, RANK_QUANTITIES, RunHistory


def served(run_dir: Path, ask: Callable[[StoredRun], Awaitable[Any]]) -> Any:
    """Return what `ask` returns of the run after it was read once."""

    def facts() -> RunFacts:
        runs = RunList([run_dir])
        runs.scan()
        return runs.facts[run_dir.name]

    async def serve() -> Any:
        with ThreadPoolExecutor(1) as executor:
            run = StoredRun(run_dir, executor=executor, facts=facts)
            await run.refresh(max_age_s=0)
            try:
                return await ask(run)
            finally:
                await run.close()

    return asyncio.run(serve())


async def answers(run: StoredRun) -> dict[Any, Any]:
    heatmaps = [(entry["kind"], statistic) for entry in run.run()["heatmaps"] for statistic in entry["statistics"]]
    return {
        "lines": run.lines(list(LINES)),
        **{what: run.heatmap(*what, 1000) for what in heatmaps},
        **{quantity: run.ranks(quantity, 1000) for quantity in RANK_QUANTITIES},
    }


def as_an_agent(curves: StoredCurves, *, world_size: int) -> RunHistory:
    """Return the history of an agent that has seen the journals of the same ranks."""
    history = RunHistory()
    headers = [header(rank, world_size=world_size, started_s=curves.started_s) for rank in range(world_size)]
    for made in headers:
        history.start(made)
    for step in range(len(curves.loss)):
        for rank, made in enumerate(headers):
            history.add(made, KEYS, curves.block(step, rank=rank))
    for rank in range(world_size):
        history.end(rank)
    return history


def test_all_answers_are_those_of_the_agent(tmp_path: Path) -> None:
    curves = StoredCurves.made(300, seed=3)
    curves.loss[200], curves.rms[201:] = np.nan, np.inf
    store_run(tmp_path / "run", curves, world_size=3, segments=4)
    history = as_an_agent(curves, world_size=3)

    found = served(tmp_path / "run", answers)

    assert found.pop("lines") == history.lines(list(LINES))
    for quantity in RANK_QUANTITIES:
        assert found.pop(quantity) == history.ranks(quantity, 1000)
    assert {kind for kind, _ in found} == {"grad_reduced"}
    for (kind, statistic), cells in found.items():
        assert cells == history.heatmap(kind, statistic, 1000), (kind, statistic)


def test_state_and_figures_are_those_of_the_run(tmp_path: Path) -> None:
    curves = StoredCurves.made(50)
    run_dir = store_run(tmp_path / "run", curves, alerts=(alert_of(),))

    async def ask(run: StoredRun) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return run.run(), run.alerts()

    run, alerts = served(run_dir, ask)

    assert (run["run_id"], run["state"], run["step"], run["world_size"]) == ("run", "finished", 49, 2)
    assert run["loss"] == pytest.approx(curves.loss[49])
    assert run["model"] == {"parameters": 12_000, "is_whole": True}
    assert run["output"] == str(run_dir)
    assert [entry["rank"] for entry in run["ranks"]] == [0, 1]
    assert run["left_out"] is None
    assert [entry["id"] for entry in alerts] == ["alert-1"]
    assert run["alerts_firing"] == 1


@pytest.mark.parametrize("has_none", [False, True])
def test_rules_on_the_loss_are_counted_where_there_is_none(tmp_path: Path, has_none: bool) -> None:
    run_dir = store_run(tmp_path / "run", dataclasses.replace(StoredCurves.made(50), has_none=has_none))

    async def ask(run: StoredRun) -> dict[str, Any]:
        return run.run()

    run = served(run_dir, ask)

    text = DEFAULT_RULES.read_text(encoding="utf-8")
    on_loss = len(re.findall(r"^    on: \{kind: loss\b", text, re.MULTILINE))
    assert on_loss > 3
    assert run["rules_without_loss"] == (on_loss if has_none else 0)


def test_rows_of_all_nodes_are_merged(tmp_path: Path) -> None:
    curves = StoredCurves.made(30)
    whole = store_run(tmp_path / "whole", curves, world_size=2)
    parted = store_run(tmp_path / "parted", curves, world_size=1)
    other = store_run(tmp_path / "other", dataclasses.replace(curves, loss=curves.loss + 2), world_size=1)
    shutil.copytree(other / "nodes/node-a", parted / "nodes/node-b")

    async def losses(run: StoredRun) -> list[float]:
        return list(run.lines(["loss"])["series"]["loss"])

    # both nodes call their rank 0: the later node's value stands for it, the mean of one rank
    assert len(served(parted, losses)) == 30
    assert served(whole, losses) == pytest.approx(curves.loss.tolist(), rel=1e-6)


def test_a_run_that_grows_gets_what_is_new_and_tells_open_pages(tmp_path: Path) -> None:
    curves = StoredCurves.made(40)
    short = dataclasses.replace(curves, loss=curves.loss[:20])
    run_dir = store_run(tmp_path / "run", short, is_up=True)
    history = as_an_agent(curves, world_size=2)

    async def ask(run: StoredRun) -> tuple[list[int], list[int], bytes, str]:
        before = run.lines(["loss"])["steps"]
        stream = run.feed.subscribe()
        assert stream is not None
        await anext(stream)
        add_segment(run_dir, curves, range(20, 40))
        await run.refresh(max_age_s=0)
        return (
            before,
            run.lines(["loss"])["steps"],
            run.heatmap("grad_reduced", "rms", 1000),
            (await anext(stream)).decode(),
        )

    before, after, heatmap, event = served(run_dir, ask)

    assert (before, after) == (list(range(20)), list(range(40)))
    assert heatmap == history.heatmap("grad_reduced", "rms", 1000)
    assert event.startswith('event: step\ndata: {"step":')


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_every_answer_has_the_same_words_for_what_is_not_finite_and_what_is_not_recorded(
    tmp_path: Path, bad: float
) -> None:
    curves = StoredCurves.made(4)
    curves.loss[:] = [2.0, bad, 2.0, bad]
    run_dir = store_run(tmp_path / "run", curves)
    none = store_run(tmp_path / "none", dataclasses.replace(curves, has_none=True))

    async def ask(run: StoredRun) -> tuple[Any, ...]:
        curves = compare([RunCurves(RunPlace(run_dir.name, run_dir))], ["loss"], 10, "step")["runs"][0]
        return run.run()["loss"], run.lines(["loss"])["series"]["loss"], curves["series"]["loss"]

    async def ask_none(run: StoredRun) -> Any:
        return run.run()["loss"]

    line = [2.0, "NaN", 2.0, "NaN"]
    assert served(run_dir, ask) == ("NaN", line, line)
    assert as_an_agent(curves, world_size=2).lines(["loss"])["series"]["loss"] == line
    assert served(none, ask_none) is None
    entries = json.loads(listed([tmp_path], as_json=True))
    assert {entry["name"]: entry["loss"] for entry in entries} == {"run": "NaN", "none": None}


def test_a_damaged_segment_costs_its_own_steps_and_is_named(tmp_path: Path) -> None:
    run_dir = store_run(tmp_path / "run", StoredCurves.made(40), segments=4)
    bad = run_dir / "nodes/node-a/segments/0000000002-0000000002.parquet"
    bad.write_bytes(b"PAR1" + bytes(100) + b"\x10\x00\x00\x00PAR1")

    async def ask(run: StoredRun) -> tuple[list[int], str]:
        return run.lines(["loss"])["steps"], run.run()["left_out"]

    steps, left_out = served(run_dir, ask)

    assert steps == [*range(10), *range(20, 40)]
    assert bad.name in left_out


def test_no_report_outside_the_run_is_read(tmp_path: Path) -> None:
    run_dir = store_run(tmp_path / "run", StoredCurves.made(4))
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (run_dir / "dumps/d/attempt1/step2/rank0").mkdir(parents=True)
    (run_dir / "reports").mkdir()
    (run_dir / "reports/d-attempt1-step2.json").symlink_to(tmp_path / "secret.json")

    assert served(run_dir, lambda run: run.diagnosis("d", 1, 2)) is None
    assert served(run_dir, lambda run: run.diagnosis("../../secret", 1, 2)) is None
