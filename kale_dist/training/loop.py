"""The training loop of one rank: epochs around the user's steps, with everything that makes n ranks act as one."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kale_dist.contract import EventKind
from kale_dist.errors import ConfigError
from kale_dist.runtime import context
from kale_dist.strategies import AllReduce, Strategy
from kale_dist.training import agreement, checkpoint, loader, metrics, supervised
from kale_dist.training.batches import Feed
from kale_dist.training.group import Group
from kale_dist.training.optimizer import OptimizerControl
from kale_dist.training.pace import Pace
from kale_dist.training.result import Structure, TrainingResult, on_cpu
from kale_dist.training.strategies.all_reduce import GradientExchange, follow_lazy_modules, sparse_parameters

_DRIFT_HINT = (
    " A step that changes weights or gradients by random numbers, or otherwise differently on each rank, does this."
)
_PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    *,
    model: torch.nn.Module,
    train_data_loader: torch.utils.data.DataLoader[Any],
    criterion: Any,
    optimizer: torch.optim.Optimizer,
    train_step: Callable[..., Any] | None = None,
    eval_data_loader: torch.utils.data.DataLoader[Any] | None = None,
    eval_step: Callable[..., Any] | None = None,
    epochs: int = 1,
    cuda: bool = False,
    train_args: Any = None,
    eval_args: Any = None,
    scheduler: Any = None,
    accumulate: int = 1,
    precision: str | None = None,
    clip_norm: float | None = None,
    split_batches: bool = False,
    shard: bool = True,
    eval_sharding: str = "samples",
    checkpoint_every: int | None = 1,
    strategy: Strategy | None = None,
    seed: int | None = None,
) -> TrainingResult:
    """Train a model in this rank, together with all ranks of the ready process group (or alone, without one).

    The objects are altered in place while this runs and are as before when it ends, but for what was learnt. For the
    gradient of n ranks to be that of one process with the global batch, `criterion` has to average over samples; one
    that sums gives that gradient divided by the number of ranks.

    Args:
        model: The model.
        train_data_loader: Its batch size is that of one rank, unless `split_batches`.
        criterion: Passed to the steps.
        optimizer: Over the model's parameters.
        train_step: `train_step(model, data_loader, criterion, optimizer, device, args)`, called once an epoch; None
            for the ready-made one. Returns metrics: a number, a dict of numbers, a tuple of numbers or None.
        eval_data_loader: Data for `eval_step`, or None.
        eval_step: `eval_step(model, data_loader, criterion, device, args)`; None for the ready-made one.
        epochs: Number of epochs.
        cuda: Whether to train on this rank's GPU.
        train_args: Passed to `train_step`.
        eval_args: Passed to `eval_step`.
        scheduler: A learning-rate scheduler, stepped after each epoch unless the step does it itself.
        accumulate: Batches for one step of the optimizer.
        precision: None, `bf16` or `fp16`.
        clip_norm: Largest norm of the gradients, applied before each real step.
        split_batches: Whether the loaders' batch sizes are those of all ranks together.
        shard: Whether to divide the training data; False where the dataset does it itself.
        eval_sharding: `samples` (each rank evaluates its share) or `none` (every rank evaluates everything).
        checkpoint_every: Epochs between checkpoints; None or 0 for none. Without a job there are none.
        strategy: How gradients are exchanged.
        seed: Seed of rank 0, rank r gets seed + r; None where the rank is seeded already.

    Returns:
        The metrics, and on rank 0 the states.

    Raises:
        ConfigError: An argument, or what a step does, cannot be combined with another.
        KaleDistError: The ranks do not do the same.
    """
    if precision not in _PRECISIONS:
        raise ConfigError("precision", f"{precision!r} is not known", "Use None, 'bf16' or 'fp16'")
    if eval_sharding not in ("samples", "none"):
        raise ConfigError("eval_sharding", f"{eval_sharding!r} is not known", "Use 'samples' or 'none'")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError("accumulate", f"{accumulate!r} is not an int of 1 or more", "Give the number of batches")
    place = context.context()
    device = torch.device(place.device if place.in_job else "cuda" if cuda else "cpu")
    group = Group(device)
    if seed is not None:
        _seed(seed + group.rank)
    if eval_data_loader is train_data_loader:
        # One object cannot give two different shares.
        eval_data_loader = copy.copy(train_data_loader)
    with contextlib.ExitStack() as stack:
        session = _Session(
            group=group,
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            scheduler=scheduler,
            epochs=epochs,
            precision=precision,
            settings=strategy or AllReduce(),
        )
        session.open(
            stack,
            train_data_loader,
            eval_data_loader,
            accumulate=accumulate,
            clip_norm=clip_norm,
            split=split_batches,
            shard=shard,
            shard_eval=eval_sharding == "samples",
            is_ready_made=train_step is None,
        )
        call_train = _bind_train(session, train_step, train_data_loader, train_args)
        call_eval = None
        if eval_data_loader is not None:
            step = eval_step or supervised.eval_epoch
            call_eval = functools.partial(step, model, eval_data_loader, criterion, device, eval_args)
        every = checkpoint_every or 0
        values: dict[str, float] = {}
        done, stopped = 0, False
        for epoch in range(1, epochs + 1):
            values, stopped = session.epoch(epoch, call_train, call_eval)
            done = epoch
            if every and (epoch % every == 0 or epoch == epochs or stopped):
                session.write_checkpoint(epoch)
            if stopped:
                break
    return session.result(values, done, stopped=stopped)


def _bind_train(session: _Session, step: Callable[..., Any] | None, data: Any, args: Any) -> Callable[[], Any]:
    if step is None:
        scaler = session.control.scaler
        step = functools.partial(supervised.train_epoch, scale=None if scaler is None else scaler.scale)
    positional = (session.model, data, session.criterion, session.optimizer, session.group.device, args)
    return functools.partial(step, *positional)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class _Session:
    """The parts of one training, put together."""

    control: OptimizerControl
    exchange: GradientExchange

    def __init__(
        self,
        *,
        group: Group,
        model: torch.nn.Module,
        criterion: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        epochs: int,
        precision: str | None,
        settings: AllReduce,
    ) -> None:
        self.group = group
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.epochs = epochs
        self.precision = precision
        self.settings = settings
        self._structure = Structure.of(model)
        self._latest_loss: Any = None

    def open(
        self,
        stack: contextlib.ExitStack,
        train_loader: Any,
        eval_loader: Any,
        *,
        accumulate: int,
        clip_norm: float | None,
        split: bool,
        shard: bool,
        shard_eval: bool,
        is_ready_made: bool,
    ) -> None:
        """Alter everything in place; the stack undoes it."""
        group, device = self.group, self.group.device
        self._move()
        self.named = agreement.trained_tensors(self.model, self.criterion, self.optimizer)
        prints = group.gather(agreement.fingerprint(self.named.values())) if not group.is_alone else []
        agreement.copy_where_differing(group, list(self.named.items()), prints, "at the start")
        self.buffers = agreement.Buffers(self.model, group, average=self.settings.average_buffers)
        pace = Pace(group.world_size, accumulate)
        modules = [
            m for root in (self.model, self.criterion) if isinstance(root, torch.nn.Module) for m in root.modules()
        ]
        parameters: Any = self.named.values()
        self.exchange = GradientExchange(group, pace, self.settings, parameters, sparse_parameters(modules))
        stack.callback(self.exchange.close)
        follow_lazy_modules(modules, self.exchange)
        scaler = torch.amp.GradScaler(device.type) if is_ready_made and self.precision == "fp16" else None
        self.control = OptimizerControl(
            self.optimizer,
            self.model,
            group,
            pace,
            self.exchange,
            clip_norm=clip_norm,
            precision=self.precision,
            scaler=scaler,
        )
        stack.enter_context(self.control.installed())
        if isinstance(self.criterion, torch.nn.Module):
            stack.callback(self.criterion.register_forward_hook(self._note_loss).remove)
        self.train_feed = Feed(
            name="train", group=group, pace=pace, exchange=self.exchange, loss=self._loss, epochs=self.epochs
        )
        undo = loader.prepare(
            train_loader,
            self.train_feed,
            argument="train_data_loader",
            shard=shard,
            split=split,
            accumulate=accumulate,
        )
        stack.callback(undo)
        group.say(self.train_feed.sentence)
        self.loaders = [train_loader]
        self.eval_feed = Feed(name="eval", group=group, loss=self._loss, epochs=self.epochs)
        if eval_loader is not None:
            undo = loader.prepare(
                eval_loader, self.eval_feed, argument="eval_data_loader", shard=shard_eval, split=split
            )
            stack.callback(undo)
            note = "metrics are averaged by samples" if shard_eval else "for metrics that are not means"
            group.say(f"{self.eval_feed.sentence}; {note}")
            self.loaders.append(eval_loader)

    def _move(self) -> None:
        """Bring model, criterion and the optimizer's state to the rank's device."""
        device = self.group.device
        if device.type == "cpu":
            return
        for part in (self.model, self.criterion):
            if isinstance(part, torch.nn.Module):
                part.to(device)
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                # Step counts stay where the optimizer keeps them.
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    state[name] = value.to(device)

    def _note_loss(self, _module: Any, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.numel() == 1:
            self._latest_loss = output.detach()

    def _loss(self) -> float | None:
        return None if self._latest_loss is None else float(self._latest_loss)

    # -- an epoch --------------------------------------------------------------------------------------------------

    def epoch(
        self, epoch: int, call_train: Callable[[], Any], call_eval: Callable[[], Any] | None
    ) -> tuple[dict[str, float], bool]:
        """Train and evaluate once; return the merged metrics and whether to stop."""
        for data in self.loaders:
            _set_epoch(data, epoch - 1)
        self.control.scheduler_calls.clear()
        trained = self._run("train_step", self.train_feed, epoch, call_train)
        self.buffers.synchronise()
        values, stop = trained.values, trained.stop
        evaluated: dict[str, float] = {}
        if call_eval is not None:
            outcome = self._run("eval_step", self.eval_feed, epoch, call_eval)
            evaluated, stop = outcome.values, stop or outcome.stop
        self._step_scheduler(evaluated.get("loss", values.get("loss")))
        return metrics.merge(values, evaluated), stop

    def _run(self, name: str, feed: Feed, epoch: int, call: Callable[[], Any]) -> metrics.Averaged:
        feed.begin(epoch)
        with self._autocast():
            returned = call()
        feed.end()
        is_training = feed is self.train_feed
        if is_training:
            self.control.flush()
        prints = agreement.fingerprint(self.named.values()) if is_training and not self.group.is_alone else []
        outcome = metrics.average(self.group, metrics.normalise(name, returned), feed.samples, prints)
        if is_training:
            agreement.copy_where_differing(
                self.group, list(self.named.items()), outcome.extras, f"after epoch {epoch}", _DRIFT_HINT
            )
            if not feed.passes:
                self.group.say(
                    "train_step did not iterate the loader it was given, or its class iterates by itself: data is not"
                    " divided over the ranks."
                )
        if self.group.rank == 0 and outcome.values:
            context.emit(EventKind.METRICS, values=outcome.values, epoch=epoch, source=feed.name)
        return outcome

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _PRECISIONS[self.precision]
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.group.device.type, dtype=dtype)

    def _step_scheduler(self, loss: float | None) -> None:
        scheduler = self.scheduler
        if scheduler is None or id(scheduler) in self.control.scheduler_calls:
            return
        if isinstance(scheduler, ReduceLROnPlateau):
            if loss is None:
                raise ConfigError(
                    "scheduler",
                    "ReduceLROnPlateau needs a loss, and no step returned one",
                    "Return {'loss': ...} from eval_step or train_step",
                )
            scheduler.step(loss)
        elif self.control.real_steps:
            scheduler.step()

    # -- what remains ----------------------------------------------------------------------------------------------

    def write_checkpoint(self, epoch: int) -> None:
        """Write the states of rank 0 into the job's folder, if there is one."""
        files = context.context().files
        if files is None or self.group.rank:
            return
        left_out = checkpoint.write(
            files.checkpoint,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            epoch=epoch,
        )
        if left_out:
            self.group.say(f"Checkpoints do not hold {', '.join(left_out[:5])}: neither tensors nor plain values.")
        context.emit(
            EventKind.CHECKPOINT,
            epoch=epoch,
            step=self.control.real_steps,
            path=files.checkpoint.name,
            bytes=files.checkpoint.stat().st_size,
        )
        context.mark_progress()

    def result(self, values: dict[str, float], epochs: int, *, stopped: bool) -> TrainingResult:
        """The outcome, after everything was undone."""
        if self.group.rank:
            return TrainingResult(metrics=values, epochs=epochs, stopped_early=stopped)
        changed = self._structure.difference(Structure.of(self.model))
        return TrainingResult(
            metrics=values,
            epochs=epochs,
            stopped_early=stopped,
            model_state=on_cpu(self.model.state_dict()),
            optimizer_state=on_cpu(self.optimizer.state_dict()),
            scheduler_state=None if self.scheduler is None else on_cpu(self.scheduler.state_dict()),
            model=self.model if changed else None,
            reason=changed,
        )


def _set_epoch(data: Any, epoch: int) -> None:
    """Tell samplers and datasets that want to know it which epoch begins, counted from 0."""
    told: set[int] = set()
    for part in _parts(data):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch) and id(getattr(set_epoch, "__self__", part)) not in told:
            told.add(id(getattr(set_epoch, "__self__", part)))
            set_epoch(epoch)


def _parts(data: Any) -> Iterator[Any]:
    yield data.sampler
    yield data.batch_sampler
    yield getattr(data.batch_sampler, "sampler", None)
    yield data.dataset
