"""What Prometheus reads of a job: asked as it asks, read by its own parser, and once by a real Prometheus."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from plain_jobs import reports_and_waits
from prometheus_client.parser import text_string_to_metric_families

from kale_dist.wire.events import Event
from kale_dist.worker.pod.prometheus import Gauges


def parsed(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def progress(rank, epoch, samples, phase="train", **more):
    event = {"event": "progress", "rank": rank, "attempt": 0, "phase": phase, "epoch": epoch, "epochs": 3}
    return Event.read(event | {"samples": samples, "samples_per_s": 12.5, "loss": 0.25} | more)


def test_events_add_up():
    gauges = Gauges('a "name"\\', 2, earlier_runs=1)
    gauges.note(Event.read({"event": "rank", "rank": 0, "state": "running"}))
    for event in (
        progress(0, 1, 40),
        progress(0, 1, 100),
        progress(0, 1, 30, "eval"),
        progress(0, 2, 10),
        progress(1, 1, 7),
    ):
        gauges.note(event)
    gauges.note(
        Event.read(
            {"event": "usage", "rank": 1, "memory_bytes": 1 << 30, "gpu_percent": 50, "memory_limit_bytes": None}
        )
    )
    gauges.note(
        Event.read(
            {"event": "metrics", "rank": None, "source": "eval", "values": [["loss", float("nan")], ["f1", 0.5]]}
        )
    )
    found = parsed(gauges.text())
    assert found["kale_dist_job_info", ("name", 'a "name"\\')] == 1
    assert found["kale_dist_ranks", ("state", "running")] == 1
    assert found["kale_dist_ranks", ("state", "pending")] == 1
    assert found["kale_dist_restarts_total",] == 1
    assert (found["kale_dist_epoch",], found["kale_dist_epochs",]) == (2, 3)
    assert found["kale_dist_samples_total", ("rank", "0")] == 110
    assert found["kale_dist_samples_total", ("rank", "1")] == 7
    assert found["kale_dist_samples_per_second", ("rank", "0")] == 12.5
    assert found["kale_dist_loss", ("rank", "1")] == 0.25
    assert found["kale_dist_memory_bytes", ("rank", "1")] == 1 << 30
    assert found["kale_dist_gpu_utilization_ratio", ("rank", "1")] == 0.5
    assert found["kale_dist_metric", ("name", "f1"), ("rank", ""), ("source", "eval")] == 0.5
    assert "nan" in gauges.text()
    assert not any("memory_limit" in key[0] for key in found)


def test_a_restart_counts_and_keeps_the_sum_of_samples():
    gauges = Gauges("j", 1)
    gauges.note(Event.read({"event": "rank", "rank": 0, "state": "failed"}))
    gauges.note(progress(0, 1, 40))
    gauges.note(progress(0, 1, 10, attempt=1))
    found = parsed(gauges.text())
    assert found["kale_dist_restarts_total",] == 1
    assert found["kale_dist_samples_total", ("rank", "0")] == 50
    assert found["kale_dist_ranks", ("state", "failed")] == 0


def test_the_ranks_are_those_of_the_newest_attempt():
    gauges = Gauges("j", 3)
    assert parsed(gauges.text())["kale_dist_ranks", ("state", "pending")] == 3
    member = {"agent": 0, "first_rank": 0, "processes": 2}
    gauges.note(Event.read({"event": "attempt", "rank": None, "attempt": 0, "members": [member]}))
    gauges.note(Event.read({"event": "rank", "rank": 1, "attempt": 0, "state": "running"}))
    found = parsed(gauges.text())
    assert [found["kale_dist_ranks", ("state", state)] for state in ("pending", "running")] == [1, 1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def until(condition, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except (OSError, LookupError):
            pass
        time.sleep(0.1)
    raise AssertionError("not in time")


@pytest.fixture
def served(make_bare, tmp_path):
    port = free_port()
    job = make_bare(reports_and_waits, str(tmp_path), ranks=2, metrics_port=port).put_input().start_all()
    yield f"http://127.0.0.1:{port}"
    (tmp_path / "go").touch()
    assert job.end() == [0, 0]


def test_the_head_answers_while_the_job_runs(served):
    def both_run():
        kind, text = get(f"{served}/metrics")
        found = parsed(text)
        is_there = found["kale_dist_metric", ("name", "lr"), ("rank", "1"), ("source", "report")] == 0.5
        return (kind, found) if is_there and ("kale_dist_loss", ("rank", "1")) in found else None

    kind, found = until(both_run)
    assert kind.startswith("text/plain; version=0.0.4")
    assert found["kale_dist_ranks", ("state", "running")] == 2
    assert found["kale_dist_samples_total", ("rank", "1")] == 8
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{served}/log")


def test_a_taken_port_does_not_fail_the_job(make_bare):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = make_bare(print, "done", ranks=1, metrics_port=taken.getsockname()[1]).put_input().start_all()
        assert job.end() == [0]
    assert "(metrics_port) cannot be opened" in job.text()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_it(served, tmp_path):
    target, port = served.removeprefix("http://"), free_port()
    scraped = {"job_name": "kale-dist", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [scraped]}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    ) as prometheus:
        try:

            def loss():
                _, text = get(f"http://127.0.0.1:{port}/api/v1/query?query=sum(kale_dist_loss)")
                return json.loads(text)["data"]["result"][0]["value"][1]

            assert until(lambda: loss() == "1.5")
            _, text = get(f"http://127.0.0.1:{port}/api/v1/targets/metadata?metric=kale_dist_samples_total")
            assert json.loads(text)["data"][0]["type"] == "counter"
        finally:
            prometheus.terminate()
