"""`breakpoint()` in a rank behind a relay, debugged from here."""

import pytest
from rank_work import stops_on_1

import kale_dist as kd
from kale_dist.job import interrupts

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


def test_a_rank_in_another_pod_is_debugged_where_its_job_is_waited_for(plain, monkeypatch):
    lines, asked = ["p value", "value = 40", "c"], []
    monkeypatch.setattr(interrupts, "has_person", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: (asked.append(prompt), lines.pop(0))[1])
    job = kd.launch(stops_on_1, 2, number_of_processes=2, on=plain, stall_timeout_s=60)
    assert job.results() == [2, 41]
    assert asked == ["(rank 1) "] * 3
    job.delete()
