"""`breakpoint()` in a rank behind a relay, debugged from here."""

import pytest
from debugged import check_debugging

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


def test_a_rank_in_another_pod_is_debugged_where_its_job_is_waited_for(plain, monkeypatch):
    check_debugging(monkeypatch, on=plain, stall_timeout_s=60)
