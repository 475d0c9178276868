"""Several containers of a Docker job are reached by nobody else's on the same engine, and what one of them sends leads nowhere."""

import concurrent.futures
import io
import tarfile
import time
import uuid

import pytest
from work_without_pytest import waits_and_says

import kale_dist as kd
from kale_dist.errors import StoreError
from kale_dist.places.docker import archive
from kale_dist.places.manifests.settings import PORT

KNOCK = """
import socket, sys
for port in range(int(sys.argv[2]), int(sys.argv[2]) + 3):
    try:
        socket.create_connection((sys.argv[1], port), 2).close()
        print(port, "is open")
    except OSError as error:
        print(port, "is closed:", error)
"""
"""What somebody does in a container: it says which ports of an address answer."""


def name_of_a_job():
    return f"test-{uuid.uuid4().hex[:8]}"


def networks_of(engine, job):
    return engine.api.networks(filters={"label": [f"kale-dist.job={job}"]})


def knock(engine, image, network, address):
    """What a container in a network finds at an address."""
    made = engine.api.create_container(
        image,
        ["-c", KNOCK, address, str(PORT)],
        entrypoint="python3",
        host_config=engine.api.create_host_config(network_mode=network),
    )["Id"]
    try:
        engine.api.start(made)
        engine.api.wait(made)
        return engine.api.logs(made).decode()
    finally:
        engine.api.remove_container(made, force=True)


def test_a_container_of_somebody_else_reaches_no_port_of_a_job_of_several(engine, plain_image):
    on = kd.Docker(image=plain_image)
    other, job = (
        kd.launch(waits_and_says, 120, number_of_processes=number, name=name_of_a_job(), on=on) for number in (1, 2)
    )
    try:
        deadline = time.monotonic() + 90
        while sum(line.text == "is there" for line in job.logs()) < 2:
            assert time.monotonic() < deadline, [str(line) for line in job.logs()]
            time.sleep(0.2)
        head = engine.api.inspect_container(f"kale-dist-{job.name}-0")["NetworkSettings"]["Networks"]
        ((own, place),) = head.items()
        assert "is open" in knock(engine, plain_image, own, place["IPAddress"])
        theirs = engine.api.inspect_container(f"kale-dist-{other.name}-0")["HostConfig"]["NetworkMode"]
        said = knock(engine, plain_image, theirs, place["IPAddress"])
        assert said.count("is closed") == 3, said
    finally:
        for each in (other, job):
            each.cancel()
            each.wait(60)
            each.delete()
    assert not networks_of(engine, job.name)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_the_place_of_a_result_leads_to_no_file_of_yours(tmp_path, kind):
    (tmp_path / "mine").write_text("kept")
    header, sent = tarfile.TarInfo("../mine"), io.BytesIO()
    header.type, header.linkname = kind, str(tmp_path / "mine")
    with tarfile.open(fileobj=sent, mode="w") as packed:
        packed.addfile(header)
    with pytest.raises(StoreError, match="no file"):
        archive.save_file([sent.getvalue()], tmp_path / "result")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_engine_has_addresses_for_the_networks_of_many_kept_jobs(engine, plain_image):
    jobs = []

    def run_one(_):
        job = kd.launch(waits_and_says, 0, number_of_processes=2, name=name_of_a_job(), on=kd.Docker(image=plain_image))
        jobs.append(job)
        return job.wait(300).state

    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert set(pool.map(run_one, range(60))) == {"succeeded"}
        assert all(len(networks_of(engine, job.name)) == 1 for job in jobs)
    finally:
        for job in jobs:
            job.delete()
    assert not any(networks_of(engine, job.name) for job in jobs)
