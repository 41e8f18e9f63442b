"""Jobs for the tests of hangs and crashes; every process of a job ends with its test."""

import pytest

from tests.agent.hang.jobs import Job


@pytest.fixture
def start_job(tmp_path):
    jobs = []

    def start(*faults, **options):
        jobs.append(Job(tmp_path, *faults, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
