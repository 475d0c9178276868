"""The training loop of one rank: epochs around the user's steps, with everything that makes n ranks act as one."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import Layout, Settings
from kale_dist.wire import EventKind, context
from kale_dist.worker.training import checkpoint, saving, supervised
from kale_dist.worker.training.callbacks import Callbacks
from kale_dist.worker.training.checkpoint import Progress, Resumption, Trained, describe, is_wanted
from kale_dist.worker.training.data import loader
from kale_dist.worker.training.data.batches import Feed
from kale_dist.worker.training.data.sharding import Pace
from kale_dist.worker.training.group import Group, copy_where_differing, differing, fingerprint, trained_tensors
from kale_dist.worker.training.notices import Captured, Losses, note_layer
from kale_dist.worker.training.optimizer import OptimizerControl, Schedules
from kale_dist.worker.training.profiling import CLOCK, Profiler, collective_s
from kale_dist.worker.training.result import (
    Averaged,
    Optimizers,
    Structure,
    TrainingResult,
    average,
    merge,
    normalise,
    on_cpu,
    one_model,
    one_optimizer,
    state_of,
)
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.strategy import FullState, Parts, Strategy

_PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}

_DRIFT_HINT = (
    " A step that changes weights or gradients by random numbers, or otherwise differently on each rank, does this."
)


def train(training: Training, *, cuda: bool = False) -> TrainingResult:
    """Train a model in this rank, together with all ranks of the ready process group (or alone, without one).

    The objects are altered in place while this runs and are as before when it ends, but for what was learnt. For the
    gradient of n ranks to be that of one process with the global batch, `criterion` has to average over samples; one
    that sums gives that gradient divided by the number of ranks.

    Args:
        training: What is trained, and how. With a seed, the ranks with shard s of the data get seed + s. Without a job
            there are no checkpoints.
        cuda: Outside a job: whether to train on the GPU.

    Returns:
        The metrics, and on rank 0 the states.

    Raises:
        ConfigError: An argument, or what a step does, cannot be combined with another.
        KaleDistError: The ranks do not do the same.
        StoreError: The weights cannot be written; found out before the first epoch, unless a disk gets full.
    """
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        text = (
            "torch needs NumPy to train on several processes, and this rank's Python has none. In pods and containers, "
        )
        raise KaleDistError(f"{text}packages=['numpy'] adds it to the image") from error
    place = context.context()
    device = torch.device(place.device if place.in_job else "cuda" if cuda else "cpu")
    group = Group(device)
    if training.save_to is not None and group.rank == 0:
        saving.check(training.save_to)
    layouts = [training.strategy.layout(rank, group.world_size) for rank in range(group.world_size)]
    layout = layouts[group.rank]
    if training.seed is not None:
        _seed(training.seed + (group.rank if layout.shard is None else layout.shard))
    model, criterion, optimizer, epochs = training.model, training.criterion, training.optimizer, training.epochs
    train_step, train_loader, eval_loader = training.train_step, training.train_data_loader, training.eval_data_loader
    if eval_loader is train_loader:
        # One object cannot give two different shares.
        eval_loader = copy.copy(train_loader)
    with contextlib.ExitStack() as stack:
        loaders = (train_loader, eval_loader)
        trained = Trained(
            model=one_model(model),
            criterion=criterion,
            optimizer=one_optimizer(optimizer),
            scheduler=training.scheduler,
            state=training.kept,
            loaders=tuple(data for data in loaders if data is not None),
        )
        calls = Callbacks(training.callbacks, epochs, model)
        session = Session(stack, group, trained, training, layouts, calls)
        if layout.shard is None:
            session.strategy.serve()
            return TrainingResult(metrics={}, epochs=0)
        if train_step is None:
            scaler = session.control.scaler
            train_step = functools.partial(supervised.train_epoch, scale=None if scaler is None else scaler.scale)
        call_train = functools.partial(
            train_step, model, train_loader, criterion, optimizer, device, training.train_args
        )
        call_eval = None
        if eval_loader is not None:
            step = training.eval_step or supervised.eval_epoch
            call_eval = functools.partial(step, model, eval_loader, criterion, device, training.eval_args)
        given = {"train_args": training.train_args, "eval_args": training.eval_args}
        session.watch((train_step, training.eval_step), given)
        every = training.checkpoint_every or 0
        progress = session.resumption.progress
        for epoch in range(progress.epochs + 1, epochs + 1):
            if progress.stopped:
                break
            values, stopped = session.epoch(epoch, call_train, call_eval)
            progress = Progress(epochs=epoch, values=values, stopped=stopped)
            if every and (epoch % every == 0 or epoch == epochs or stopped):
                session.write_checkpoint(progress)
        extra = calls.results()
        final = session.strategy.full_state()
    result = session.result(progress.values, progress.epochs, final, extra, stopped=progress.stopped)
    if training.save_to is not None and result.model_state is not None:
        saving.save(training.save_to, result.model_state)
        group.say(f"The model was saved to {training.save_to}")
    return result


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class Session:
    """The parts of one training, put together: alters everything in place; the stack undoes it."""

    _captured: Captured | None = None

    def __init__(
        self,
        stack: contextlib.ExitStack,
        group: Group,
        trained: Trained,
        training: Training,
        layouts: Sequence[Layout],
        callbacks: Callbacks,
    ) -> None:
        self.group = group
        """All ranks; in the end those with data."""
        self.layout = layouts[group.rank]
        self._layouts = layouts
        self.callbacks = callbacks
        self.trained = trained
        self._precision = training.precision
        self._profiler: Profiler | None = None
        self._strategy_totals: dict[str, float] = {}
        self._structure = Structure.of(trained.model)
        device = group.device
        stack.enter_context(CLOCK.watching_collectives())
        train_loader, *eval_loaders = trained.loaders
        self._move()
        self.resumption = Resumption(group, trained)
        self.named = trained_tensors(trained.model, trained.criterion, trained.optimizer)
        prints = group.gather(fingerprint(self.named.values())) if not group.is_alone else []
        copy_where_differing(group, list(self.named.items()), prints, "at the start")
        self._first_print = prints[0] if prints else None
        column, row = group.divided(_columns(layouts)), group.divided(sorted({one.peers for one in layouts}))
        pace = Pace(self.layout.shards, training.accumulate)
        self.strategy = _made(training.strategy, self.layout)
        self.strategy.prepare(
            Parts(
                model=trained.model,
                criterion=trained.criterion,
                optimizer=trained.optimizer,
                named=self.named,
                group=group,
                column=column,
                row=row,
                pace=pace,
            ),
            stack,
        )
        if (dispensable := training.strategy.dispensable(group.world_size)) and group.rank == 0:
            # Every connection stands by now, and ranks without data take part in nothing else.
            context.may_lose(dispensable)
        if self.layout.shard is None:
            return
        if any(one.shard is None for one in layouts):
            self.group = group = column
        self.named = trained_tensors(trained.model, trained.criterion, trained.optimizer)
        _follow_lazy_modules((trained.model, trained.criterion), self.strategy)
        needs_scaler = training.train_step is None and training.precision == "fp16"
        scaler = torch.amp.GradScaler(device.type) if needs_scaler else None
        schedules = Schedules(group=group, pace=pace, epochs=training.epochs, alone=loader.length(train_loader))
        schedules.samples = lambda: self._running.samples
        several = trained.optimizer.named.values() if isinstance(trained.optimizer, Optimizers) else ()
        self.control = OptimizerControl(
            next(iter(several), trained.optimizer),
            trained.model,
            group,
            pace,
            self.strategy,
            schedules,
            clip_norm=training.clip_norm,
            precision=training.precision,
            scaler=scaler,
            stepped=callbacks.stepped,
        )
        stack.enter_context(self.control.installed())
        losses = Losses(group, trained.model, lambda: (self.train_feed.epoch, self.train_feed.step))
        stack.enter_context(losses.watched(trained.criterion))
        if training.profile:
            self._profiler = Profiler(training.profile, device, self.strategy)
        self._running = self.train_feed = Feed(
            name="train",
            group=column,
            row=row,
            pace=pace,
            strategy=self.strategy,
            profiler=self._profiler,
            loss=losses.latest,
            epochs=training.epochs,
        )
        self.eval_feed = Feed(name="eval", group=column, row=row, loss=losses.latest, epochs=training.epochs)
        divided = stack.enter_context(contextlib.ExitStack())

        def divide() -> None:
            divided.close()
            pace.world_size = column.world_size
            options: dict[str, Any] = {
                "argument": "train_data_loader",
                "shard": training.shard,
                "split": training.split_batches,
            }
            divided.callback(loader.prepare(train_loader, self.train_feed, accumulate=training.accumulate, **options))
            schedules.here = loader.length(train_loader)
            group.say(self.train_feed.sentence)
            shard_eval = training.eval_sharding == "samples"
            for eval_loader in eval_loaders:
                options |= {"argument": "eval_data_loader", "shard": shard_eval}
                divided.callback(loader.prepare(eval_loader, self.eval_feed, **options))
                note = "metrics are averaged by samples" if shard_eval else "for metrics that are not means"
                group.say(f"{self.eval_feed.sentence}; {note}")

        self._divide = divide
        divide()
        callbacks.prepare(trained.model, self.strategy, layouts, group)
        callbacks.load(self.resumption.callbacks)
        self.resumption.restore_rest(self.control.scaler, self.strategy.load_own_state)
        if not row.is_alone:
            # Peers draw alike, or their dropout would differ.
            states = checkpoint.random_states(device, trained.loaders)
            checkpoint.set_random_states(device, trained.loaders, row.send(states))

    def _move(self) -> None:
        """Bring model, criterion and the optimizer's state to the rank's device."""
        device = self.group.device
        if device.type == "cpu":
            return
        for part in (self.trained.model, self.trained.criterion, *self.trained.state):
            if isinstance(part, torch.nn.Module):
                part.to(device)
        for parameter, state in self.trained.optimizer.state.items():
            for name, value in state.items():
                # Step counts stay where the optimizer keeps them.
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
                    state[name] = value.to(device)

    # -- an epoch --------------------------------------------------------------------------------------------------

    def epoch(
        self, epoch: int, call_train: Callable[[], Any], call_eval: Callable[[], Any] | None
    ) -> tuple[dict[str, float], bool]:
        """Train and evaluate once; return the merged metrics and whether to stop."""
        if self.group.renumber():
            self._divide()
        for data in self.trained.loaders:
            _set_epoch(data, epoch - 1)
        self.control.scheduler_calls.clear()
        trained = self._run("train_step", self.train_feed, epoch, call_train)
        values, stop = trained.values, trained.stop
        evaluated: dict[str, float] = {}
        if call_eval is not None:
            outcome = self._run("eval_step", self.eval_feed, epoch, call_eval)
            evaluated, stop = outcome.values, stop or outcome.stop
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics |= {f"eval/{name}": value for name, value in evaluated.items()}
        if (averages := self.callbacks.evaluates(epoch)) is not None and call_eval is not None:
            with averages:
                outcome = self._run("eval_step", self.eval_feed, epoch, call_eval, source="averaged")
            metrics |= {f"averaged/{name}": value for name, value in outcome.values.items()}
        self._step_scheduler(evaluated.get("loss", values.get("loss")))
        self._name_what_stays()
        if reason := self.callbacks.end_epoch(epoch, metrics):
            self.group.say(reason)
        return merge(values, evaluated), stop or bool(reason)

    def watch(self, steps: Iterable[Any], given: Mapping[str, Any]) -> None:
        """Note what the user's steps can change, so that what does not come back can be named after an epoch."""
        trained = self.trained
        several = trained.optimizer.named.values() if isinstance(trained.optimizer, Optimizers) else ()
        known = (
            trained.model,
            *trained.model.modules(),
            *trained.model.parameters(),
            trained.criterion,
            trained.optimizer,
            *several,
            *trained.state,
        )
        if self.group.rank == 0:
            self._captured = Captured(steps, known, given)

    def _name_what_stays(self) -> None:
        captured, self._captured = self._captured, None
        if captured is None or not (changed := captured.changed()):
            return
        text = f"Changed by a step, and left behind in the ranks: {', '.join(changed)}."
        if objects := [name for name, is_plain in changed.items() if not is_plain]:
            text += (
                f" state=[{', '.join(objects)}] in the call brings back what has a state_dict, lists, dicts and sets."
            )
        if len(objects) < len(changed):
            text += " Keep numbers in a dict, and name that in state=[...], to get them back."
        self.group.say(text)

    def _run(self, name: str, feed: Feed, epoch: int, call: Callable[[], Any], source: str = "") -> Averaged:
        before_s = collective_s()
        feed.begin(epoch)
        self._running = feed
        is_training = feed is self.train_feed
        try:
            with self._autocast():
                returned = call()
        except Exception as error:
            if not isinstance(error, KaleDistError):
                batch = f"batch {feed.step} of {'' if is_training else 'the evaluation after '}epoch {epoch}"
                note_layer(error, self.trained.model, self.trained.criterion, batch)
            raise
        feed.end()
        if is_training:
            if not feed.passes:
                # Before this rank meets the others, who may be in another place. Two ranks see it, whoever of them it is.
                self.group.say(
                    "train_step did not iterate the loader it was given, or its class iterates by itself: data is not"
                    " divided over the ranks, and ranks that do iterate it wait for this one. A loader made in the step over"
                    " data_loader.dataset gives all ranks the same first samples; change the loader before the call instead.",
                    ranks=2,
                )
            if self._profiler is not None:
                self._profiler.end(epoch)
            self.control.flush()
            self.strategy.end_epoch()
        else:
            self.strategy.end_evaluation()
        has_replicas = len(self.layout.replicas) > 1
        prints = fingerprint(self.named.values()) if is_training and has_replicas else []
        numbers = self.strategy.metrics() if is_training else {}
        if is_training and len(self._layouts) > 1:
            # Numbers are summed over ranks.
            numbers["collective_s"] = (collective_s() - before_s) / self.group.world_size
        extra = prints, numbers, feed.rate, self._learning_rates()
        outcome = average(self.group, normalise(name, returned), feed.samples, extra)
        self._mend_learning_rates([rates for *_, rates in outcome.extras], epoch)
        if is_training:
            self._mend_drift([prints for prints, *_ in outcome.extras], epoch)
            # First: the last row of `job.metrics` is what a step returned.
            self._report_strategy([numbers for _, numbers, *_ in outcome.extras], epoch)
            self._report_pace([rate for _, _, rate, _ in outcome.extras], epoch)
            if returned is None:
                self.group.say(
                    "train_step returned nothing, so there are no metrics. Return a number or a dict of numbers, such as"
                    " {'loss': total / len(data_loader)}; they are averaged over the ranks."
                )
            if self._first_print == prints and not self.control.real_steps:
                self.group.say("Training has changed no weight: train_step made no step of the optimizer.")
        if self.group.rank == 0 and outcome.values:
            context.emit(EventKind.METRICS, rank=None, values=outcome.values, epoch=epoch, source=source or feed.name)
        return outcome

    def _mend_drift(self, prints: Sequence[Any], epoch: int) -> None:
        """Weights must be equal on all ranks that hold the same ones."""
        replicas, when = self.layout.replicas, f"after epoch {epoch}"
        if len(replicas) == len(self._layouts):
            copy_where_differing(self.group, list(self.named.items()), prints, when, _DRIFT_HINT)
        elif len(replicas) > 1 and (positions := differing([p for rank, p in enumerate(prints) if rank in replicas])):
            raise KaleDistError(
                f"Weights of {self.layout.part} were not equal on all ranks that hold them {when}"
                f" ({list(self.named)[positions[0]]}).{_DRIFT_HINT}"
            )

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.trained.optimizer.param_groups if "lr" in group]

    def _mend_learning_rates(self, everyone: Sequence[list[float]], epoch: int) -> None:
        """A step that sets learning rates by its own rank's loss would have ranks take different steps from here on."""
        first = everyone[0]
        if all(rates == first for rates in everyone) or any(len(rates) != len(first) for rates in everyone):
            return
        groups = (group for group in self.trained.optimizer.param_groups if "lr" in group)
        for group, rate in zip(groups, first, strict=True):
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
        self.group.say(
            f"Learning rates were not equal on all ranks after epoch {epoch}: rank 0's were copied to all. A step that sets"
            " them by the loss of its own samples does this: pass scheduler= to the call, or average the loss over the"
            " ranks first."
        )

    def _report_strategy(self, everyone: Sequence[Mapping[str, float]], epoch: int) -> None:
        """Sum the strategy's numbers over the ranks, and send them as metrics of the epoch."""
        values: dict[str, float] = {}
        for mine in everyone:
            for name, value in mine.items():
                values[name] = values.get(name, 0.0) + value
        for name, value in values.items():
            before = 0.0 if name in self.strategy.levels else self._strategy_totals.get(name, 0.0)
            self._strategy_totals[name] = before + value
        if values and not self.group.rank:
            context.emit(EventKind.METRICS, rank=None, values=values, epoch=epoch, source="strategy")

    def _report_pace(self, rates: Sequence[float | None], epoch: int) -> None:
        """Send the learning rate and the samples a second of all shards together, as series for trackers."""
        total = sum(rate or 0.0 for rate in rates)
        values = {f"lr{f'_{number}' if number else ''}": rate for number, rate in enumerate(self._learning_rates())}
        if total:
            values["samples_per_s"] = total
        if values and not self.group.rank:
            context.emit(EventKind.METRICS, rank=None, values=values, epoch=epoch, source="pace")

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _PRECISIONS[self._precision]
        if dtype is None:
            return contextlib.nullcontext()
        # The cache of cast weights would outlive the optimizer's steps and freeze the forward pass for the epoch.
        return torch.autocast(self.group.device.type, dtype=dtype, cache_enabled=False)

    def _step_scheduler(self, loss: float | None) -> None:
        scheduler = self.trained.scheduler
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
        rest = None
        if is_wanted():
            own = self.strategy.own_state()
            rest = describe(self.group, self.trained, progress, self.control.scaler, own)
        calls = self.callbacks.state(resumable=is_wanted())
        state = self.strategy.full_state()
        if state is None:
            return
        epoch = progress.epochs
        left_out = checkpoint.write(
            files.checkpoint,
            model=state.model,
            optimizer=state.optimizer,
            scheduler=None if self.trained.scheduler is None else self.trained.scheduler.state_dict(),
            epoch=epoch,
            resume=rest,
            callbacks=calls,
        )
        if left_out:
            self.group.say(
                f"Checkpoints do not hold {', '.join(left_out[:5])}: neither dense tensors nor plain values."
            )
        context.emit(
            EventKind.CHECKPOINT,
            epoch=epoch,
            step=self.control.real_steps,
            path=files.checkpoint.name,
            bytes=files.checkpoint.stat().st_size,
        )
        context.mark_progress()

    def result(
        self, values: dict[str, float], epochs: int, state: FullState | None, extra: dict[str, Any], *, stopped: bool
    ) -> TrainingResult:
        """The outcome, after everything was undone."""
        trace = None if self._profiler is None else self._profiler.trace
        if state is None:
            return TrainingResult(metrics=values, epochs=epochs, stopped_early=stopped, trace=trace)
        changed = self._structure.difference(Structure.of(self.trained.model, state.model))
        return TrainingResult(
            metrics=values,
            epochs=epochs,
            stopped_early=stopped,
            model_state=on_cpu(state.model),
            optimizer_state=on_cpu(state.optimizer),
            scheduler_state=None if self.trained.scheduler is None else on_cpu(self.trained.scheduler.state_dict()),
            state=tuple(map(state_of, self.trained.state)),
            model=self.trained.model if changed else None,
            reason=changed,
            strategy=self._strategy_totals,
            trace=trace,
            **extra,
        )


def _made(settings: Settings, layout: Layout) -> Strategy:
    """The strategy that settings stand for, whose module is imported here."""
    module, _, name = settings.home.partition(".")
    made: Strategy = getattr(importlib.import_module(f"kale_dist.worker.parallel.{module}"), name)(settings, layout)
    return made


def _columns(layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    """The ranks with the same position among their peers, in the order of their shards; each server alone."""
    columns: dict[tuple[str, int], list[int]] = {}
    for rank, one in enumerate(layouts):
        key = ("server", rank) if one.shard is None else ("position", one.peers.index(rank))
        columns.setdefault(key, []).append(rank)
    return [tuple(sorted(ranks, key=lambda rank: (layouts[rank].shard or 0, rank))) for ranks in columns.values()]


def _follow_lazy_modules(roots: Iterable[Any], strategy: Strategy) -> None:
    """Have modules that get their shapes in the first forward pass start from equal values.

    Ranks draw from different seeds, so their own initial values would differ.
    """
    for module in (module for root in roots if isinstance(root, torch.nn.Module) for module in root.modules()):
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            handle: list[Any] = []

            def settle(module: torch.nn.Module, _: Any, handle: list[Any] = handle) -> None:
                if not any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
                    strategy.adopt(module.parameters(recurse=False))
                    handle.pop().remove()

            # Torch's own hook, which makes the parameters, was registered by the constructor and so runs before.
            handle.append(module.register_forward_pre_hook(settle))


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
