"""The parts of one training in one rank, put together: everything between the arguments and an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kale_dist.contract import EventKind
from kale_dist.errors import ConfigError
from kale_dist.runtime import context
from kale_dist.strategies import AllReduce
from kale_dist.training import checkpoint, loader
from kale_dist.training.batches import Feed
from kale_dist.training.checkpoint import Progress, Resumption, Trained, describe, is_wanted
from kale_dist.training.group import Buffers, Group, copy_where_differing, fingerprint, trained_tensors
from kale_dist.training.notices import Captured, Losses
from kale_dist.training.objects import Optimizers, on_cpu, state_of
from kale_dist.training.optimizer import OptimizerControl
from kale_dist.training.result import Averaged, Structure, TrainingResult, average, merge, normalise
from kale_dist.training.schedules import Schedules
from kale_dist.training.sharding import Pace
from kale_dist.training.strategies.all_reduce import GradientExchange, follow_lazy_modules
from kale_dist.training.strategies.buckets import sparse_parameters

PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}

_DRIFT_HINT = (
    " A step that changes weights or gradients by random numbers, or otherwise differently on each rank, does this."
)


class Session:
    """The parts of one training, put together."""

    control: OptimizerControl
    exchange: GradientExchange
    resumption: Resumption
    _captured: Captured | None = None

    def __init__(
        self,
        *,
        group: Group,
        model: torch.nn.Module,
        criterion: Any,
        optimizer: Any,
        state: tuple[Any, ...],
        scheduler: Any,
        epochs: int,
        precision: str | None,
        settings: AllReduce,
    ) -> None:
        self.group = group
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.state = state
        self.scheduler = scheduler
        self.epochs = epochs
        self.precision = precision
        self.settings = settings
        self._structure = Structure.of(model)
        self._losses = Losses(group, model, lambda: (self.train_feed.epoch, self.train_feed.step))

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
        self.loaders = [data for data in (train_loader, eval_loader) if data is not None]
        self._trained = Trained(
            model=self.model,
            criterion=self.criterion,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state=self.state,
            loaders=tuple(self.loaders),
        )
        self.resumption = Resumption(group, self._trained)
        self.named = trained_tensors(self.model, self.criterion, self.optimizer)
        prints = group.gather(fingerprint(self.named.values())) if not group.is_alone else []
        copy_where_differing(group, list(self.named.items()), prints, "at the start")
        self.buffers = Buffers(self.model, group, average=self.settings.average_buffers)
        pace = Pace(group.world_size, accumulate)
        modules = [
            m for root in (self.model, self.criterion) if isinstance(root, torch.nn.Module) for m in root.modules()
        ]
        parameters: Any = self.named.values()
        self.exchange = GradientExchange(group, pace, self.settings, parameters, sparse_parameters(modules))
        stack.callback(self.exchange.close)
        follow_lazy_modules(modules, self.exchange)
        scaler = torch.amp.GradScaler(device.type) if is_ready_made and self.precision == "fp16" else None
        schedules = Schedules(group=group, pace=pace, epochs=self.epochs, alone=loader.length(train_loader))
        several = self.optimizer.named.values() if isinstance(self.optimizer, Optimizers) else ()
        self.control = OptimizerControl(
            next(iter(several), self.optimizer),
            self.model,
            group,
            pace,
            self.exchange,
            schedules,
            clip_norm=clip_norm,
            precision=self.precision,
            scaler=scaler,
        )
        stack.enter_context(self.control.installed())
        stack.enter_context(self._losses.watched(self.criterion))
        self.train_feed = Feed(
            name="train", group=group, pace=pace, exchange=self.exchange, loss=self._losses.latest, epochs=self.epochs
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
        schedules.here = loader.length(train_loader)
        group.say(self.train_feed.sentence)
        self.eval_feed = Feed(name="eval", group=group, loss=self._losses.latest, epochs=self.epochs)
        if eval_loader is not None:
            undo = loader.prepare(
                eval_loader, self.eval_feed, argument="eval_data_loader", shard=shard_eval, split=split
            )
            stack.callback(undo)
            note = "metrics are averaged by samples" if shard_eval else "for metrics that are not means"
            group.say(f"{self.eval_feed.sentence}; {note}")
        self.resumption.restore_rest(self.control.scaler)

    def _move(self) -> None:
        """Bring model, criterion and the optimizer's state to the rank's device."""
        device = self.group.device
        if device.type == "cpu":
            return
        for part in (self.model, self.criterion, *self.state):
            if isinstance(part, torch.nn.Module):
                part.to(device)
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                # Step counts stay where the optimizer keeps them.
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    state[name] = value.to(device)

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
        self._name_what_stays()
        return merge(values, evaluated), stop

    def watch(self, steps: Iterable[Any], arguments: dict[str, Any]) -> None:
        """Note what the user's steps can change, so that what does not come back can be named after an epoch."""
        parts = (self.model, self.criterion, self.optimizer, self.scheduler, *self.state, *self.loaders)
        optimizers = self.optimizer.named.values() if isinstance(self.optimizer, Optimizers) else ()
        if self.group.rank == 0:
            self._captured = Captured(steps, arguments, (*parts, *optimizers))

    def _name_what_stays(self) -> None:
        captured, self._captured = self._captured, None
        if captured is not None and (names := captured.changed()):
            shown = ", ".join(names[:5])
            self.group.say(
                f"Changed by a step, and left behind in the ranks: {shown}. state=[{shown}] in the call brings them back"
                " (objects with a state_dict, lists, dicts, sets; keep numbers in a dict)."
            )

    def _run(self, name: str, feed: Feed, epoch: int, call: Callable[[], Any]) -> Averaged:
        feed.begin(epoch)
        with self._autocast():
            returned = call()
        feed.end()
        is_training = feed is self.train_feed
        if is_training:
            self.control.flush()
            self.exchange.verify()
        prints = fingerprint(self.named.values()) if is_training and not self.group.is_alone else []
        outcome = average(self.group, normalise(name, returned), feed.samples, prints)
        if is_training:
            copy_where_differing(
                self.group, list(self.named.items()), outcome.extras, f"after epoch {epoch}", _DRIFT_HINT
            )
            if returned is None:
                self.group.say(
                    "train_step returned nothing, so there are no metrics. Return a number or a dict of numbers, such as"
                    " {'loss': total / len(data_loader)}; they are averaged over the ranks."
                )
            if not feed.passes:
                self.group.say(
                    "train_step did not iterate the loader it was given, or its class iterates by itself: data is not"
                    " divided over the ranks. A loader made in the step over data_loader.dataset gives all ranks the"
                    " same first samples; change the loader before the call instead."
                )
        if self.group.rank == 0 and outcome.values:
            context.emit(EventKind.METRICS, rank=None, values=outcome.values, epoch=epoch, source=feed.name)
        return outcome

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        if dtype is None:
            return contextlib.nullcontext()
        # The cache of cast weights would outlive the optimizer's steps and freeze the forward pass for the epoch.
        return torch.autocast(self.group.device.type, dtype=dtype, cache_enabled=False)

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

    def write_checkpoint(self, progress: Progress) -> None:
        """Write the states of rank 0 into the job's folder, if there is one. All ranks have to call this."""
        files = context.context().files
        if files is None:
            return
        rest = describe(self.group, self._trained, progress, self.control.scaler) if is_wanted() else None
        if self.group.rank:
            return
        epoch = progress.epochs
        left_out = checkpoint.write(
            files.checkpoint,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            epoch=epoch,
            resume=rest,
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
            state=tuple(map(state_of, self.state)),
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
