"""A notebook on a machine without Linux's own calls uses a cluster and an engine: submit, follow, attach, widget, images."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly
TESTS = pathlib.Path(__file__).parents[1]


def run(script):
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(TESTS)!r}]\nimport without_linux\n{script}"],
        capture_output=True, text=True, timeout=300, check=False, env=os.environ,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


SUBMIT = """
import kale_dist as kd
def work(number):
    print("hello from", kd.context().rank)
    import torch
    return number + torch.ones(200_000).sum().item()
on = kd.{place}({settings})
job = kd.launch(work, 2, number_of_processes=2, on=on)
print(job.ref)
"""

ATTACH = """
import kale_dist as kd
from kale_dist.notebook.widget import JobWidget
job = kd.attach({ref!r}, trust=True)
widget = JobWidget(job)
widget.start()
print(job.result(200), len([line for line in job.logs() if "hello" in line.text]), "succeeded" in widget.head)
job.delete()
"""


def test_a_cluster_is_used_from_there(namespace, image):
    settings = f"namespace={namespace!r}, image={image!r}, resources={{'cpu': 0.1, 'memory': '1Gi'}}"
    ref = run(SUBMIT.format(place="Kubernetes", settings=settings))
    assert run(ATTACH.format(ref=ref)) == "200002.0 2 True"


@pytest.mark.parametrize("settings", ["", ", packages=['einops==0.8.0']"], ids=["an image", "a made image"])
def test_an_engine_is_used_from_there(engine, image, settings):
    ref = run(SUBMIT.format(place="Docker", settings=f"image={image!r}{settings}"))
    assert run(ATTACH.format(ref=ref)) == "200002.0 2 True"
