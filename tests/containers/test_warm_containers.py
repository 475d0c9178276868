"""Warm containers on a real Docker engine: what the next call has of them, and how long they stay."""

import sys
import textwrap

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
        kd.launch(succeed, number_of_processes=2, on=on).result()
        assert not one.status.is_final
        kernels[1][0].shutdown_kernel()
        assert one.wait(30).state is StateName.SUCCEEDED
    finally:
        for kernel, client in kernels:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
