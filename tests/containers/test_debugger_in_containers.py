"""`breakpoint()` in a rank of a container, debugged from here."""

import uuid

import pytest
from container_work import stops_on_1

import kale_dist as kd
from kale_dist.job import interrupts


@pytest.mark.parametrize("per_container", [1, 2])
def test_a_rank_in_a_container_is_debugged_where_its_job_is_waited_for(plain_image, monkeypatch, per_container):
    lines, asked = ["p value", "value = 40", "c"], []
    monkeypatch.setattr(interrupts, "has_person", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: (asked.append(prompt), lines.pop(0))[1])
    place = kd.Docker(image=plain_image, processes_per_pod=per_container)
    job = kd.launch(stops_on_1, 2, number_of_processes=2, on=place, name=f"test-{uuid.uuid4().hex[:8]}")
    assert job.results() == [2, 41]
    assert asked == ["(rank 1) "] * 3
    job.delete()
