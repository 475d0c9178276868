"""Why a container ended, as a sentence: one row of the table each."""

import pytest

pytest.importorskip("docker")

from kale_dist.places.docker.explain import ContainerEnd, explain
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.wire import FailureCause


def end(**given):
    return ContainerEnd(**{"name": "kale-dist-job-1", "status": "exited", **given})


@pytest.mark.parametrize(
    ("given", "sentence", "lost", "cause"),
    [
        ({"status": "paused"}, "Container kale-dist-job-1 is paused", "", None),
        (
            {"exit_code": 137, "is_out_of_memory": True, "memory_bytes": 1 << 29},
            "Container kale-dist-job-1 was killed because it had used up its limit of 0.5 GiB", "out of memory",
            FailureCause.DIED,
        ),
        (
            {"exit_code": 137, "is_out_of_memory": True},
            "Container kale-dist-job-1 was killed because it had used up the machine's memory", "out of memory",
            FailureCause.DIED,
        ),
        ({"exit_code": 127, "error": "no such file"}, "Container kale-dist-job-1 could not run: no such file", "", FailureCause.NOT_STARTED),
        (
            {"exit_code": EXIT_CODE, "last_line": "the image's Python is 3.8"},
            "Container kale-dist-job-1 could not start its agent: the image's Python is 3.8", "", FailureCause.NOT_STARTED,
        ),
        ({"exit_code": 137}, "Container kale-dist-job-1 was ended from outside (SIGKILL, exit code 137), not because it ran out of memory", "killed", None),
        (
            {"exit_code": 1, "last_line": "exec python3: exec format error"},
            "Container kale-dist-job-1 could not start: the image is made for another processor (exec python3: exec format error)",
            "", FailureCause.NOT_STARTED,
        ),
        ({"exit_code": 143}, "Container kale-dist-job-1 was ended from outside (SIGTERM, exit code 143), not because it ran out of memory", "killed", None),
        # A rank was out of memory, and its agent lived to say so.
        ({"exit_code": 1, "is_out_of_memory": True, "last_line": "a line {with} braces"},
         "Container kale-dist-job-1 ended with exit code 1; its last line: a line {with} braces", "", None),
        ({"exit_code": 1}, "Container kale-dist-job-1 ended with exit code 1 and printed nothing", "", None),
    ],
)  # fmt: skip
def test_why_a_container_ended(given, sentence, lost, cause):
    trouble, found = explain(end(**given))
    assert (trouble.sentence, found, trouble.cause) == (sentence, lost, cause)
    assert trouble.heals == (given.get("status") == "paused")


def test_a_container_that_ended_well_is_not_explained():
    assert explain(end()) == (None, "")
