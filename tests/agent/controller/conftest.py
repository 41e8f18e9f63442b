"""Controllers as processes of their own, and runs as on several nodes; all ended with their test."""

import asyncio

import pytest

from tests.agent.controller.controllers import controllers_in
from tests.agent.controller.scenes import Scene
from tests.agent.nodes import Run


@pytest.fixture
def make_node(tmp_path):
    """Return a maker of nodes: each one agent with its own spool, of one and the same run."""
    runs = []

    def make(name, ranks, *, world_size, **settings):
        run = Run(tmp_path / name, world_size=world_size, **settings)
        runs.append(run)
        for rank in ranks:
            run.rank(rank)
        run.launch_agent()
        return run

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def make_controller(tmp_path):
    with controllers_in(tmp_path) as make:
        yield make


@pytest.fixture
def play(tmp_path):
    def run(scenario, **options):
        async def whole():
            async with Scene(tmp_path / "state", **options) as scene:
                return await scenario(scene)

        return asyncio.run(whole())

    return run
