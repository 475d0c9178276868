"""What ranks in pods use is told by the head, and leaves no trace in the log or among the events."""

from plain_jobs import be_steady

from kale_dist.wire import EventBlock, PodVariable, ProgressBlock


def test_usage_of_near_and_far_ranks_is_told(make_bare):
    job = make_bare(be_steady, ranks=2).put_input()
    job.start(0, **{PodVariable.NODE: "node-7"})
    job.start(1)
    assert job.end() == [0, 0]
    told = [block.event for block in job.items(ProgressBlock) if block.event["event"] == "usage"]
    assert {(event["rank"], event.get("node")) for event in told} == {(0, "node-7"), (1, None)}
    assert all(event["memory_bytes"] > 10 << 20 for event in told)
    assert not [block for block in job.items(EventBlock) if block.event["event"] == "usage"]
