"""Makes the picture of docs/deploy/controller.md: a job with a dead rank, a bad gradient and stragglers, in Chromium.

The controller is a real one; the agents are those of the benchmarks. `python -m docs.job_picture` writes
docs/images/job.png.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from benchmarks.simulated_agents import SimulatedAgent
from tests.agent.controller.controllers import ControllerProcess, controllers_in
from tests.agent.controller.simulation import Job
from tests.agent.nodes import wait_for
from tests.agent.notifications import alert, notification
from tests.dashboards.conftest import CHROMIUM_FLAGS
from tests.server_programs import find_program

PICTURE = Path(__file__).parent / "images" / "job.png"
SIZE: ViewportSize = {"width": 1280, "height": 900}
RUN, NODES, RANKS_EACH = "llama-7b", 12, 8
BAD_RANK, DEAD_RANK, SLOW_RANKS, LATE_NODE = 61, 77, (24, 25, 32, 33), 11
LIMIT_MS = 120_000


def trouble(agents: list[SimulatedAgent]) -> None:
    """Have ranks die, fall behind and turn not finite."""
    for agent in agents:
        agent.run_id = RUN
    agents[DEAD_RANK // RANKS_EACH].gone = {DEAD_RANK}
    tell(agents, "gradient-nonfinite", "fatal", BAD_RANK, "16384 elements of h.3.mlp.0.weight are not finite")
    for rank in SLOW_RANKS:
        tell(agents, "straggler", "warning", rank, f"rank {rank} takes 1.31 times as long as its peers")


def tell(agents: list[SimulatedAgent], rule: str, severity: str, rank: int, message: str) -> None:
    """Have an alert fire on a rank."""
    found: dict[str, Any] = {"id": f"{rule}-{rank}", "rule": rule, "severity": severity, "rank": rank, "step": 103}
    agents[rank // RANKS_EACH].alerts.append({**found, "message": message})


def escalate(controller: ControllerProcess, agents: list[SimulatedAgent], page: Page) -> None:
    """Have two alerts of Prometheus ask for dumps; the second comes too late for one node."""
    first = alert("TrainermonGradientNonfinite", run=RUN, rank=BAD_RANK)
    first["annotations"]["summary"] = f"not finite on rank {BAD_RANK}"
    controller.post("api/v1/alerts", notification(first))
    outcomes = page.locator("#escalations .pill")
    expect(outcomes).to_have_text(["done"])
    second = alert("TrainermonLossSpike", run=RUN)
    second["annotations"]["summary"] = "the loss jumped on every rank"
    with patch.object(agents[LATE_NODE], "escalate", be_late):
        controller.post("api/v1/alerts", notification(second))
        expect(outcomes).to_have_text(["partial", "done"])
    dumped = page.locator("#escalations td").nth(4).inner_text()
    wait_for(lambda: int(page.locator("#figure-step").inner_text()) > int(dumped), "the step after the dump")


def be_late(order: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as an agent whose ranks are past the step."""
    return 200, {"status": "late", "ranks": [], "late": order["ranks"]}


def main() -> None:
    """Write the picture."""
    expect.set_options(timeout=LIMIT_MS)
    job = Job(NODES, RANKS_EACH).ready()
    trouble(job.agents)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            controllers_in(Path(folder)) as make_controller,
            sync_playwright() as playwright,
        ):
            controller = make_controller(discovery={"agents": job.addresses}).ready()
            chromium = playwright.chromium.launch(executable_path=find_program("chromium"), args=list(CHROMIUM_FLAGS))
            page = chromium.new_page(viewport=SIZE, color_scheme="light")
            page.goto(controller.url)
            expect(page.locator(".headline")).to_have_text(f"Rank {DEAD_RANK} is gone")
            escalate(controller, job.agents, page)
            page.screenshot(path=PICTURE, full_page=True)
            chromium.close()
    finally:
        job.close()


if __name__ == "__main__":
    main()
