"""Callbacks, a tracker, Prometheus's numbers and a sweep, with pods of the cluster."""

import pytest
import torch
from monitored import series, train
from on_cluster import pods_in, run_kubectl, wait_for
from prometheus_client.parser import text_string_to_metric_families
from rank_work import pause

from kale_dist.callbacks import EMA, EarlyStopping, ModelCheckpoint
from kale_dist.trackers import TensorBoard

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]

PORT = 9090


def test_all_of_it_comes_back_from_pods(namespace, tmp_path):
    stop = EarlyStopping("train/loss", mode="max", patience=4)
    job = train(
        pods_in(namespace, metrics_port=PORT), epochs=9, track=TensorBoard(folder=str(tmp_path)),
        callbacks=[stop, ModelCheckpoint("eval/loss"), EMA(0.5), pause],
    )  # fmt: skip
    wait_for(job, lambda status: any(row.source == "eval" for row in status.metrics))
    wait_for(job, lambda status: status.replicas[0].usage)
    pod = f"{job.name}-master-0"
    text = run_kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{PORT}/proxy/metrics")
    found = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {"kale_dist_epoch", "kale_dist_samples_total", "kale_dist_memory_bytes", "kale_dist_metric"} <= found
    shown = run_kubectl("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.annotations}")
    assert '"prometheus.io/port":"9090"' in shown
    result = job.result()
    assert (result.epochs, result.stopped_early) == (5, True)
    assert result.best_epoch == 5
    assert torch.equal(job.best_state_dict()["weight"], job.state_dict()["weight"])
    assert not torch.equal(job.averaged_state_dict()["weight"], job.state_dict()["weight"])
    job.wait()
    found = series(tmp_path / job.name)
    assert (found["train/loss"], found["pace/lr"], found["strategy/collective_s"]) == (5, 5, 5)
