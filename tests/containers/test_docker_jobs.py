"""Jobs on a real Docker engine, as their users see them: called from here, run in a container each, and nothing left in the end."""

import io
import os
import subprocess
import sys
import tarfile
import textwrap
import time
import uuid

import docker.errors
import flat
import made_packages
import package_work
import pytest
import torch
from container_work import (
    does_much,
    hang,
    imports_what_the_image_lacks,
    train_slowly,
    writes_where_it_must,
)

import kale_dist as kd
from kale_dist.errors import (
    BackendError,
    ConfigError,
    JobCancelledError,
    JobExistsError,
    JobFailedError,
    JobNotFoundError,
)
from kale_dist.job import records
from kale_dist.places.docker import containers
from kale_dist.wire import StateName


@pytest.fixture
def on(plain_image):
    """Arguments that send a call that computes nothing to the engine."""
    return {"on": "docker", "image": plain_image, "name": f"test-{uuid.uuid4().hex[:8]}"}


@pytest.fixture
def on_torch(on, image):
    """The same for a call that trains."""
    return on | {"image": image}


def containers_of(engine, job):
    return engine.api.containers(all=True, filters={"label": f"kale-dist.job={job}"})


def wait_for_line(job, text, timeout_s=90, times=1):
    deadline = time.monotonic() + timeout_s
    while sum(text in line.text for line in job.logs()) < times:
        assert time.monotonic() < deadline, (job.status, [str(line) for line in job.logs()])
        assert not job.done(), job.status
        time.sleep(0.2)


def in_new_process(code, state=None):
    """Run a script in another process; with a state folder of its own it is as on another machine."""
    environment = {**os.environ, "PYTHONWARNINGS": "default", **({"XDG_STATE_HOME": str(state)} if state else {})}
    here = os.path.dirname(__file__)  # noqa: PTH120 - a text is wanted
    environment["PYTHONPATH"] = here
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_model_is_trained_by_the_ranks_of_one_container_and_comes_back(on_torch, engine):
    from trainings import summing

    model, *others = summing()
    before = model.weight.detach().clone()
    job = flat.distribute(model, *others, epochs=8, seed=1, number_of_processes=2, **on_torch)
    assert job.wait().state is StateName.SUCCEEDED, list(job.logs())
    assert job.model is model
    assert not torch.equal(model.weight, before)
    assert torch.allclose(model.weight, torch.ones(1, 4), atol=0.2)
    assert {replica.pod for replica in job.status.replicas} <= {None, f"kale-dist-{job.name}"}
    assert len(containers_of(engine, job.name)) == 1
    job.delete()
    assert containers_of(engine, job.name) == []


@pytest.mark.nightly
def test_much_comes_and_goes_and_no_line_is_lost(on, engine, tmp_path):
    """100 MB there and back, lines faster than they can be read, and a folder, a variable and a user."""
    lines, size = 20_000, 100_000_000
    (tmp_path / "data").mkdir()

    weights = os.urandom(1 << 20) * (size >> 20)
    job = flat.launch(
        does_much, "/data", weights, lines, number_of_processes=2, volumes={"/data": str(tmp_path / "data")},
        environment={"GREETING": "hello, $(world)"}, resources={"memory_gib": 2, "shm_gib": 0.5}, **on,
    )  # fmt: skip
    results = job.results(timeout=240)
    for (person, user, greeting, has_shared_memory), back in results:
        assert (person, user, greeting, has_shared_memory) == ("kale-dist", os.getuid(), "hello, $(world)", True)
        assert back == weights
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["from-0", "from-1"]
    for rank in (0, 1):
        texts = [line.text for line in job.logs(ranks=[rank])]
        assert [text for text in texts if text.startswith("line ")] == [
            f"line {number:06} of rank {rank}" for number in range(lines)
        ]
        assert sum(text.count("x") for text in texts if set(text) == {"x"}) == 3_000_000
    job.delete()


@pytest.mark.nightly
def test_a_fast_log_that_no_notebook_has_followed_is_whole(on, engine):
    name = on.pop("name")
    in_new_process(
        f"""
        import kale_dist as kd
        from kale_dist.calls.request import gathered
        from container_work import prints_fast
        kd.launch(prints_fast, 100_000, number_of_processes=1, name={name!r}, **gathered({on!r}))
        """
    )
    deadline = time.monotonic() + 90
    while [container["State"] for container in containers_of(engine, name)] != ["exited"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job = kd.attach(f"docker://{name}")
    job.wait(timeout=60)
    # Twice as much as the copy on the container's stdout has at once.
    assert [int(line.text[:6]) for line in job.logs(ranks=[0])] == list(range(100_000))
    job.delete()


@pytest.mark.parametrize(
    ("path", "said"),
    [("", r"No module named 'einops'.*packages='here'"), ("table.csv", r"table.csv.*not those of this machine")],
)
def test_what_only_this_machine_has_is_named_with_how_it_gets_there(on, tmp_path, path, said):
    (tmp_path / "table.csv").write_text("1,2")
    work = (tmp_path / path).read_text if path else imports_what_the_image_lacks
    job = flat.launch(work, number_of_processes=1, **on)
    with pytest.raises(JobFailedError, match=said):
        job.result(timeout=120)
    job.delete()


@pytest.mark.nightly
def test_training_resumes_from_its_checkpoint_after_its_container_was_killed(on_torch, engine):
    from trainings import summing

    job = flat.distribute(
        *summing(32, lr=0.01), train_slowly, epochs=10, train_args=0.3, seed=1,
        number_of_processes=2, threads=1, max_restarts=1, **on_torch,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while (job.status.checkpoint_epoch or 0) < 2:
        assert time.monotonic() < deadline, job.status
        assert not job.done(), job.status
        time.sleep(0.2)
    engine.api.kill(f"kale-dist-{job.name}")
    assert job.wait(180).state is StateName.SUCCEEDED, job.status
    texts = [line.text for line in job.logs()]
    assert any(text.startswith("Attempt 2: the training resumes after epoch ") for text in texts), "\n".join(texts)
    rows = [row["epoch"] for row in job.metrics if row["source"] == "train"]
    assert rows == list(range(1, 11)), rows
    job.delete()


def test_a_job_outlives_its_kernel_and_is_found_from_other_machines_whose_user_trusts_it(on, engine, tmp_path):
    name, ref = on.pop("name"), ""
    ref = in_new_process(
        f"""
        import kale_dist as kd
        from kale_dist.calls.request import gathered
        from container_work import waits_a_little
        print(kd.launch(waits_a_little, 3, number_of_processes=1, name={name!r}, **gathered({on!r})).ref)
        """
    ).strip()
    assert ref == f"docker://{name}"
    told = in_new_process(
        f"""
        import warnings
        import kale_dist as kd
        from kale_dist import errors
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job = kd.attach({ref!r})
            job.wait(timeout=90)
        assert any("trust=True" in str(item.message) for item in caught), caught
        try:
            job.result()
        except errors.ResultUnavailableError:
            print("refused")
        print(kd.attach({ref!r}, trust=True).result(timeout=60))
        """,
        tmp_path / "with its log",
    )
    assert told.split() == ["refused", "0"]
    listed = f"import kale_dist as kd\nprint(*(job.status.state for job in kd.jobs(on='docker') if job.ref == {ref!r}))"
    assert in_new_process(listed, tmp_path / "without").split() == ["succeeded"]
    job = kd.attach(ref)
    assert job.result(timeout=60) == 0
    job.delete()
    with pytest.raises(JobNotFoundError, match="There is no job"):
        kd.attach(ref)
    assert containers_of(engine, name) == []


@pytest.mark.nightly
def test_a_job_that_another_user_cancels_is_not_restarted(on, tmp_path):
    """Without the key they can only stop its container, which looks like a loss."""
    job = flat.launch(hang, number_of_processes=2, max_restarts=1, **on)
    wait_for_line(job, "ready", times=2)
    in_new_process(
        f"""
        import kale_dist as kd
        from kale_dist.job import records
        records.identity = lambda: "mallory@elsewhere"
        kd.attach({job.ref!r}).cancel()
        """,
        tmp_path,
    )
    status = job.wait(timeout=60)
    assert (status.state, status.reason) == (StateName.CANCELLED, "The job was cancelled by mallory@elsewhere")
    assert status.attempt == 0
    job.delete()


def test_cancel_is_quick_even_before_the_agent_listens(on, engine):
    job = flat.launch(hang, number_of_processes=1, **on)
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(timeout=60)
    # The container ends a moment after its agent's last word.
    engine.api.wait(f"kale-dist-{job.name}", timeout=30)
    job.delete()


def test_a_name_that_somebody_elses_container_has_is_refused_and_nothing_is_left(on, engine):
    name = f"kale-dist-{on['name']}"
    foreign = engine.api.create_container(on["image"], ["true"], name=name)["Id"]
    try:
        with pytest.raises(JobExistsError, match=name):
            flat.launch(hang, number_of_processes=2, **on)
        assert containers_of(engine, on["name"]) == []
        with pytest.raises(JobNotFoundError):
            kd.attach(f"docker://{on['name']}")
    finally:
        engine.api.remove_container(foreign)


def test_an_image_without_python_is_refused_and_nothing_is_left(on, engine):
    tag = f"kale-dist-test-{uuid.uuid4().hex[:8]}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"))
    engine.api.import_image_from_data(packed.getvalue(), repository=tag)
    try:
        with pytest.raises(BackendError, match="no `python3` on its PATH"):
            flat.launch(hang, number_of_processes=1, **{**on, "image": tag})
        assert containers_of(engine, on["name"]) == []
    finally:
        engine.api.remove_image(tag, force=True)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"image": "localhost:5000/kale-dist/never:1"}, BackendError, "there is no such image"),
        ({"image": "registry.invalid/never:1"}, BackendError, "the registry cannot be reached"),
        ({"volumes": {"/data": "/no/such/folder"}}, ConfigError, "'/no/such/folder' does not exist"),
        ({"resources": {"cpu": 4096}}, ConfigError, "and the engine's machine has"),
        ({"resources": {"memory_gib": 1e6}}, ConfigError, "and the engine's machine has"),
        ({"resources": {"memory_gib": 0.001}}, BackendError, "the memory limit is too low"),
        ({"resources": {"gpus": 1}, "cuda": True}, BackendError, "cannot give GPUs to containers"),
    ],
)
def test_what_the_engine_cannot_give_is_refused_with_a_remedy(on, engine, changes, error, said):
    with pytest.raises(error, match=said):
        flat.launch(hang, number_of_processes=1, **{**on, **changes})
    assert containers_of(engine, on["name"]) == []
    with pytest.raises(JobNotFoundError):
        kd.attach(f"docker://{on['name']}")


def test_jobs_that_run_at_once_get_gpus_of_their_own(on, engine, monkeypatch):
    """The engine here has no GPU and refuses to start what wants one, but it knows what it was asked for."""
    # Under another label than usual: what others on the engine hold does not count.
    label = f"kale-dist.gpus-{on['name']}"
    monkeypatch.setattr(containers, "GPUS_LABEL", label)
    asked, create = [], type(engine.api).create_container_from_config

    def noting(api, body, *arguments, **options):
        asked.extend(request["DeviceIDs"] for request in (body["HostConfig"] or {}).get("DeviceRequests", ()))
        return create(api, body, *arguments, **options)

    monkeypatch.setattr(type(engine.api), "create_container_from_config", noting)

    def wants(gpus):
        asked.clear()
        with pytest.raises(BackendError, match="cannot give GPUs to containers"):
            flat.launch(hang, number_of_processes=1, resources={"gpus": gpus}, cuda=True, **on)
        return asked[0]

    assert wants(2) == ["0", "1"]
    names = [f"kale-dist-{on['name']}-x{number}" for number in range(2)]
    for name, held in zip(names, ("0", "2,3"), strict=True):
        engine.api.create_container(on["image"], ["sleep", "1"], name=name, labels={label: held})
    try:
        assert wants(2) == ["1", "4"]
        engine.api.start(names[0])
        engine.api.wait(names[0])
        assert wants(2) == ["0", "1"]
    finally:
        for name in names:
            engine.api.remove_container(name, force=True)


def test_a_new_volume_belongs_to_the_containers_user(on, engine):
    volume = f"kale-dist-test-{uuid.uuid4().hex[:8]}"
    try:
        job = flat.launch(
            writes_where_it_must, "/data/deep", number_of_processes=1, volumes={"/data/deep": volume},
            environment={"GREETING": "x"}, **on,
        )  # fmt: skip
        assert job.result(timeout=90)[2] == "x"
        job.delete()
        assert engine.api.inspect_volume(volume)["Name"] == volume
    finally:
        engine.api.remove_volume(volume)


@pytest.fixture
def image_with_volume(engine, plain_image):
    """An image whose containers get a volume without a name."""
    tag = f"kale-dist-test-{uuid.uuid4().hex[:8]}:1"
    engine.client.images.build(
        fileobj=io.BytesIO(f"FROM {plain_image}\nVOLUME /{tag[:-2]}\n".encode()), tag=tag, rm=True
    )
    yield tag
    engine.api.remove_image(tag, force=True)


def test_no_anonymous_volume_outlives_its_job(on, engine, image_with_volume):
    job = flat.launch(hang, number_of_processes=1, **{**on, "image": image_with_volume})
    (made,) = containers_of(engine, job.name)
    volumes = [mount["Name"] for mount in engine.api.inspect_container(made["Id"])["Mounts"]]
    job.delete()
    assert volumes
    for volume in volumes:
        with pytest.raises(docker.errors.NotFound):
            engine.api.inspect_volume(volume)


def test_an_engine_that_is_not_there_is_told_with_a_remedy(on, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    with pytest.raises(BackendError, match="There is no Docker engine at unix:///no/such/socket") as caught:
        flat.launch(hang, number_of_processes=1, **on)
    assert "DOCKER_HOST" in str(caught.value)
    assert not records.exists(f"docker.{on['name']}")


@pytest.mark.nightly
def test_the_job_saves_its_model_on_a_volume(image, tmp_path):
    from trainings import summing

    on = kd.Docker(image=image, volumes={"/data": str(tmp_path)})
    model, *others = summing()
    job = kd.distribute(model, *others, epochs=5, number_of_processes=2, on=on, save_to="/data/new/model.pt")
    assert job.wait(180).state is StateName.SUCCEEDED, [str(line) for line in job.logs()]
    saved = tmp_path / "new" / "model.pt"
    assert saved.stat().st_uid == os.getuid()
    assert torch.equal(torch.load(saved, weights_only=True)["weight"], model.weight)
    assert torch.allclose(model.weight, torch.ones_like(model.weight), atol=0.1)
    job.delete()


def test_packages_of_this_machine_come_into_a_container_and_run_here_as_they_are(on_torch, tmp_path, monkeypatch):
    made_packages.of_a_notebook(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}/notebook/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/project:{made_packages.sys.path[0]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = flat.launch(package_work.uses_packages, number_of_processes=2, packages="here: fastkit", **on_torch)
    assert there.results(150) == [package_work.USED] * 2, list(there.logs())
    assert (
        kd.launch(package_work.uses_packages, number_of_processes=2, on="local").results(100) == [package_work.USED] * 2
    )
