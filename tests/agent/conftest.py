"""An agent, and pods, for the tests of this folder."""

from __future__ import annotations

import sys

import pytest
from agent_jobs import Jobs, is_alive
from pod_jobs import making_pod_jobs

from kale_dist.places.agent_client import AgentClient


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    client = AgentClient()
    client.start()
    yield Jobs(tmp_path_factory.mktemp("agent"), client)
    client.close()
    assert not is_alive(client.pid)
    assert client.last_words == ""


@pytest.fixture
def make(tmp_path):
    """Makes jobs in pods, which are plain processes here: each imports PyTorch, for some seconds."""
    yield from making_pod_jobs(tmp_path, sys.executable)
