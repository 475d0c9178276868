"""Faults of containers on a real Docker engine, and of what lies between them and the notebook."""

import contextlib
import os
import signal
import socket
import time
import uuid
import warnings

import pytest
from fault_work import counts, eats_memory, trains_and_fails, waits, waits_the_first_time
from on_cluster import IMAGE, Network
from on_this_machine import an_hour_behind, breaking_at

import kale_dist as kd
from kale_dist.errors import JobNotFoundError


def in_docker(scene, **settings):
    """Where a call goes that computes nothing."""
    return kd.Docker(image=scene.part("plain_image"), **settings)


def container(job):
    return f"kale-dist-{job.name}"


def containers_of(scene, name, **filters):
    return scene.part("engine").api.containers(all=True, filters={"label": f"kale-dist.job={name}", **filters})


def container_is_killed(scene):
    job = scene.launch(waits, ready=2, on=in_docker(scene))
    scene.part("engine").api.kill(container(job), signal="SIGKILL")
    status = scene.end_of(job)
    assert status.state.value == "failed", status
    assert f"{container(job)} was ended from outside (SIGKILL" in status.reason


def container_is_lost(scene):
    on = in_docker(scene, volumes={"/data": str(scene.folder)})
    job = scene.launch(waits_the_first_time, "/data", ready=2, max_restarts=1, on=on)
    scene.part("engine").api.kill(container(job), signal="SIGKILL")
    scene.succeeds(job, "second time of 0", "second time of 1")
    assert any("The job is renewed" in line.text for line in job.logs())
    assert job.status.attempt == 1
    assert [item["Names"] for item in containers_of(scene, job.name)] == [[f"/{container(job)}.2"]]


def trains(scene, on, fails_in=None, epochs=12):
    """A training of two ranks, whose model has 8 MB, once its third epoch is in a checkpoint."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 200_000), nn.Linear(200_000, 2))
    model.register_buffer("epochs", torch.zeros(()))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long)), batch_size=8
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    how = {"epochs": epochs, "checkpoint_every": 1, "number_of_processes": 2, "max_restarts": 1, "on": on}
    job = scene.follow(
        kd.distribute(model, loader, nn.CrossEntropyLoss(), optimizer, trains_and_fails, train_args=fails_in, **how)
    )
    scene.until(lambda: (job.status.checkpoint_epoch or 0) >= 3 or job.done(), job)
    return job


def container_is_lost_while_the_engine_refuses(scene):
    engine, address = scene.part("engine"), os.environ.get("DOCKER_HOST", "")
    if not address.startswith("unix://"):
        pytest.skip("the engine is on another machine")
    # docker-py drops the answer of `logs` where the request that it makes next is refused: Python closes the socket with it.
    warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
    network = Network(socket.AF_UNIX, address.removeprefix("unix://"))
    scene.undone.callback(network.close)
    scene.patch.setenv("DOCKER_HOST", f"tcp://{network.here}")
    job = trains(scene, kd.Docker(image=IMAGE))
    network.refuse()
    engine.api.kill(container(job))
    time.sleep(15)
    network.mend()
    status = scene.end_of(job)
    assert (status.state.value, status.warnings) == ("succeeded", ()), (status, [str(line) for line in job.logs()])
    assert int(job.state_dict()["epochs"]) == 12
    assert not [line.text for line in job.logs() if "from the beginning" in line.text]


def container_is_removed(scene):
    job = scene.launch(waits, ready=2, max_restarts=3, on=in_docker(scene))
    scene.part("engine").api.remove_container(container(job), force=True)
    status = scene.end_of(job)
    assert status.state.value == "cancelled"
    assert status.reason == "The job was deleted while it ran, and its last lines are lost"


def memory_runs_out(scene):
    job = scene.launch(eats_memory, on=in_docker(scene, resources={"memory_gib": 0.25}))
    scene.fails(job, "died", "was killed because memory ran out", "512 MiB")
    assert job.status.reason.startswith(f"Rank {job.status.failed_rank} ")


def container_is_paused(scene):
    engine = scene.part("engine")
    job = scene.launch(counts, 80, 0.1, on=in_docker(scene))
    scene.until(lambda: any(line.rank == 1 and line.text == "000003" for line in job.logs()), job)
    engine.api.pause(container(job))
    time.sleep(8)
    engine.api.unpause(container(job))
    scene.succeeds(job, 80, 80)
    check_counts(job, 80)


def check_counts(job, number):
    """No line of either rank is missing, and none came twice."""
    for rank in (0, 1):
        assert [int(line.text) for line in job.logs(ranks=rank)] == list(range(number))


def clock_is_an_hour_behind(scene):
    script = f"""
        job = kd.launch(counts, 30, 0.05, number_of_processes=2, timeout_s=60, on={in_docker(scene)!r})
        print(job.results(100), len(list(job.logs(ranks=1))))
        job.delete()
    """
    process = scene.notebook(script.replace("Docker(", "kd.Docker(", 1), **an_hour_behind(scene))
    assert scene.said_by(process) == "[30, 30] 30\n"


POINTS = (
    "before kale_dist.job.records:create",
    "after kale_dist.places.docker.engines:ensure_network",
    "before docker.api.container:ContainerApiMixin.create_container_from_config",
    "after docker.api.container:ContainerApiMixin.create_container_from_config",
    "before docker.api.container:ContainerApiMixin.put_archive",
    "after docker.api.container:ContainerApiMixin.start",
    "before kale_dist.job.records:write",
    "after kale_dist.job.records:write",
    "before kale_dist.calls.starting:handle",
)
"""Where a submission to Docker can be stopped."""


def ctrl_c():
    """What a terminal sends: the main thread gets a KeyboardInterrupt, at whatever it does."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)


def interrupted_at_each_step(scene):
    on = in_docker(scene)
    for point in POINTS:
        name = f"test-{uuid.uuid4().hex[:8]}"
        with breaking_at(point, ctrl_c), pytest.raises(KeyboardInterrupt):
            kd.launch(waits, number_of_processes=2, name=name, on=on)
        delete_what_is_there(scene, name, point)


def delete_what_is_there(scene, name, point):
    """Containers without a record here are found by the job's reference, as those of another machine are."""
    with contextlib.suppress(JobNotFoundError):
        kd.attach(f"docker://{name}", trust=True).delete()
    assert containers_of(scene, name) == [], point


def killed_at_each_step(scene):
    script = """
        from on_this_machine import breaking_at
        with breaking_at({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            kd.launch(waits, number_of_processes=2, name={name!r}, on=kd.{on!r})
    """
    for point in POINTS:
        name = f"test-{uuid.uuid4().hex[:8]}"
        scene.said_by(scene.notebook(script.format(point=point, name=name, on=in_docker(scene))), -signal.SIGKILL)
        delete_what_is_there(scene, name, point)
