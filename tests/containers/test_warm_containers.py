"""Warm containers on a real Docker engine: which calls use them, what is told of them, and how they end."""

import subprocess
import sys
import textwrap

import nbformat
import pytest
from container_work import hang, leaves_and_looks, succeed, waits_a_little

import kale_dist as kd
from kale_dist.errors import BackendError
from kale_dist.job import records
from kale_dist.job.spec.job_spec import WARM
from kale_dist.wire import FailureCause, StateName


@pytest.fixture
def on(plain_image):
    yield kd.Docker(image=plain_image, keep_warm="2 min")
    for record in records.all_records():
        if record.spec.kind == WARM:
            kd.attach(record.ref).delete()


def warm_sets():
    return [kd.attach(record.ref) for record in records.all_records() if record.spec.kind == WARM]


def names(engine):
    listed = engine.api.containers(filters={"label": "kale-dist.job"})
    return {name for item in listed for name in item["Names"] if f"-{WARM}-" in name}


def launch(function, on, *arguments, **options):
    return kd.launch(function, *arguments, number_of_processes=2, on=on, **options)


def launch_and_wait_for_ranks(function, on, *arguments, **options):
    job = launch(function, on, *arguments, **options)
    while job.status.state is not StateName.RUNNING:
        assert not job.status.is_final
    return job


def test_calls_that_fit_use_the_same_containers_and_the_note_says_why_another_does_not(engine, on, capsys):
    first = launch(leaves_and_looks, on)
    left = first.results()
    there = names(engine)
    [one] = warm_sets()
    assert f"kale-dist cancel {one.ref}" in capsys.readouterr().err
    second = launch(leaves_and_looks, on, timeout_s=60)
    seen = second.results()
    assert [one for one, _ in seen] == [[False] * 4] * 2
    assert {number for _, number in seen}.isdisjoint({number for _, number in left})
    assert (names(engine), len(there)) == (there, 2)
    first.delete()
    assert second.status.state is StateName.SUCCEEDED
    other = launch(succeed, kd.Docker(image=on.image, keep_warm="2 min", resources={"memory": "300Mi"}))
    other.result()
    assert f"{one.ref} does not fit: another resources" in capsys.readouterr().err
    assert len(warm_sets()) == 2
    assert {one.ref, second.ref} <= {job.ref for job in kd.jobs(on="docker")}


def test_a_job_is_cancelled_in_containers_that_stay_and_loses_its_run_with_them(engine, on):
    job = launch_and_wait_for_ranks(hang, on)
    job.cancel()
    assert job.wait(60).state is StateName.CANCELLED
    [one] = warm_sets()
    assert not one.status.is_final
    again = launch_and_wait_for_ranks(hang, on)
    head = next(name for name in names(engine) if name.endswith("-0"))
    engine.api.kill(head.lstrip("/"))
    ended = again.wait(120)
    assert (ended.state, ended.cause) == (StateName.FAILED, FailureCause.LOST)
    assert one.wait(120).state is StateName.FAILED
    launch(succeed, on).result()
    assert len(warm_sets()) == 2


def test_a_run_whose_head_is_lost_is_followed_by_one_in_other_containers(engine, on):
    job = launch_and_wait_for_ranks(waits_a_little, on, 4.0, max_restarts=1)
    engine.api.kill(next(name for name in names(engine) if name.endswith("-0")).lstrip("/"))
    assert job.wait(180).state is StateName.SUCCEEDED
    assert (job.status.attempt, len(warm_sets())) == (1, 2)


@pytest.mark.nightly
def test_warm_containers_outlive_the_commands_that_use_them(engine, on, plain_image, tmp_path):
    """A script makes them; `kale-dist launch` and `kale-dist run`, each a process of its own, use them at once."""
    place = f"kd.Docker(image={plain_image!r}, keep_warm='2 min')"
    script = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import kale_dist as kd
        from container_work import succeed
        if __name__ == "__main__":
            kd.launch(succeed, number_of_processes=2, on={place}).result()
    """
    cells = [
        nbformat.v4.new_code_cell(
            f"import kale_dist as kd\nkd.launch(len, [1], number_of_processes=2, on={place}).result()"
        )
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
    (tmp_path / "one.py").write_text("print('runs')")
    settings = ("--set", "image", plain_image, "--set", "keep_warm", "2 min")
    command = [sys.executable, "-m", "kale_dist.cli"]
    said = ""
    for words in (
        [sys.executable, "-c", textwrap.dedent(script)],
        [*command, "launch", "one.py", "-n", "2", "--on", "docker", *settings],
        [*command, "launch", "one.py", "-n", "2", "--on", "docker", *settings],
        [*command, "run", "one.ipynb", "-o", "ended.ipynb"],
    ):
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        said += ended.stdout + ended.stderr
    [one] = warm_sets()
    assert said.count(f"To end it before: kale-dist cancel {one.ref}") == 1
    assert "keeps running" not in said
    there = names(engine)
    launch(succeed, on).result()
    assert (len(there), names(engine)) == (2, there)


def test_another_key_than_that_of_the_set_is_refused_and_the_call_makes_other_containers(on):
    launch(succeed, on).result()
    [one] = warm_sets()
    records.files(f"docker.{one.name}").key.write_bytes(b"x" * 32)
    launch(succeed, on).result()
    assert len(warm_sets()) == 2
    with pytest.raises(BackendError):
        kd.attach("docker://warm-there-is-none")


def test_warm_containers_end_with_the_last_kernel_that_used_them(on, plain_image):
    manager = pytest.importorskip("jupyter_client.manager")
    code = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import kale_dist as kd
        from container_work import succeed
        kd.launch(succeed, number_of_processes=2, on=kd.Docker(image={plain_image!r}, keep_warm="2 min")).result()
    """
    kernels = [manager.start_new_kernel() for _ in range(2)]
    try:
        for _, client in kernels:
            answer = client.execute_interactive(textwrap.dedent(code), timeout=90, stdin_hook=lambda _: None)
            assert answer["content"]["status"] == "ok", answer
        [one] = warm_sets()
        kernels[0][0].shutdown_kernel()
        launch(succeed, on).result()
        assert not one.status.is_final
        kernels[1][0].shutdown_kernel()
        assert one.wait(30).state is StateName.SUCCEEDED
    finally:
        for kernel, client in kernels:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
