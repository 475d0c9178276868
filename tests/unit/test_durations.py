"""The durations of the table "How a job ends" in docs/architecture.md, added up: no process gives up a job that another may still be ending."""

import pytest

from kale_dist.places.following import life
from kale_dist.wire import CANCEL_GRACE_S, GRACE_S, Policy
from kale_dist.worker.agent import attempt, ending, fork_pool, job_run, writer
from kale_dist.worker.pod import head, head_relays, relay_protocol

AFTER_RANKS_S = fork_pool.LEFTOVER_GRACE_S + ending.BLAME_FAR_AFTER_S + 2 * writer.TICK_S
"""From the last rank's end to the last event in the log, where the disk takes it."""


@pytest.mark.parametrize("grace_s", [0.0, 1.0, GRACE_S, 600.0])
@pytest.mark.parametrize("save", [False, True])
def test_a_cancelled_job_has_written_its_end_before_it_is_given_up(grace_s, save):
    policy = Policy(grace_s=grace_s)
    asked_s = policy.cancel_grace_s(save=save)
    # Ranks that save are ended at most CANCEL_GRACE_S after they have; those that were let go are killed after EXIT_LIMIT_S.
    ranks_s = max(asked_s + (CANCEL_GRACE_S if save else 0.0), attempt.EXIT_LIMIT_S)
    assert ranks_s + AFTER_RANKS_S < policy.end_s
    killed_s = asked_s + (CANCEL_GRACE_S if save else 0.0) + life.CANCEL_MARGIN_S
    assert ranks_s + AFTER_RANKS_S < killed_s
    assert killed_s < policy.pod_grace_s


@pytest.mark.parametrize("grace_s", [0.0, GRACE_S, 600.0])
def test_a_pod_that_gets_sigterm_has_written_its_log_before_it_is_killed(grace_s):
    policy = Policy(grace_s=grace_s)
    assert policy.end_s + AFTER_RANKS_S + head.TERM_DRAIN_LIMIT_S < policy.pod_grace_s


def test_a_head_decides_about_a_lost_pod_before_its_follower_does():
    learns_s = relay_protocol.GONE_AFTER_S + head_relays.LOST_AFTER_S
    ranks_s = max(attempt.FAILURE_GRACE_S, attempt.EXIT_LIMIT_S)
    assert learns_s + ranks_s + AFTER_RANKS_S < life.HEAD_DECIDES_S
    assert life.HEAD_DECIDES_S < job_run.REPLACE_WAIT_S
