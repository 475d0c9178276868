"""`kale-dist doctor`: checks the requirements of jobs before one fails.

It changes nothing, and initialises CUDA in a process of its own that ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from kale_dist.calls.request import usable_cores
from kale_dist.cli.arguments import Commands, add_parser, add_place
from kale_dist.errors import ConfigError, StoreError
from kale_dist.job import records
from kale_dist.job.view import facts
from kale_dist.places import machine_gpus
from kale_dist.places.checkup import CheckResult, Grade, failed, ok, warning
from kale_dist.snapshot import loading
from kale_dist.wording import install

_GIB = 1 << 30
_TORCH_TIMEOUT_S = 120.0
_SLOW_IMPORT_S = 10.0
_OLDEST_PYTHON = (3, 11)
_LOW_SHARED_MEMORY = 1 * _GIB
"""DataLoader workers pass batches through shared memory, of which containers often have only 64 MiB."""
_LOW_DISK = 5 * _GIB

_ASK_TORCH = """
import json, time
before = time.perf_counter()
import torch
found = {"seconds": time.perf_counter() - before, "version": str(torch.__version__), "cuda": torch.version.cuda}
import torch.distributed
found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
try:
    found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
except Exception:
    found["gpus"] = []
print("\\n" + json.dumps(found))
"""


_NO_GPUS = ok("GPUs", "None that torch can use; cuda=True will be refused")


def add_command(commands: Commands) -> None:
    """Add `doctor`."""
    made = add_parser(commands, "doctor", "check what jobs need", _doctor)
    made.add_argument("--json", action="store_true", help="as JSON")
    add_place(made, "where jobs are to run (local)", "of the cluster (the configured one)", "local")
    made.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig (its current one)")


def _doctor(options: argparse.Namespace) -> int:
    if options.on != "kubernetes" and (options.namespace or options.context):
        raise ConfigError("--namespace", "only a cluster has namespaces and contexts", "Add --on kubernetes")
    found = examine(options.on, namespace=options.namespace or "", context=options.context)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{check.verdict:<7}  {check.name:<{width}}  {check.sentence}")
            if check.remedy:
                first, *more = check.remedy.splitlines()
                print(f"{'':7}  {'':{width}}  -> {first}")
                # A Role can be copied from here.
                print("".join(f"{line}\n" for line in more), end="")
    return 1 if any(check.verdict is Grade.FAILED for check in found) else 0


def examine(on: str = "local", *, namespace: str = "", context: str = "") -> tuple[CheckResult, ...]:
    """Check what jobs need in a place. Creates nothing there, and does not raise if a check fails.

    Args:
        on: `local`, `docker` or `kubernetes`. A check of `local` takes as long as an import of torch.
        namespace: The cluster's namespace; empty for the configured one, the kubeconfig context's, or the pod's own.
        context: The kubeconfig's context; empty for its current one.
    """
    if on == "local":
        return (_python(on), *_torch(), _cores(), _shared_memory(), _state_folder(), _notebook(), _docker(), _cluster())
    here = (_python(on), _state_folder())
    try:
        if on == "docker":
            from kale_dist.places.docker import engines as engine

            found = engine.examine()
        else:
            from kale_dist.places.kubernetes import doctor as cluster

            found = cluster.examine(namespace, context)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "kale_dist":
            raise
        sentence = f"{package!r} is not installed in this Python"
        return (*here, failed("package", sentence, install(on)))
    return (*here, *found)


def _python(on: str) -> CheckResult:
    version = sys.version_info
    sentence = f"Python {version.major}.{version.minor}.{version.micro} ({sys.executable})"
    if version < _OLDEST_PYTHON:
        return failed("Python", sentence, "Python 3.11 or later is needed")
    if sys.platform != "linux" and on == "local":
        remedy = "Jobs on this machine need Linux: use on=kd.Docker(...) or on=kd.Kubernetes(...)"
        return failed("Python", f"{sentence} on {sys.platform}", remedy)
    if sys.platform != "linux":
        return warning(
            "Python", f"{sentence} on {sys.platform}", "Not tried there; only jobs on this machine need Linux"
        )
    return ok("Python", sentence)


def _torch() -> tuple[CheckResult, CheckResult]:
    """Check torch and the GPUs in one process that imports torch."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False)
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        remedy = "Is the disk overloaded or on a slow network?"
        return failed("torch", f"import torch takes more than {_TORCH_TIMEOUT_S:.0f} s", remedy), _NO_GPUS
    except OSError as error:
        return failed("torch", f"{sys.executable} cannot be run: {error}", "Install Python again"), _NO_GPUS
    except (IndexError, ValueError):
        last = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return failed("torch", f"import torch fails: {last}", f"pip install 'torch>={loading.OLDEST_TORCH}'"), _NO_GPUS
    version, seconds = found["version"], found["seconds"]
    sentence = f"torch {version}, imported in {seconds:.1f} s"
    if loading.is_too_old(version):
        torch = failed(
            "torch", sentence, f"torch {loading.OLDEST_TORCH} or later is needed: pip install --upgrade torch"
        )
    elif not found["gloo"]:
        torch = failed("torch", f"{sentence}, has no gloo", "Install a torch that was built with distributed support")
    elif seconds > _SLOW_IMPORT_S:
        torch = warning("torch", sentence, "The first job of a notebook waits that long; a local disk would be faster")
    else:
        torch = ok("torch", sentence)
    # As a call asks, so that what it refuses to use is not in order here.
    problem = machine_gpus.usable()[1] if machine_gpus.are_there() else ""
    if problem:
        return torch, warning("GPUs", f"They do not work with this torch: {problem}", "Check the driver: nvidia-smi")
    if not found["gpus"]:
        return torch, _NO_GPUS
    names = sorted(set(found["gpus"]))
    described = ", ".join(f"{found['gpus'].count(name)} x {name}" for name in names)
    return torch, ok("GPUs", f"{described} (CUDA {found['cuda']})")


def _cores() -> CheckResult:
    usable, total = usable_cores(), os.cpu_count() or 1
    quota = _cpu_quota()
    sentence = f"{usable} of {total} cores usable" if usable < total else f"{total} core{'' if total == 1 else 's'}"
    if quota is not None and quota < usable:
        remedy = "More processes than that slow each other down: choose number_of_processes accordingly"
        return warning("cores", f"{sentence}, limited to the time of {quota:g}", remedy)
    return ok("cores", sentence)


def _cpu_quota() -> float | None:
    """The control group's CPU limit in cores; None without a limit."""
    try:
        limit, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _shared_memory() -> CheckResult:
    try:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 - the kernel's shared memory, which is only measured
    except OSError as error:
        return warning(
            "shared memory", f"cannot be measured: {error}", "DataLoader workers need it: mount a tmpfs there"
        )
    sentence = f"{facts.size(usage.free)} of {facts.size(usage.total)} free in /dev/shm"
    if usage.free < _LOW_SHARED_MEMORY:
        remedy = "DataLoader workers may run out of it: docker run --shm-size=2g, or num_workers=0"
        return warning("shared memory", sentence, remedy)
    return ok("shared memory", sentence)


def _state_folder() -> CheckResult:
    try:
        folder = records.state_dir()
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except (OSError, StoreError) as error:
        return failed("state folder", f"not writable: {error}", "Set XDG_STATE_HOME to a folder you can write to")
    sentence = f"{folder}, {facts.size(free)} free"
    if free < _LOW_DISK:
        remedy = "kale-dist delete --finished removes old jobs, or set XDG_STATE_HOME to a larger disk"
        return warning("state folder", sentence, remedy)
    return ok("state folder", sentence)


def _notebook() -> CheckResult:
    packages = ("anywidget", "ipykernel", "nbclient", "nbformat")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sentence = f"{', '.join(missing)} not installed; only the widget and `kale-dist run` need it"
        return warning("notebooks", sentence, install("notebook"))
    return ok("notebooks", "show jobs as widgets, and can be executed by `kale-dist run`")


def _docker() -> CheckResult:
    found = os.environ.get("DOCKER_HOST", "") or next(filter(os.path.exists, ("/var/run/docker.sock",)), "")
    return ok("docker", f"{f'found: {found}' if found else 'not found'}; 'kale-dist doctor --on docker' looks at it")


def _cluster() -> CheckResult:
    named = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    paths = named or [os.path.expanduser("~/.kube/config")]  # noqa: PTH111 - pathlib raises for a user without a home
    found = next((f"found: {path}" for path in paths if os.path.exists(path)), f"not found: {', '.join(paths)}")  # noqa: PTH110 - pathlib raises for a folder we may not enter
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        found = "inside a cluster"
    return ok("cluster", f"{found}; 'kale-dist doctor --on kubernetes' looks at it")
