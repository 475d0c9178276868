"""Models that the ranks make, and folders of parts: states of which each rank writes and reads its own share.

A folder of parts is what `torch.distributed.checkpoint` writes. It is whole once its `.metadata` is there, which is renamed last.
That package is imported where it is used: every rank imports this file, and most need no folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import errno
import importlib
import pathlib
import pickle
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist import strategies
from kale_dist.errors import ConfigError, KaleDistError, StoreError
from kale_dist.wire import blobs, context
from kale_dist.wire.files import umask
from kale_dist.worker.training import checkpoint
from kale_dist.worker.training.checkpoint import Stored
from kale_dist.worker.training.construction import Construction
from kale_dist.worker.training.contents import Checkpoint
from kale_dist.worker.training.data.generators import generator_states, seed_generators, set_generator_states
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.strategy import FullState
from kale_dist.worker.training.trained import Trained

REST = "rest"
"""The file in a checkpoint's folder of parts that holds all but the tensors of model and optimizer."""

_OWNER = "owner"
"""The file in a checkpoint's folder of parts that names the job that has written it. Only that job removes it."""

_OWNER_CHARACTERS = 128
"""How many characters of that file are read: the rest of another user's may be anything."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_NAMED = 3
"""Names that an error lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pretrained:
    """A function that makes a model, and where the ranks see its weights. `kd.pretrained` makes it."""

    build: Callable[[], Any]
    path: str

    def __call__(self) -> Any:
        """Make the model, without these weights."""
        return self.build()


def pretrained(build: Callable[[], Any], path: Any) -> Pretrained:
    """A model that the ranks make, with weights from files that they see. Each reads only what it holds.

        model=kd.pretrained(lambda: AutoModelForCausalLM.from_config(config), "/models/llama")

    Args:
        build: Makes the model. The weights that it gives it are not used.
        path: A folder of safetensors, as Hugging Face writes it, one such file, or a folder of parts.

    Returns:
        What `distribute` takes as `model`.

    Raises:
        ConfigError: The first argument is not a function.
    """
    if not callable(build) or hasattr(type(build), "named_parameters"):
        remedy = "Pass a function that makes the model: kd.pretrained(lambda: Net(), '/models/net')"
        raise ConfigError("build", f"it is a {type(build).__name__}, not a function", remedy)
    return Pretrained(build, str(path))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A training whose model was made in this rank."""

    training: Training
    construction: Construction | None
    """Gives the model's tensors their values; None where they have them."""
    folders: Folders | None
    """None where a rank holds the whole model."""


def make(training: Training, group: Group) -> Made:
    """Make model, optimizer and scheduler if the call has functions in their place. All ranks get equal ones.

    Raises:
        ConfigError: A function makes something else, or the strategy cannot take it.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        # Else glibc keeps freed memory of this size: gathered units together would take what the whole model takes.
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20 if training.in_parts else 32 << 20)
        if not training.in_parts:
            # Else it returns a step's gradients to the system, and the next step pays for each page again: 20 to 30 % of its time.
            libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
    if not training.makes_model:
        return Made(training=training, construction=None, folders=None)
    before = generator_states()
    seed_generators(group.send(torch.initial_seed() if training.seed is None else training.seed))
    construction = Construction(training.model) if training.in_parts and not group.is_alone else None
    made = with_objects(training, None if construction is None else construction.made)
    set_generator_states(before)
    conditions = strategies.Conditions(
        number_of_processes=group.world_size, processes_per_pod=context.context().local_world_size,
        cuda=group.device.type == "cuda", model=made.model, optimizer=made.optimizer, precision=training.precision,
    )  # fmt: skip
    training.strategy.check(conditions)
    source = training.model.path if isinstance(training.model, Pretrained) else ""
    if not training.in_parts:
        if source:
            load(pathlib.Path(source), weights_of(made.model), None, lora_of(made.model))
        return Made(training=made, construction=None, folders=None)
    if any(made.optimizer.state.values()):
        problem = f"{type(made.optimizer).__name__} has a state before its first step, which cannot be divided here"
        raise ConfigError("optimizer", problem, "Use another, or give a model in the place of a function")
    return Made(training=made, construction=construction, folders=Folders(group, training.save_to, source))


def with_objects(training: Training, model: Any = None) -> Training:
    """Replace the functions of a call by the model, optimizer and scheduler that they make.

    Args:
        training: The call's.
        model: The model, if it is there.

    Raises:
        ConfigError: A function makes something else.
    """
    model = training.model() if model is None else model
    if not isinstance(model, torch.nn.Module):
        problem = f"the function made a {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError("model", problem, "Return the model")
    optimizer = training.optimizer(list(model.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"the function made a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        raise ConfigError("optimizer", problem, "Return the optimizer")
    scheduler = None if training.scheduler is None else training.scheduler(optimizer)
    return dataclasses.replace(training, model=model, optimizer=optimizer, scheduler=scheduler)


class Folders:
    """The folders of one training whose states are in parts.

    Args:
        group: All ranks.
        save_to: Where the model is saved; None for the job's folder, which the ranks of this machine see.
        source: Where the weights come from before the first step; empty for the model's own.
    """

    def __init__(self, group: Group, save_to: str | None, source: str) -> None:
        self._group, self._source = group, source
        files = context.context().files
        self._own = str(files.folder / "model") if files is not None else tempfile.mkdtemp(prefix="kale-dist-")
        self.model = pathlib.Path(group.send(save_to or self._own))
        """Where the trained weights will be."""
        self._checkpoints = self.model.with_name(f"{self.model.name}.checkpoints")
        self.rest = b""
        """In rank 0, the last checkpoint's file with all but the tensors."""
        self._target = pathlib.Path(group.send(str(self.model.resolve())))
        self._fresh, self._before = (self._target.with_name(f".{self._target.name}.{word}") for word in ("part", "old"))
        if problem := group.send("" if group.rank else foreign(self._target) or foreign(self._before) or self._try()):
            raise StoreError(f"The model cannot be saved to {self.model}: {problem}. Give save_to= another folder")

    def _try(self) -> str:
        """Why the folder that the model is written into could not be made, as a clause; empty if it can."""
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            _remove([self._fresh])
            _make(self._fresh)
            self._fresh.rmdir()
        except (OSError, StoreError) as error:
            return str(error)
        return ""

    def fills(self, last: str) -> bool:
        """Whether `fill` gives every weight a value."""
        return bool(last or self._source)

    def fill(self, model: torch.nn.Module, optimizer: Any, last: str, *, has_optimizer: bool) -> None:
        """Read what this rank holds of the weights, and of the optimizer's state.

        Args:
            model: The model; its weights may be parts.
            optimizer: Its optimizer.
            last: The checkpoint to resume from; empty for none.
            has_optimizer: Whether the optimizer's state is read, too.
        """
        if not self.fills(last):
            return
        folder = pathlib.Path(last or self._source)
        wanted: dict[str, Tensor] = {}
        if last and has_optimizer:
            named = {f"optimizer.{name}.": p for name, p in model.named_parameters()}
            for key, saved in metadata(folder).state_dict_metadata.items():
                prefix, _, what = key.rpartition(".")
                parameter = named.get(f"{prefix}.")
                if parameter is not None:
                    like = torch.zeros_like(parameter.detach(), dtype=saved.properties.dtype)
                    # Counts of steps, which optimizers keep on the CPU.
                    other = torch.zeros(saved.size, dtype=saved.properties.dtype, device="cpu")
                    wanted[key] = like if saved.size == like.size() else other
                    optimizer.state[parameter][what] = wanted[key]
        load(folder, {**weights_of(model), **wanted}, self._group, lora_of(model))

    def write_checkpoint(
        self, trained: Trained, contents: Checkpoint, write: Callable[[Stored], None]
    ) -> tuple[str, ...]:
        """Write a checkpoint, and remove those before it.

        Args:
            trained: The objects of the training.
            contents: All but the values of model and optimizer.
            write: Called in rank 0, when the folder is whole, with what `checkpoint.collect` makes of that.

        Returns:
            The places of values that are left out.
        """
        before = sorted(self._checkpoints.glob("*"), key=_number) if self._group.rank == 0 else []
        folder = self._checkpoints / str(self._group.send(_number(before[-1]) + 1 if before else 1))
        owner = context.context().owner
        mine = [old for old in before if _owner_of(old) == owner]
        last = next((old for old in reversed(mine) if (old / ".metadata").exists()), folder)
        mine = [old for old in mine if old != last]
        if mine and checkpoint.is_tight(last):
            _remove(mine)
        whole = checkpoint.collect(dataclasses.replace(contents, parts=str(folder)))
        states = weights_of(trained.model)
        for name, parameter in trained.model.named_parameters():
            for what, value in trained.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    states[f"optimizer.{name}.{what}"] = value
        if self._group.rank == 0:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            _make(folder)
            folder.joinpath(_OWNER).write_text(owner)
            checkpoint.save(folder / REST, whole)
        # All write there, and torch makes a folder that it does not find.
        self._group.gather(None)
        save(folder, states, self._group)
        if self._group.rank == 0:
            _open(folder)
            write(whole)
            self.rest = (folder / REST).read_bytes()
        _remove(mine)
        return tuple(whole["left_out"])

    def save_model(self, model: torch.nn.Module) -> str:
        """Write the weights into the folder `model`, in the place of what a job has left there; returns its path."""
        target, fresh, before = self._target, self._fresh, self._before
        if self._group.rank == 0:
            _remove([fresh])
            _make(fresh)
        self._group.gather(None)
        save(fresh, weights_of(model), self._group)
        if self._group.rank == 0:
            # What has come there meanwhile is not removed either.
            if problem := foreign(target):
                raise StoreError(f"The model stays in {fresh}, because {target} cannot be replaced: {problem}")
            if target.exists():
                _remove([before])
                target.rename(before)
            _open(fresh)
            fresh.rename(target)
            blobs.sync_folder(target.parent)
            _remove([before])
        return str(self.model)


def foreign(folder: pathlib.Path) -> str:
    """Why a job must not put its model in the place of what is there, as a clause; empty if it may.

    It may where nothing is, or what a job has saved: that was written as `.NAME.part`, which its `.metadata` shows.
    """
    if not folder.exists():
        return ""
    if not folder.is_dir() or folder.is_mount():
        return f"{folder} is a {'mount point' if folder.is_dir() else 'file'}, which no folder can replace"
    try:
        names = sorted(one.name for one in folder.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not names:
        return ""
    others, why = [name for name in names if not re.fullmatch(r"\.metadata|__\d+_\d+\.distcp", name)], ""
    try:
        written_as = pathlib.PurePath(str(metadata(folder).storage_meta.checkpoint_id)).name
        if not others and re.fullmatch(r"\..+\.part", written_as):
            return ""
    except (StoreError, AttributeError) as error:
        why = f" ({error})" * (".metadata" in names)
    return f"that would remove what is in {folder} and no job has made: {_listed(others or names)}{why}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + " ..." * (len(names) > _NAMED)


def _remove(folders: Iterable[pathlib.Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _make(folder: pathlib.Path) -> None:
    """Make a folder that no other user can put anything into: torch writes through links that it finds.

    Raises:
        StoreError: There is one already, which cannot be removed, or it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made ({error.strerror})") from error


def _open(folder: pathlib.Path) -> None:
    """Let others read a folder that is whole, as far as the umask allows."""
    # Some file systems have no modes.
    with contextlib.suppress(OSError):
        folder.chmod((0o777 & ~umask()) | (folder.stat().st_mode & stat.S_ISGID))


def _owner_of(folder: pathlib.Path) -> str:
    """The job that has written a checkpoint, as far as one can be named; empty if that is not known."""
    path = folder / _OWNER
    # It may be another user's.
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                return file.read(_OWNER_CHARACTERS)
    return ""


def _number(folder: pathlib.Path) -> int:
    return int(folder.name) if re.fullmatch(r"[0-9]{1,9}", folder.name) else 0


def outlines(trained: Trained) -> FullState:
    """The states of model and optimizer with shapes in the place of values."""
    model = trained.model.state_dict()
    optimizer = trained.optimizer.state_dict()
    plain = {
        number: {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        for number, state in optimizer["state"].items()
    }
    shapes = {
        name: torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)
        if isinstance(value, Tensor)
        else value
        for name, value in model.items()
    }
    return FullState(
        model=shapes, optimizer={**optimizer, "state": {number: one for number, one in plain.items() if one}}
    )


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state, each once, by their names in a folder of parts."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), (f"model.{name}", value.detach()))
    return dict(found.values())


def lora_of(model: torch.nn.Module) -> set[str]:
    """The names of LoRA's weights in a folder of parts: no file of the model has them, and they keep their first values.

    None where those depend on the model's weights, as PiSSA's do: they would be made of weights that are not read yet.
    """
    configs = [one for part in model.modules() for one in (getattr(part, "peft_config", None) or {}).values()]
    inits = [getattr(config, "init_lora_weights", True) for config in configs]
    if any(init not in (True, False, "gaussian", "orthogonal") for init in inits):
        return set()
    return {f"model.{name}" for name, _ in model.named_parameters() if re.search(r"\.lora_(embedding_)?[AB]\.", name)}


_PLAIN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Unpickler(pickle.Unpickler):
    """Knows what `torch.distributed.checkpoint` writes into `.metadata`, and nothing that could do anything."""

    def find_class(self, module: str, name: str) -> Any:
        """The plain classes of its two modules, types and sizes of tensors; in the place of a path its name."""
        if module in _PLAIN:
            found = getattr(importlib.import_module(module), name, None)
            is_plain = dataclasses.is_dataclass(found) or isinstance(found, enum.EnumType)
            if is_plain and getattr(found, "__module__", "") == module:
                return found
        elif module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        elif module == "torch.serialization":
            # What finds a layout by its name: that of all tensors is the same.
            return lambda _: torch.strided
        elif (module, name) == ("builtins", "getattr"):
            # So Python 3.11.2 names a member of an enumeration.
            return lambda kind, member: kind[member]
        elif module.partition(".")[0] == "pathlib":
            return lambda *parts: "/".join(parts)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")


def metadata(folder: pathlib.Path) -> Any:
    """Read the `.metadata` of a folder of parts, and leave out all but tensors: torch unpickles the rest, which may run code.

    Raises:
        StoreError: It cannot be read, or is not what `torch.distributed.checkpoint` writes.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        if not (folder / ".metadata").is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file")  # noqa: TRY301 - one place words it
        with (folder / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        if outside := [one for info in found.storage_data.values() if "/" in (one := info.relative_path)]:
            raise ValueError(f"it names a file that is not in the folder, {outside[0]}")  # noqa: TRY301 - one place words it
        entries = found.state_dict_metadata.items()
        tensors = {name: one for name, one in entries if type(one) is TensorStorageMetadata}
        return dataclasses.replace(found, state_dict_metadata=tensors)
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{folder / '.metadata'} cannot be read as that of a folder of parts: {reason}") from error


def size(folder: pathlib.Path) -> int:
    """The bytes of the tensors in a folder of parts."""
    return sum(
        one.size.numel() * one.properties.dtype.itemsize for one in metadata(folder).state_dict_metadata.values()
    )


def save(folder: pathlib.Path, states: Mapping[str, Tensor], group: Group) -> None:
    """Write a folder of parts; all ranks call this.

    Raises:
        StoreError: It cannot be written.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    try:
        writer = FileSystemWriter(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            state_dict_saver.save(
                dict(states), storage_writer=writer, process_group=group.world, no_dist=group.is_alone
            )
    except (OSError, RuntimeError, CheckpointException) as error:
        raise StoreError(f"{folder} could not be written: {_reason(error)}. All ranks write there") from error


def load(path: pathlib.Path, wanted: Mapping[str, Tensor], group: Group | None, optional: Collection[str] = ()) -> None:
    """Read tensors in place, from a folder of parts or of safetensors. Where PEFT has put layers around the model's, those are read.

    Args:
        path: The folder, or one file of safetensors.
        wanted: Tensors, or parts of them, by their names in a folder of parts.
        group: All ranks, which all call this; None to read alone.
        optional: Names of those that need not be there.

    Raises:
        StoreError: It is not there, or lacks a tensor.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    is_alone = group is None or group.is_alone
    with tempfile.TemporaryDirectory(prefix="kale-dist-") as links:
        folder, prefix = path, "model."
        if path.is_file():
            folder = pathlib.Path(links)
            folder.joinpath("model.safetensors").symlink_to(path.absolute())
        try:
            if not any(folder.glob("*.safetensors")) and (folder / ".metadata").exists():
                reader: Any = FileSystemReader(folder)
                found = metadata(folder)
                reader.read_metadata = lambda *_, **__: found
                prefix = ""
            else:
                from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

                reader = HuggingFaceStorageReader(str(folder))
            known = reader.read_metadata().state_dict_metadata
            states = {}
            for name, value in wanted.items():
                own = name.removeprefix(prefix)
                beneath = own.replace("base_model.model.", "", 1).replace(".base_layer.", ".")
                if own in known or beneath in known or name not in optional:
                    states[beneath if own not in known and beneath in known else own] = value
            _check(path, states, known)
            world = None if group is None else group.world
            with warnings.catch_warnings():
                # It warns of being alone.
                warnings.simplefilter("ignore", UserWarning)
                state_dict_loader.load(states, storage_reader=reader, process_group=world, no_dist=is_alone)
        except (OSError, RuntimeError, ImportError, CheckpointException) as error:
            raise StoreError(f"The weights at {path} could not be read: {_reason(error)}") from error


def _check(path: pathlib.Path, states: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
    if missing := sorted(states.keys() - known.keys()):
        there = f"there are {len(known)} others, such as {min(known)}" if known else "there are none"
        if re.search("lora_|modules_to_save", missing[0]):
            there += ". Of PEFT, LoRA with init_lora_weights=True, 'gaussian' or 'orthogonal' works, without DoRA and modules_to_save"
        raise KaleDistError(f"{path} has no weights {_listed(missing)}: {there}")
    for name, value in states.items():
        if (saved := getattr(known[name], "size", None)) != value.size():
            raise KaleDistError(
                f"{name} has the shape {tuple(saved or ())} in {path}, and {tuple(value.size())} in the model"
            )


def _reason(error: BaseException) -> str:
    causes: Iterable[Any] = getattr(error, "failures", {}).values()
    inner = next((cause[0] for cause in causes), error)
    return getattr(inner, "strerror", None) or str(inner).partition("\n")[0]
