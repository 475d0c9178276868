"""For all tests: a state of their own, no process left behind, and a machine that lacks a package."""

import collections
import contextlib
import itertools
import operator
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import own_state
import pytest
from golden_words import Words
from on_cluster import IMAGE, PLAIN_IMAGE, lacking, need_the_python_of_the_image, run_kubectl

_RUN_NAME = "KALE_DIST_TEST_RUN"
"""Every process that a test starts inherits this variable, however it was started."""

_OURS = (b"kale_dist.worker", b"kale_dist.cli", b"ipykernel_launcher")
"""What the command line of a process says that must not outlive the tests."""

_ENDS_WITHIN_S = 15.0


def pytest_configure(config):
    # Not below pytest's own folder: a path of a unix socket has at most 107 bytes.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kd-", dir="/tmp"))
    own_state.move_into(folder)
    os.environ[_RUN_NAME] = uuid.uuid4().hex
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # A shell's background jobs start with SIGINT ignored, and so does all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    real = item.get_closest_marker("real")
    if real and os.environ.get("SIMCUDA_DEVICES"):
        pytest.skip(f"not on a simulated GPU: {real.args[0]}")


def _of_this_run():
    """Processes of kale_dist, and kernels, that tests of this run have started: pid to command line."""
    mark = f"{_RUN_NAME}={os.environ[_RUN_NAME]}".encode()
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if any(word in command for word in _OURS) and mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(request):
    """After the last test this process's own agent is let go; whatever is there a little later has no right to be."""
    yield
    local = sys.modules.get("kale_dist.places.local")
    if local is not None:
        local.shared().close()
    # A process that was started a moment ago has no command line yet.
    time.sleep(0.2)
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while (left := _of_this_run()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # A test that was interrupted could not put its processes away.
    if request.session.exitstatus != pytest.ExitCode.INTERRUPTED:
        assert not left, f"processes outlive the tests: {left}"


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.when != "teardown":
        item.stash[_FAILED] = report.failed
    return report


_COLLECTED = pytest.StashKey[set[str]]()


_WAITING = {"browser", "cluster", "containers", "kernel", "notebooks"}
"""Folders of tests that wait for pods, containers, kernels and pages more than they compute."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(session, items):
    # Before `-k` and `-m` leave some out.
    session.stash[_COLLECTED] = {item.nodeid for item in items}
    yield
    # A slice of the nightly is every so-manieth of its tests (.ci/nightly).
    part, _, parts = os.environ.get("KALE_DIST_TEST_PART", "0/1").partition("/")
    items[:] = items[int(part) :: int(parts)]
    # Files that wait and files that compute take turns, so that the lanes of `make test` run some of each at once.
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds = [[], []]
    for path, tests in files.items():
        kinds[path.parent.name in _WAITING].append(tests)
    turns = [(number / len(kind), tests) for kind in kinds for number, tests in enumerate(kind)]
    items[:] = [item for _, tests in sorted(turns, key=operator.itemgetter(0)) for item in tests]


@pytest.fixture(scope="module")
def _words_of_file(request):
    is_whole = not any("::" in path for path in request.config.args)
    ids = (nodeid.partition("::") for nodeid in request.session.stash[_COLLECTED])
    tests = {name for file, _, name in ids if file == request.node.nodeid}
    return Words(request.path.stem, tests if is_whole else None)


@pytest.fixture
def kept_words(request, _words_of_file):
    """`kept_words(text)` compares what users read with what is kept of this test in `golden/words`."""
    number = itertools.count()

    def compare(text):
        if "tmp_path" in request.fixturenames:
            text = text.replace(str(request.getfixturevalue("tmp_path")), "<tmp_path>")
        # Addresses, versions, and what the package `packaging` says of a requirement differ from run to run.
        for pattern, same in (
            (r"\b0x[0-9a-f]{6,}", "0x..."),
            (r"Python 3\.\d+", "Python 3.x"),
            (r"\(Expected .*?\)\.", "(...)."),
        ):
            text = re.sub(pattern, same, text)
        _words_of_file.check(request.node.name, next(number), text)

    return compare


@pytest.fixture
def refusal(kept_words):
    """`refusal(call)` gives the ConfigError with which a call is refused; its words are compared as by `kept_words`."""
    from kale_dist.errors import ConfigError

    def refused(call):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.problem
        assert caught.value.remedy
        kept_words(str(caught.value))
        return caught.value

    return refused


def _job_folders():
    jobs = pathlib.Path(os.environ["XDG_STATE_HOME"], "kale-dist", "jobs")
    return {folder.name for folder in jobs.glob("[!.]*")}


@pytest.fixture
def jobs():
    """A list of jobs that end with the test."""
    made = []
    yield made
    for job in made:
        job.delete()


@pytest.fixture(autouse=True)
def a_failed_test_gives_its_names_back(request):
    """A test that fails is run once more, and must not stumble over the jobs of its first run."""
    before = _job_folders()
    yield
    if request.node.stash.get(_FAILED, False):
        import kale_dist
        from kale_dist.job import records

        for name in _job_folders() - before:
            with contextlib.suppress(kale_dist.KaleDistError):
                job = kale_dist.attach(records.read(name).ref)
                job.cancel()
                job.delete()
            records.delete(name)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    """The seconds of each folder, and last of all why a test was run once more."""
    spent = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent["/".join(report.nodeid.split("/")[:2])] += report.duration
    if terminalreporter.config.option.durations is not None:
        terminalreporter.section("seconds of each folder, over all lanes")
        for folder, seconds in spent.most_common():
            terminalreporter.line(f"{seconds:7.0f} {folder}")
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"RERUN {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)
    for report in terminalreporter.getreports("rerun"):
        crash = getattr(report.longrepr, "reprcrash", None)
        error = (crash.message if crash else report.longreprtext).partition("\n")[0]
        terminalreporter.line(f"Run once more: {report.nodeid}: {error}")


@pytest.fixture(scope="session")
def kubeconfig():
    """The path of the administrator's kubeconfig; skips where no cluster answers."""
    need_the_python_of_the_image()
    path = os.environ.get("KUBECONFIG", "")
    asked = ["kubectl", "get", "--raw", "/readyz", "--request-timeout=5s"]
    if not pathlib.Path(path).is_file() or subprocess.run(asked, capture_output=True, check=False).returncode:
        lacking("no cluster answers")
    return path


@pytest.fixture(scope="session")
def make_namespace(kubeconfig):
    """A function that makes namespaces, which are deleted in the end."""
    made = []

    def make(**labels):
        name = f"test-{uuid.uuid4().hex[:8]}"
        made.append(name)
        run_kubectl("create", "namespace", name)
        if labels:
            pairs = [f"pod-security.kubernetes.io/{key}={value}" for key, value in labels.items()]
            run_kubectl("label", "namespace", name, *pairs)
        run_kubectl("-n", name, "wait", "--for=create", "serviceaccount/default", "--timeout=20s")
        return name

    yield make
    if made:
        run_kubectl("delete", "namespace", *made, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def engine():
    """A connection to the engine; skips where none answers."""
    module = pytest.importorskip("kale_dist.image.engine")
    from kale_dist.errors import BackendError

    try:
        found = module.connect()
    except BackendError as error:
        lacking(f"no Docker engine answers ({error})")
    yield found
    found.close()


@pytest.fixture(scope="session")
def image(engine):
    """An image with this Python's minor version and torch, which the engine has."""
    need_the_python_of_the_image()
    from kale_dist.errors import BackendError
    from kale_dist.image.engine import ensure_image

    try:
        ensure_image(engine, IMAGE, log=print)
    except BackendError as error:
        lacking(f"the engine cannot have {IMAGE} ({error})")
    return IMAGE


@pytest.fixture(scope="session")
def plain_image(engine, image):
    """Python without PyTorch, which costs each container some seconds of its start; where the engine lacks it, the one with."""
    from docker.errors import ImageNotFound

    try:
        engine.api.inspect_image("python:3.11-slim-bookworm")
    except ImageNotFound:
        return image
    return "python:3.11-slim-bookworm"


@pytest.fixture(scope="session")
def plain_pod_image(kubeconfig):
    """An image that has Python and no PyTorch, put into the cluster's registry; without an engine the one with PyTorch."""
    docker = pytest.importorskip("docker")
    try:
        engine = docker.from_env()
        engine.images.get("python:3.11-slim-bookworm").tag(PLAIN_IMAGE)
        for told in engine.images.push(PLAIN_IMAGE, stream=True, decode=True):
            assert "error" not in told, told
        engine.close()
    except docker.errors.DockerException:
        return IMAGE
    return PLAIN_IMAGE


class _Absent:
    """Finds a package before anybody else does, and says that it is not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, _path=None, _target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without(monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Absent(package), *sys.meta_path])


@pytest.fixture
def no_kubernetes(monkeypatch):
    """A machine without the kubernetes package."""
    _without(monkeypatch, "kubernetes")


@pytest.fixture
def no_docker(monkeypatch):
    """A machine without the docker package."""
    _without(monkeypatch, "docker")


@pytest.fixture
def no_ipywidgets(monkeypatch):
    """A machine without ipywidgets."""
    _without(monkeypatch, "ipywidgets")


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """A Python with cloudpickle, fsspec and this library alone."""
    from pod_jobs import make_bare_python

    return make_bare_python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def make_bare(tmp_path, bare_python):
    """Makes jobs in pods without PyTorch, which are plain processes and start at once; their functions are those of `plain_jobs`."""
    from pod_jobs import making_pod_jobs

    yield from making_pod_jobs(tmp_path, bare_python)
