"""An agent for the tests of this folder."""

from __future__ import annotations

import pytest
from agent_jobs import Jobs, is_alive
from pod_jobs import PodJob

from kale_dist.backends.agent_client import AgentClient


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    client = AgentClient()
    client.start()
    yield Jobs(tmp_path_factory.mktemp("agent"), client)
    client.close()
    assert not is_alive(client.pid)
    assert client.last_words == ""


@pytest.fixture
def make(tmp_path):
    """Makes jobs in pods, which are plain processes here."""
    made = []

    def make_job(function, *args, **options):
        made.append(PodJob(tmp_path, function, *args, **options))
        return made[-1]

    yield make_job
    for job in made:
        job.close()
