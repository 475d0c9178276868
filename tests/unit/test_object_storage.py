"""The S3 API of a real server: a store, shards divided among ranks, and a model that is saved there."""

import io
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import kale_dist as kd
from kale_dist.errors import StoreError
from kale_dist.wire.url_store import UrlStore

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("own_state"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server():
    """Where it listens."""
    words = ["-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, "the server has ended"
        found = re.search(r"http://127.0.0.1:\d+", line)
    reader = threading.Thread(target=process.stderr.read)
    reader.start()
    yield found[0]
    process.terminate()
    process.wait()
    reader.join()
    process.stderr.close()


@pytest.fixture
def bucket(server, monkeypatch):
    """An empty bucket, which this process and its ranks reach as any program reaches S3."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server), ("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    if fs.exists("team"):
        fs.rm("team", recursive=True)
    fs.mkdir("team")
    return fs


class Shards(IterableDataset):
    """As docs/data.md has it."""

    def __init__(self, url):
        self.url = url

    def __iter__(self):
        import fsspec

        place, worker = kd.context(), torch.utils.data.get_worker_info()
        workers = worker.num_workers if worker else 1
        number = place.rank * workers + (worker.id if worker else 0)
        fs, path = fsspec.core.url_to_fs(self.url)
        for name in sorted(fs.glob(path))[number :: place.world_size * workers]:
            print("read", name, flush=True)
            with fs.open(name, "rb") as file:
                yield from torch.load(io.BytesIO(file.read()), weights_only=True)


def test_a_store_keeps_blobs_and_files(bucket, tmp_path):
    store = UrlStore("s3://team/jobs/mine")
    assert store.list() == ()
    data = torch.arange(5_000_000, dtype=torch.float32).numpy()
    digest = store.put([data])
    assert store.exists(digest)
    assert store.list() == [digest]
    assert bytes(store.open(digest)) == data.tobytes()
    (tmp_path / "checkpoint").write_bytes(b"one")
    store.put_file("jobs/x/checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint").write_bytes(b"two")
    store.put_file("jobs/x/checkpoint", tmp_path / "checkpoint")
    UrlStore("s3://team/jobs/mine").get_file("jobs/x/checkpoint", tmp_path / "read")
    assert (tmp_path / "read").read_bytes() == b"two"
    with pytest.raises(StoreError, match="s3://team/jobs/mine"):
        store.get_file("jobs/x/missing", tmp_path / "read")
    with pytest.raises(StoreError, match=r"it is not there|does not exist"):
        UrlStore("s3://nobody/jobs").put([data])


@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_read_their_own_shards_and_the_model_is_saved_beside_them(bucket, workers):
    for shard in range(4):
        x = torch.randn(16, 3)
        with bucket.open(f"team/train/{shard}.pt", "wb") as file:
            torch.save(list(zip(x, x.sum(1, keepdim=True), strict=True)), file)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(Shards("s3://team/train/*.pt"), batch_size=8, num_workers=workers)
    job = kd.distribute(
        model, loader, torch.nn.MSELoss(), optimizer, epochs=10, shard=False, number_of_processes=2, on="local",
        save_to="s3://team/trained/model.pt",
    )  # fmt: skip
    assert job.wait(400).state == "succeeded", job.status.reason
    read = {str(line) for line in job.logs() if line.text.startswith("read ")}
    assert read == {f"[{rank}] read team/train/{shard}.pt" for rank, shard in ((0, 0), (0, 2), (1, 1), (1, 3))}
    assert torch.allclose(model.weight, torch.ones(1, 3), atol=0.1)
    with bucket.open("team/trained/model.pt", "rb") as file:
        saved = torch.load(io.BytesIO(file.read()), weights_only=True)
    assert torch.equal(saved["weight"], model.weight)


def test_a_bucket_that_is_not_there_fails_the_job_before_the_first_epoch(bucket):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1)))
    job = kd.distribute(
        model, loader, torch.nn.MSELoss(), optimizer, number_of_processes=1, on="local", save_to="s3://nobody/model.pt"
    )
    status = job.wait(400)
    assert status.state == "failed"
    assert "s3://nobody" in status.reason
    assert not status.metrics
