"""What one rank asks for: cores, memory, GPUs and other resources of a cluster. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names, quantities
from kale_dist.job.spec.checks import Check, check_fields, keep, number, setting, text, whole
from kale_dist.wording import show

DEFAULT_CPU = 1.0
"""Cores that a rank asks for on a cluster if its call gives none."""

DEFAULT_MEMORY_GIB = 2.0
"""Memory that a rank asks for on a cluster if its call gives none."""

GPU_CPU, GPU_MEMORY_GIB = 4.0, 16.0
"""Cores and memory of a rank with GPUs on a cluster if its call gives none: CUDA, NCCL and DataLoader's workers need them."""

_GPU = "nvidia.com/gpu"
_CORES = number("a number above 0", "Give a number of cores").or_(None)
GIB = number("a number above 0", "Give a number of GiB, which are 1024 MiB").or_(None)
_KNOWN = ("cpu", "cpu_limit", "memory", "memory_gib", "gpus", "gpu_resource", "shm", "shm_gib", "extended")
_NAME = text(
    lambda name: "/" in name and names.is_qualified_name(name),
    "there is no resource {}",
    f"Use {', '.join(_KNOWN)}, or a name of the cluster such as 'rdma/hca'",
    _KNOWN,
)
_AMOUNT = Check(
    lambda amount: not isinstance(amount, bool) and str(amount).isascii() and str(amount).isdecimal(),
    "{} is not a whole number",
    "Write it as 1: such resources are whole",
)
_LARGEST_SHM_GIB = 8.0
_MOST_GIB = 32 << 10
"""No machine has more memory: who asks for more meant another unit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, init=False)
class Resources:
    """What one rank asks for. A pod asks for as many times this as it has ranks.

    A dict of the same arguments does as well: `{"cpu": 2, "memory": "4Gi", "gpus": 1, "rdma/hca": 1}`.

    Args:
        cpu: Cores requested: a number, or a text such as `"500m"`. None: `DEFAULT_CPU` on a cluster (4 with GPUs), no
            request elsewhere.
        cpu_limit: Most cores, likewise; None for no limit, unless a quota or a LimitRange of the namespace demands one.
        memory: Memory requested, and its limit, with its unit: `"4Gi"`.
        memory_gib: The same as a number of GiB. None: `DEFAULT_MEMORY_GIB` on a cluster (16 with GPUs), no limit elsewhere.
            Holds /dev/shm, too.
        gpus: None: 1 with `cuda=True`, else 0.
        gpu_resource: What the cluster calls a GPU.
        shm: Size of /dev/shm, by which DataLoader workers pass batches, with its unit: `"1Gi"`.
        shm_gib: The same as a number of GiB. None: half of the memory, at most 8 GiB a pod.
        extended: Other resources by the cluster's names: `{"rdma/hca": 1}`.
        others: The same, each as an argument of its own.

    Raises:
        ConfigError: A value is wrong, or its unit is not clear: `"2 GB"`.
    """

    cpu: float | None = setting(None, _CORES)
    cpu_limit: float | None = setting(None, _CORES)
    memory_gib: float | None = setting(None, GIB)
    gpus: int | None = setting(None, whole(0, remedy="GPUs are whole").or_(None))
    gpu_resource: str = _GPU
    shm_gib: float | None = setting(None, GIB)
    extended: tuple[tuple[str, str], ...] = ()
    """Name and amount of each."""

    def __init__(
        self,
        *,
        cpu: float | str | None = None,
        cpu_limit: float | str | None = None,
        memory: str | None = None,
        memory_gib: float | None = None,
        gpus: int | None = None,
        gpu_resource: str = _GPU,
        shm: str | None = None,
        shm_gib: float | None = None,
        extended: Mapping[str, int | str] | Iterable[tuple[str, int | str]] = (),
        **others: int | str,
    ) -> None:
        if gpu_resource in others:
            gpus = _once("gpus", gpus, others.pop(gpu_resource))
        keep(
            self,
            cpu=_cores("cpu", cpu),
            cpu_limit=_cores("cpu_limit", cpu_limit),
            memory_gib=memory_gib if memory is None else _once("memory_gib", memory_gib, _gib("memory", memory)),
            gpus=gpus,
            gpu_resource=gpu_resource,
            shm_gib=shm_gib if shm is None else _once("shm_gib", shm_gib, _gib("shm", shm)),
            extended=_extended({**_pairs(extended), **others}),
        )
        self._check()

    def of_container(self, ranks: int = 1) -> dict[str, dict[str, str]]:
        """Requests and limits of a container with so many ranks, as Kubernetes writes them; without what is not asked for."""
        whole = {"memory": quantities.memory_text(self.memory_gib * ranks)} if self.memory_gib else {}
        whole |= {self.gpu_resource: str(self.gpus * ranks)} if self.gpus else {}
        whole |= {name: str(int(amount) * ranks) for name, amount in self.extended}
        cores = {"requests": self.cpu, "limits": self.cpu_limit}
        asked = {
            key: {**({"cpu": quantities.cpu_text(number * ranks)} if number else {}), **whole}
            for key, number in cores.items()
        }
        return {key: amounts for key, amounts in asked.items() if amounts}

    def shm_of(self, ranks: int, default_gib: float = 0.0) -> float:
        """GiB of /dev/shm for so many ranks; `default_gib` stands for the memory of each where none is given."""
        if self.shm_gib is not None:
            return self.shm_gib * ranks
        return min(_LARGEST_SHM_GIB, (self.memory_gib or default_gib) * ranks / 2)

    def filled(self, *, cuda: bool) -> Resources:
        """The same with a cluster's defaults for the cores, memory and GPUs that are not given.

        Args:
            cuda: Whether ranks use CUDA.
        """
        gpus = int(cuda) if self.gpus is None else self.gpus
        cores, gib = (GPU_CPU, GPU_MEMORY_GIB) if gpus else (DEFAULT_CPU, DEFAULT_MEMORY_GIB)
        return dataclasses.replace(
            self,
            gpus=gpus,
            cpu=self.cpu or min(cores, self.cpu_limit or cores),
            memory_gib=self.memory_gib or max(gib, self.shm_gib or 0.0),
        )

    def _check(self) -> None:
        check_fields(self, "resources.")
        if self.cpu_limit is not None and self.cpu_limit < (self.cpu or 0):
            problem = f"{self.cpu_limit:g} is less than the {self.cpu:g} cores of `cpu`"
            raise ConfigError("resources.cpu_limit", problem, "Raise it, or lower `cpu`")
        if self.memory_gib is not None and (self.shm_gib or 0) > self.memory_gib:
            problem = (
                f"{self.shm_gib:g} GiB of /dev/shm are more than the {self.memory_gib:g} GiB of memory they are in"
            )
            raise ConfigError("resources.shm_gib", problem, "Raise `memory`")
        _NAME("resources", self.gpu_resource)


def resources(value: Any) -> Resources:
    """A `Resources`, from one, from a dict of its arguments, or from None.

    Raises:
        ConfigError: It is neither, or a value is wrong.
    """
    if isinstance(value, Resources):
        return value
    if value is None:
        return Resources()
    if not isinstance(value, Mapping):
        raise ConfigError("resources", f"{show(value)} is not a dict", "Write it as {'cpu': 2, 'memory': '4Gi'}")
    for name in value:
        if name not in _KNOWN:
            _NAME("resources", name)
    return Resources(**value)


def _pairs(extended: Any) -> dict[str, Any]:
    try:
        return dict(extended)
    except (TypeError, ValueError):
        problem = f"{show(extended)} is not a dict"
        raise ConfigError("resources.extended", problem, "Write it as {'rdma/hca': 1}") from None


def _extended(given: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    for name, amount in given.items():
        _NAME("resources", name)
        _AMOUNT("resources", amount, of=name)
    return tuple(sorted((name, str(amount)) for name, amount in given.items()))


def _once(field: str, first: Any, second: Any) -> Any:
    if first is not None:
        raise ConfigError(f"resources.{field}", "it is given twice", "Leave one of the two out")
    return second


def _read(read: Callable[[str], float], field: str, value: str) -> float:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"resources.{field}", f"{show(value)} is not a quantity", str(error)) from None


def _cores(field: str, value: Any) -> Any:
    return _read(quantities.cores, field, value) if isinstance(value, str) else value


def _gib(field: str, value: Any) -> float:
    """GiB of a text. Memory without a unit is refused, because people mean GiB and Kubernetes bytes."""
    if not isinstance(value, str) or value.strip().isdecimal():
        remedy = f"Write it with its unit, such as '2Gi', or as {field}_gib=2"
        raise ConfigError(f"resources.{field}", f"the unit of {show(value)} is not said", remedy)
    gib = _read(quantities.memory_gib, field, value)
    if gib > _MOST_GIB:
        meant = re.sub(r"[TPE]", "G", value)
        raise ConfigError(f"resources.{field}", f"no machine has {value} of memory", f"Did you mean {meant!r}?")
    return gib
