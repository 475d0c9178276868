"""`breakpoint()` in a rank of a container, debugged from here."""

import uuid

import pytest
from debugged import check_debugging

import kale_dist as kd


@pytest.mark.parametrize("per_container", [1, 2])
def test_a_rank_in_a_container_is_debugged_where_its_job_is_waited_for(plain_image, monkeypatch, per_container):
    place = kd.Docker(image=plain_image, processes_per_pod=per_container)
    check_debugging(monkeypatch, on=place, name=f"test-{uuid.uuid4().hex[:8]}")
