"""`packages="here"` in pods that may write nowhere else, without a registry and without an index."""

import pathlib

import made_packages
import pytest
import typing_extensions
from on_cluster import make_claim, pods_in, run_kubectl
from package_work import USED, uses_packages, uses_them_after_a_pod_is_lost, versions_of_what_torch_has_imported
from waiting import until

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.places.following.head_client import HeadClient

pytestmark = pytest.mark.usefixtures("jobs_end")
SMALL_BYTES = 64 << 10


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made_packages.of_a_notebook(tmp_path, monkeypatch)


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each blob that is sent to a head."""
    sizes, send = [], HeadClient._upload_one

    def counted(self, digest, view, on_progress):
        sizes.append(len(view))
        return send(self, digest, view, on_progress)

    monkeypatch.setattr(HeadClient, "_upload_one", counted)
    return sizes


@pytest.fixture
def restricted(namespace):
    label = "pod-security.kubernetes.io/enforce"
    run_kubectl("label", "ns", namespace, f"{label}=restricted", "--overwrite")
    yield namespace
    run_kubectl("label", "ns", namespace, f"{label}-")


def test_packages_that_exist_nowhere_travel_once_and_edits_alone(restricted, folders, sent, capsys):
    on = pods_in(restricted, packages="here: fastkit", keep_warm="3 min")
    job = kd.launch(uses_packages, number_of_processes=2, on=on)
    assert job.results(150) == [USED, USED], [str(line) for line in job.logs()]
    assert "2 packages of the notebook, which the image lacks or has otherwise: fastkit 1.0, minekit 1.0" in str(
        job.logs()
    )
    assert 'packages="here": what the image lacks of 2 packages' in (said := capsys.readouterr().err)
    assert sum(sent) < SMALL_BYTES
    sent.clear()
    kd.launch(uses_packages, number_of_processes=2, on=on).results(60)
    assert 'packages="here": at most 0.0 MB will be sent (fastkit, minekit)' in capsys.readouterr().err, said
    assert sent == []
    wheel, project = folders
    large = "x = 0\n" * 20_000
    (project / "large.py").write_text(large)
    (wheel / "__init__.py").write_text("def times(n): return 5\ndef hello(): pass\n")
    third = kd.launch(uses_packages, number_of_processes=2, on=on)
    assert third.result(60) == {**USED, "compiled": 5, "script": "", "subprocess": "5\n", "spawned": [5, 5]}
    assert sum(sent) < len(large) + SMALL_BYTES


@pytest.mark.nightly
def test_a_store_has_them_for_the_next_job_and_a_new_pod_gets_them_too(namespace, folders, sent):
    make_claim(namespace, "packages")
    on = pods_in(namespace, packages="here: fastkit", store="pvc://packages")
    assert kd.launch(uses_packages, number_of_processes=1, on=on).result(150) == USED
    sent.clear()

    job = kd.launch(uses_them_after_a_pod_is_lost, number_of_processes=2, max_restarts=1, on=on)
    until(lambda: str(job.logs()).count("ready") == 2)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--force", "--grace-period=0")
    assert job.results(150) == [USED, USED], [str(line) for line in job.logs()]
    assert not [size for size in sent if size > SMALL_BYTES]


@pytest.mark.nightly
def test_what_torch_has_imported_is_imported_again_where_a_package_needs_another(namespace, tmp_path, monkeypatch):
    code = pathlib.Path(typing_extensions.__file__).read_text() + "\nMARK = 99\n"
    site = made_packages.install(
        tmp_path / "lib/site-packages", "typing_extensions", {"typing_extensions.py": code}, version="99.0"
    )
    made_packages.install(site, "picky", {"picky.py": ""}, requires=["typing-extensions>=99"])
    monkeypatch.syspath_prepend(str(site))

    job = kd.launch(
        versions_of_what_torch_has_imported, number_of_processes=2, on=pods_in(namespace, packages="here: picky")
    )
    assert job.results(150) == [(99, "99.0", 2.0)] * 2, [str(line) for line in job.logs()]


@pytest.mark.nightly
def test_a_library_that_the_image_lacks_is_named_before_any_rank_starts(namespace, tmp_path, monkeypatch):
    code = {"linked/__init__.py": "", f"linked/{made_packages.EXTENSION}": made_packages.compiled(tmp_path, "mine")}
    site = made_packages.install(tmp_path / "lib/site-packages", "linked", code, pure=False)
    monkeypatch.syspath_prepend(str(site))
    job = kd.launch(uses_packages, number_of_processes=2, on=pods_in(namespace, packages="here: linked"))
    with pytest.raises(JobFailedError, match=r"linked 1.0 \(.*\) needs libmine.so.1, which the image lacks"):
        job.result(150)
    assert [replica.state.value for replica in job.status.replicas] == ["pending", "pending"]
