"""Other containers of the same engine reach no rank of a job, and what a container sends leads nowhere."""

import io
import json
import tarfile
import uuid

import pytest
from work_without_pytest import says_where_it_listens

import kale_dist as kd
from kale_dist.errors import StoreError
from kale_dist.places.docker import archive
from kale_dist.places.manifests.object_settings import PORT

KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    try:
        connected = socket.create_connection((sys.argv[1], int(port)), 2)
        connected.sendall(b"GET /stream HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        print(port, connected.recv(100).decode().partition("\\r\\n")[0])
    except OSError as error:
        print(port, "is closed:", error)
"""
"""What somebody does in a container: it says what the ports of an address answer."""


def name_of_a_job():
    return f"test-{uuid.uuid4().hex[:8]}"


def test_ranks_listen_on_the_loopback_interface_and_a_container_of_somebody_else_reaches_the_agent_alone(engine, image):
    job = kd.launch(says_where_it_listens, 60, number_of_processes=2, name=name_of_a_job(), on=kd.Docker(image=image))
    said = next(line.text for line in job.logs(ranks=0, follow=True) if line.text.startswith("listening: "))
    addresses = json.loads(said.removeprefix("listening: "))
    ports = sorted({port for _, port in addresses})
    within = engine.api.inspect_container(f"kale-dist-{job.name}")["NetworkSettings"]["Networks"]["kale-dist"]
    other = engine.api.create_container(
        image,
        ["-c", KNOCK, within["IPAddress"], *map(str, {*ports, PORT, PORT + 1})],
        entrypoint="python3",
        host_config=engine.api.create_host_config(network_mode="kale-dist"),
    )["Id"]
    try:
        engine.api.start(other)
        engine.api.wait(other)
        answers = engine.api.logs(other).decode().splitlines()
    finally:
        engine.api.remove_container(other, force=True)
        job.delete()
    # Two of gloo's, and the agent's.
    assert len(ports) > 2
    assert [port for address, port in addresses if not address.startswith("127.")] == [PORT + 2]
    assert [one for one in answers if "is closed" not in one] == [f"{PORT + 2} HTTP/1.1 403 Forbidden"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_the_place_of_a_result_leads_to_no_file_of_yours(tmp_path, kind):
    (tmp_path / "mine").write_text("kept")
    header, sent = tarfile.TarInfo("../mine"), io.BytesIO()
    header.type, header.linkname = kind, str(tmp_path / "mine")
    with tarfile.open(fileobj=sent, mode="w") as packed:
        packed.addfile(header)
    with pytest.raises(StoreError, match="no file"):
        archive.save_file([sent.getvalue()], tmp_path / "result")
