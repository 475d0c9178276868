"""What becomes of jobs when the kernel is killed, and how another process finds them."""

import pathlib
import pickle
import subprocess
import sys

import pytest
from liveness import alive

import kale_dist as kd
from kale_dist.errors import ResultUnavailableError
from kale_dist.job import records

PIDS = "print(*[replica.pid for replica in job.status.replicas])"

SLOW = (
    "import kale_dist as kd, os, time\n"
    "def slow(seconds):\n"
    "    print('first', kd.context().rank, flush=True)\n"
    "    time.sleep(seconds)\n"
    "    print('last', kd.context().rank)\n"
    "    return Answer(kd.context().rank)\n"
    "class Answer:\n"
    "    def __init__(self, rank): self.rank = rank\n"
)


def start(kernel, seconds, **options):
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    kernel.good(SLOW + f"job = kd.launch(slow, {seconds}, number_of_processes=2, {given})")
    kernel.good(
        "next(job.logs(follow=True))\nwhile job.status.state.value not in ('running', 'succeeded'): time.sleep(0.02)"
    )
    return [int(pid) for pid in kernel.good(PIDS).split()]


def test_a_detached_job_survives_and_is_found_from_another_process(new_kernel, wait_until):
    kernel = new_kernel()
    pids = start(kernel, 3, name="detached", detach=True)
    kernel.kill()
    wait_until(lambda: not alive(kernel.pid), 60)
    assert all(map(alive, pids))
    job = kd.attach("local://detached")
    texts = [(line.rank, line.text) for line in job.logs(follow=True) if line.rank is not None]
    assert sorted(texts) == [(0, "first 0"), (0, "last 0"), (1, "first 1"), (1, "last 1")]
    assert job.wait(100).state.value == "succeeded"
    assert [answer.rank for answer in job.results()] == [0, 1]
    assert [found.ref for found in kd.jobs() if found.name == "detached"] == ["local://detached"]
    code = "import kale_dist as kd; print(*[line.text for line in kd.attach('detached').logs(ranks=0)], sep='|')"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert elsewhere.stdout == "first 0|last 0\n"
    job.delete()
    wait_until(lambda: not any(map(alive, pids)), 60)


def test_without_the_key_there_is_a_log_and_no_result(kernel):
    start(kernel, 0, name="keyless")
    kernel.good("job.wait()")
    records.files("keyless").key.unlink()
    job = kd.attach("keyless")
    assert job.status.state.value == "succeeded"
    assert any(line.text == "first 0" for line in job.logs())
    with pytest.raises(ResultUnavailableError, match="local://keyless cannot be verified"):
        job.result()
    job.delete()


def test_a_forged_result_is_never_unpickled(kernel, tmp_path):
    start(kernel, 0, name="forged")
    kernel.good("job.wait()")
    path = records.files("forged").outcome(0, 0)
    data = path.read_bytes()

    class Evil:
        def __reduce__(self):
            return pathlib.Path(tmp_path / "ran").touch, ()

    path.chmod(0o600)
    path.write_bytes(data[: len(data) // 2] + pickle.dumps(Evil()) + data[len(data) // 2 :])
    with pytest.raises(Exception, match="forged"):
        kd.attach("forged").result()
    assert not (tmp_path / "ran").exists()
    kd.attach("forged").delete()
