"""Watches against an API server that does what the real one cannot be made to do: cuts, expired versions, refusals."""

import contextlib
import http.server
import json
import queue
import threading
import time
import types
import urllib.parse

import pytest
from waiting import until

pytest.importorskip("kubernetes")

from kubernetes import client

from kale_dist.places.kubernetes import resource_watch
from kale_dist.places.kubernetes import watch as watching
from kale_dist.places.manifests import KINDS

KIND = KINDS["pytorch"]
JOBS, PODS, EVENTS, QUOTAS = "pytorchjobs", "pods", "events", "resourcequotas"
WITHIN_S = 20.0
CUT, END = object(), object()


def made(name, uid=None, **more):
    return {
        "metadata": {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": "7", **more.pop("metadata", {})},
        **more,
    }


def pod(job, index=0, uid="p", phase="Pending", scheduling=None):
    labels = {"kale-dist.dev/object": job, "training.kubeflow.org/replica-index": str(index)}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduling}
    return made(
        f"{job}-worker-{index}",
        uid,
        metadata={"labels": labels},
        spec={"containers": [{"name": "pytorch"}]},
        status={"phase": phase, "conditions": [condition] if scheduling else []},
    )


class Server:
    """Lists what there is; a watch sends what a test puts into its queue."""

    def __init__(self):
        self.items = {kind: [] for kind in (JOBS, PODS, EVENTS, QUOTAS)}
        self.streams = {kind: queue.Queue() for kind in self.items}
        self.patched = []
        self.refusals = {}
        """(kind, whether it is a watch) to a list of (code, headers), of which each is used once; None stands for none."""
        self.always = {}
        """The same, for every request."""
        self.asked = []
        self.is_over = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path, _, query = self.path.partition("?")
                kind = path.rpartition("/")[2]
                options = dict(urllib.parse.parse_qsl(query))
                is_watch = options.get("watch") in ("true", "True")
                server.asked.append((time.monotonic(), kind, is_watch, options))
                waiting = server.refusals.get((kind, is_watch))
                refusal = waiting.pop(0) if waiting else server.always.get((kind, is_watch))
                if refusal is not None:
                    self.answer(refusal[0], {"code": refusal[0], "message": "no"}, refusal[1])
                elif is_watch:
                    self.stream(server.streams[kind])
                elif kind in server.items:
                    first = int(options.get("continue") or 0)
                    size = int(options.get("limit") or 500)
                    items = server.items[kind][first : first + size]
                    rest = str(first + size) if first + size < len(server.items[kind]) else ""
                    self.answer(200, {"items": items, "metadata": {"resourceVersion": "5", "continue": rest}})
                else:
                    self.answer(404, {"code": 404, "message": "not found"})

            def do_PATCH(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.patched.append((self.path, json.loads(body)))
                self.answer(200, {})

            def answer(self, code, body, headers=None):
                data = json.dumps(body).encode()
                self.send_response(code)
                for name, value in {"Content-Length": len(data), **(headers or {})}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, changes):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(OSError):
                    while not server.is_over.is_set():
                        try:
                            change = changes.get(timeout=0.05)
                        except queue.Empty:
                            # Who hangs up is noticed by this alone.
                            self.chunk(b"\n")
                            continue
                        if change is CUT:
                            self.chunk(b'{"type": "MODIF')
                            self.close_connection = True
                            return
                        if change is END:
                            self.wfile.write(b"0\r\n\r\n")
                            return
                        line = json.dumps(change).encode() + b"\n"
                        # In two pieces, as networks do it.
                        self.chunk(line[:7])
                        self.chunk(line[7:])

            def chunk(self, data):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True

    def send(self, kind, change, item):
        self.streams[kind].put({"type": change, "object": item})

    def count(self, kind, *, is_watch):
        return sum(1 for _, what, watch, _ in self.asked if (what, watch) == (kind, is_watch))


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.is_over.set()
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def watch(server):
    configuration = client.Configuration(host=f"http://127.0.0.1:{server.http.server_port}")
    configuration.retries = False
    configuration.connection_pool_maxsize = 16
    api = client.ApiClient(configuration)
    cluster = types.SimpleNamespace(
        core=client.CoreV1Api(api),
        custom=client.CustomObjectsApi(api),
        namespace="team",
        server=configuration.host,
        identity="ada",
    )
    followed = Followed(watching.NamespaceWatch(cluster, KIND))
    yield followed
    followed.close()
    api.close()


def _ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kale_dist ")]


class Followed:
    """A watch, and a way to wait until its view of a job is as it should be."""

    def __init__(self, watch):
        self.before = _ours()
        self.watch = watch
        self.changed = threading.Condition()
        self.calls = []
        self.ends = []

    def follow(self, name="x"):
        end = self.watch.subscribe(name, lambda: self._wake(name))
        self.ends.append(end)
        return end

    def _wake(self, name):
        with self.changed:
            self.calls.append(name)
            self.changed.notify_all()

    def until(self, condition, name="x"):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.watch.view(name)), WITHIN_S), self.watch.view(name)
        return self.watch.view(name)

    def close(self):
        for end in self.ends:
            end()
            end()
        deadline = time.monotonic() + WITHIN_S
        while left := [thread for thread in _ours() if thread not in self.before]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


def test_a_job_is_listed_once_and_then_watched(server, watch):
    server.items[JOBS] = [made("x"), made("y")]
    watch.follow()
    view = watch.until(lambda view: view.job is not None)
    assert view.job["metadata"]["name"] == "x"
    server.send(PODS, "ADDED", pod("x"))
    server.send(PODS, "MODIFIED", pod("x", phase="Running"))
    view = watch.until(lambda view: view.pods and view.pods[0].phase == "Running")
    assert (view.problem, view.lacks_events, view.pods[0].number) == ("", False, 0)
    server.send(PODS, "DELETED", pod("x", phase="Running"))
    assert watch.until(lambda view: view.pods[0].is_gone).pods[0].phase == "Running"
    server.send(JOBS, "DELETED", made("x"))
    watch.until(lambda view: view.is_deleted)
    assert set(watch.calls) == {"x"}
    assert [server.count(kind, is_watch=False) for kind in (JOBS, PODS, EVENTS)] == [1, 1, 1]
    options = next(options for _, kind, is_watch, options in server.asked if kind == PODS and is_watch)
    assert options["resourceVersion"] == "5"
    assert options["labelSelector"] == "app.kubernetes.io/managed-by=kale-dist"
    assert options["allowWatchBookmarks"].lower() == "true"


def test_all_jobs_of_a_namespace_share_three_connections_and_leave_none(server, watch):
    server.items[JOBS] = [made(name) for name in "abcdefghij"]
    ends = [watch.follow(name) for name in "abcdefghij"]
    for name in "abcdefghij":
        watch.until(lambda view: view.job is not None, name)
    assert sum(server.count(kind, is_watch=True) for kind in (JOBS, PODS, EVENTS)) <= 3
    for end in ends[:-1]:
        end()
    server.send(PODS, "ADDED", pod("j"))
    watch.until(lambda view: view.pods, "j")


def test_a_long_list_comes_in_pages(server, watch, monkeypatch):
    monkeypatch.setattr(resource_watch, "_PAGE", 100)
    server.items[JOBS] = [made("x")]
    server.items[PODS] = [pod("x", index, f"p{index}") for index in range(250)]
    watch.follow()
    watch.until(lambda view: len(view.pods) == 250)
    assert server.count(PODS, is_watch=False) == 3


def test_after_a_cut_in_the_middle_of_a_line_it_goes_on_from_the_last_version(server, watch):
    server.items[JOBS] = [made("x")]
    watch.follow()
    server.send(PODS, "ADDED", pod("x"))
    watch.until(lambda view: view.pods)
    server.streams[PODS].put(CUT)
    server.send(PODS, "MODIFIED", pod("x", phase="Running"))
    watch.until(lambda view: view.pods[0].phase == "Running")
    assert server.count(PODS, is_watch=False) == 1
    watches = [options["resourceVersion"] for _, kind, is_watch, options in server.asked if kind == PODS and is_watch]
    assert watches == ["5", "7"]


def test_a_bookmark_moves_the_version(server, watch):
    server.items[JOBS] = [made("x")]
    watch.follow()
    view = watch.until(lambda view: view.job is not None)
    assert view.job["metadata"]["name"] == "x"
    server.send(PODS, "BOOKMARK", {"metadata": {"resourceVersion": "99"}})
    server.streams[PODS].put(END)
    server.send(PODS, "ADDED", pod("x"))
    watch.until(lambda view: view.pods)
    watches = [options["resourceVersion"] for _, kind, is_watch, options in server.asked if kind == PODS and is_watch]
    assert watches == ["5", "99"]


@pytest.mark.parametrize("in_stream", [True, False])
def test_when_a_version_has_expired_all_is_listed_again(server, watch, in_stream):
    server.items[JOBS] = [made("x")]
    server.items[PODS] = [pod("x", 0, "a"), pod("x", 1, "b")]
    watch.follow()
    watch.until(lambda view: len(view.pods) == 2)
    server.items[PODS] = [pod("x", 1, "b", phase="Running")]
    if in_stream:
        server.streams[PODS].put({"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})
    else:
        server.refusals[PODS, True] = [(410, {})]
        server.streams[PODS].put(END)
    view = watch.until(lambda view: any(pod.is_gone for pod in view.pods))
    assert {pod.uid: (pod.is_gone, pod.phase) for pod in view.pods} == {"a": (True, "Pending"), "b": (False, "Running")}


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(server, watch):
    server.items[JOBS] = [made("x")]
    server.refusals[JOBS, False] = [(429, {"Retry-After": "1"}), (503, {})]
    watch.follow()
    view = watch.until(lambda view: view.job is not None)
    assert view.job["metadata"]["name"] == "x"
    times = [moment for moment, kind, is_watch, _ in server.asked if kind == JOBS and not is_watch]
    assert len(times) == 3
    assert times[1] - times[0] >= 1.0


def test_a_server_that_does_not_answer_is_told_and_asked_again(server, watch):
    server.items[JOBS] = [made("x")]
    server.refusals[PODS, False] = [(500, {}), (500, {})]
    watch.follow()
    view = watch.until(lambda view: view.problem)
    assert "answers with 500" in view.problem
    watch.until(lambda view: not view.problem and view.job is not None)


def test_a_watch_that_is_refused_for_a_while_is_well_again_without_a_new_list(server, watch):
    server.items[JOBS] = [made("x")]
    watch.follow()
    view = watch.until(lambda view: view.job is not None)
    assert view.job["metadata"]["name"] == "x"
    server.refusals[PODS, True] = [(500, {}), (500, {}), (500, {})]
    server.streams[PODS].put(CUT)
    watch.until(lambda view: view.problem)
    watch.until(lambda view: not view.problem)
    assert server.count(PODS, is_watch=False) == 1


@pytest.mark.parametrize(
    ("kind", "code", "part"),
    [
        (JOBS, 404, "Kubeflow's Training Operator is not installed"),
        (JOBS, 403, "may not list and watch pytorchjobs in the namespace team"),
        (PODS, 403, "grant get, list and watch of pods"),
        (JOBS, 401, "Log in to the cluster again"),
    ],
)
def test_a_refusal_is_told_at_once(server, watch, kind, code, part):
    server.always[kind, False] = (code, {})
    watch.follow()
    assert part in watch.until(lambda view: view.problem).problem


def test_without_events_the_rest_is_seen(server, watch):
    server.items[JOBS] = [made("x")]
    server.always[EVENTS, False] = (403, {})
    watch.follow()
    assert not watch.until(lambda view: view.lacks_events and view.job is not None).problem


def test_pods_that_may_be_listed_and_not_watched_are_told(server, watch):
    server.always[PODS, True] = (403, {})
    watch.follow()
    assert "may not list and watch pods" in watch.until(lambda view: view.problem).problem


def test_a_job_under_a_quota_is_touched_when_room_becomes_free(server, watch):
    """The operator's own retries back off: 32 s after the quota was free, against 0.3 s."""
    about = {"kind": "PyTorchJob", "name": "x", "uid": "uid-x"}
    refused = {**made("e"), "involvedObject": about, "reason": "FailedCreatePod", "type": "Warning",
               "message": "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2"}  # fmt: skip
    server.items[JOBS] = [made("x"), made("y")]
    server.items[EVENTS] = [refused]
    server.items[QUOTAS] = [made("q", status={"used": {"pods": "2"}})]
    watch.follow()
    watch.follow("y")
    watch.until(lambda view: view.events)
    server.send(QUOTAS, "MODIFIED", made("q", status={"used": {"pods": "2", "cpu": "1"}}))
    server.send(QUOTAS, "MODIFIED", made("q", status={"used": {"pods": "1", "cpu": "1"}}))
    until(lambda: server.patched, WITHIN_S)
    (path, change), *others = server.patched
    assert path.endswith("/pytorchjobs/x")
    assert list(change["metadata"]["annotations"]) == ["kale-dist.dev/touched"]
    assert not others


def test_a_job_that_is_not_there_is_looked_for_by_its_name(server, watch):
    server.items[JOBS] = [made("y")]
    watch.follow("y")
    watch.until(lambda view: view.job is not None, "y")
    watch.follow("x")
    assert watch.until(lambda view: view.is_deleted).job is None
    server.send(JOBS, "ADDED", made("x"))
    watch.until(lambda view: view.job is not None and not view.is_deleted)


def test_pods_of_an_earlier_job_of_the_same_name_are_not_its_own(server, watch):
    old, new = pod("x", uid="old"), pod("x", uid="new")
    for item, minute in ((old, 1), (new, 3)):
        item["metadata"]["creationTimestamp"] = f"2026-01-31T08:{minute:02}:00Z"
    server.items[JOBS] = [made("x", metadata={"creationTimestamp": "2026-01-31T08:02:00Z"})]
    server.items[PODS] = [old, new]
    watch.follow()
    assert [pod.uid for pod in watch.until(lambda view: view.job is not None and view.pods).pods] == ["new"]


def test_events_of_the_job_its_pods_and_claims_are_kept_and_no_others(server, watch):
    def event(number, kind, name):
        about = {"kind": kind, "name": name, "uid": f"uid-{name}"}
        return {**made(f"e{number}"), "involvedObject": about, "reason": "R", "type": "Warning", "message": f"{number}"}

    with_claim = pod("x")
    with_claim["spec"]["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    server.items[JOBS] = [made("x")]
    server.items[PODS] = [with_claim]
    names = [
        ("PyTorchJob", "x"), ("Pod", "x-worker-0"), ("PersistentVolumeClaim", "data"), ("Workload", "pytorchjob-x-1a2b3"),
        ("Pod", "web-1"), ("PersistentVolumeClaim", "other"), ("PyTorchJob", "y"), ("Node", "x"), ("Pod", "x-worker-9"),
    ]  # fmt: skip
    server.items[EVENTS] = [event(number, kind, name) for number, (kind, name) in enumerate(names)]
    watch.follow()
    view = watch.until(lambda view: len(view.events) >= 4)
    assert sorted(event.message for event in view.events) == ["0", "1", "2", "3"]


def test_one_watch_serves_a_process(server):
    def cluster(namespace="team", identity="ada"):
        return types.SimpleNamespace(server="https://c", identity=identity, namespace=namespace, core=None, custom=None)

    first = watching.shared(cluster(), KIND)
    assert watching.shared(cluster(), KIND) is first
    assert watching.shared(cluster(namespace="other"), KIND) is not first
    assert watching.shared(cluster(identity="bob"), KIND) is not first
    assert watching.shared(cluster(), KINDS["job"]) is not first


def test_it_can_be_followed_again_after_all_have_left(server, watch):
    server.items[JOBS] = [made("x")]
    watch.follow()()
    watch.follow()
    view = watch.until(lambda view: view.job is not None)
    assert view.job["metadata"]["name"] == "x"
