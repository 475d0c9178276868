"""What ranks in pods use comes home through the pods' logs, and leaves no trace in them while nothing changes."""

import json
import time

from kale_dist.backends.mirror import Mirror
from pod_jobs import PodJob

from kale_dist import contract
from kale_dist.contract import EventKind, JobFiles
from kale_dist.pod_order import PodVariable
from kale_dist.transport import EventItem


def be_steady():
    time.sleep(7)


def test_usage_goes_through_the_logs_of_pods_into_the_folder_of_the_job(tmp_path):
    job = PodJob(tmp_path, be_steady, ranks=2).put_input()
    try:
        job.start(0, **{PodVariable.NODE: "node-7"})
        job.start(1)
        assert job.end() == [0, 0]
    finally:
        job.close()
    told = [item for item in job.items(EventItem) if item.event["event"] == EventKind.USAGE]
    assert {item.number for item in told} == {None}
    assert {(item.event["rank"], item.event["node"]) for item in told} == {(0, "node-7"), (1, None)}
    assert all(item.event["memory_bytes"] > 10 << 20 for item in told)

    files = JobFiles(tmp_path / "job")
    files.folder.mkdir()
    mirror = Mirror(files, job.key, job=job.order.job, world_size=2, fill=lambda *_: None)
    assert mirror.try_lock()
    for pod in (*job.pods, job.pods[0]):
        mirror.take(f"uid-{pod.number}", pod.number, pod.items)
    mirror.close()
    kept = json.loads(files.progress.read_bytes())
    last = {f"usage {item.event['rank']}": item.event for item in told}
    assert kept == last
    assert not [event for event in contract.decode_json_lines(files.events.read_bytes()) if event["event"] == "usage"]
