"""Runs for the agent's tests; every process of a run is ended with its test."""

import pytest

from tests.agent.nodes import Run


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(**options):
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def run(make_run):
    return make_run()
