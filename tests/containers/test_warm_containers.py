"""Warm containers on a real Docker engine: which calls use them, what is told of them, and how they end."""

import subprocess
import sys
import textwrap

import nbformat
import pytest
from container_work import leaves_and_looks, succeed

import kale_dist as kd
from kale_dist.job import records
from kale_dist.job.spec.job_spec import WARM
from kale_dist.wire import StateName


@pytest.fixture
def on(plain_image):
    yield kd.Docker(image=plain_image, keep_warm="2 min")
    for record in records.all_records():
        if record.spec.kind == WARM:
            kd.attach(record.ref).delete()


def warm_sets():
    return [kd.attach(record.ref) for record in records.all_records() if record.spec.kind == WARM]


def containers_of_sets(engine):
    return {
        item["Id"]
        for one in warm_sets()
        for item in engine.api.containers(filters={"label": f"kale-dist.job={one.name}"})
    }


def launch(function, on, *arguments, **options):
    return kd.launch(function, *arguments, number_of_processes=2, on=on, **options)


def test_the_next_call_has_the_same_container_and_sees_nothing_of_the_one_before(engine, on, capsys):
    first = kd.launch(leaves_and_looks, number_of_processes=1, on=on)
    _, left = first.result()
    there = containers_of_sets(engine)
    [one] = warm_sets()
    assert f"{one.ref} holds 1 container until" in capsys.readouterr().err
    second = kd.launch(leaves_and_looks, number_of_processes=1, timeout_s=60, on=on)
    seen, number = second.result()
    assert (seen, number == left) == ([False] * 4, False)
    assert (containers_of_sets(engine), len(there)) == (there, 1)
    first.delete()
    assert second.status.state is StateName.SUCCEEDED
    assert {one.ref, second.ref} <= {job.ref for job in kd.jobs(on="docker")}


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
    there = containers_of_sets(engine)
    launch(succeed, on).result()
    assert (len(there), containers_of_sets(engine)) == (1, there)


@pytest.mark.nightly
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
