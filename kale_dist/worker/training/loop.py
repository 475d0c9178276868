"""The training loop of one rank: epochs around the user's steps, with everything that makes n ranks act as one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.snapshot.changes import Arrived, Changes
from kale_dist.snapshot.origin import Origin
from kale_dist.strategies import Layout
from kale_dist.wire import MetricRow, context, events
from kale_dist.wording import listed
from kale_dist.worker.training import checkpoint, model_file, parts, supervised
from kale_dist.worker.training.callback_runner import Callbacks
from kale_dist.worker.training.checkpoint import Stored
from kale_dist.worker.training.clock import CLOCK, collective_s
from kale_dist.worker.training.contents import Checkpoint, Given, Position, Progress, RankPosition, Resume
from kale_dist.worker.training.data.batches import Feed, Role
from kale_dist.worker.training.data.generators import RandomStates, seed_generators
from kale_dist.worker.training.data.loader import Loaders
from kale_dist.worker.training.data.sharding import Pace
from kale_dist.worker.training.notices import STOPPED, OtherLoaders, OwnLosses, note_layer
from kale_dist.worker.training.optimizer import OptimizerControl, Schedules
from kale_dist.worker.training.parts import Folders, Made
from kale_dist.worker.training.rank_group import Group, bits_of, copy_where_differing, differing, fingerprint
from kale_dist.worker.training.result import (
    Averaged,
    Structure,
    TrainingResult,
    average,
    merge,
    normalise,
    on_cpu,
    state_of,
)
from kale_dist.worker.training.resumption import Resumption
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.strategy import FullState, Parts, Strategy
from kale_dist.worker.training.trained import Trained, own_parameters
from kale_dist.worker.training.within import Within

_NAMED = 5
"""At most so many of the objects that a step has changed are named."""

_PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}

_DRIFT_HINT = (
    " A step or a forward changes them by random numbers, or by what a rank's own samples give (torch.autograd.grad, max_norm= of"
    " an Embedding). Draw from a generator that all ranks seed alike, and average the rest by torch.distributed.all_reduce"
)


def train(training: Training, *, cuda: bool = False, origin: Origin | None = None) -> TrainingResult:
    """Train a model in this rank, together with all ranks of the ready process group (or alone, without one).

    The objects are altered in place while this runs and are as before when it ends, but for what was learnt. For the
    gradient of n ranks to be that of one process with the global batch, `criterion` has to average over samples; one
    that sums gives that gradient divided by the number of ranks, where all have as many samples.

    Args:
        training: What is trained, and how. With a seed, the ranks with shard s of the data get seed + s. Without a job
            there are no checkpoints.
        cuda: Outside a job: whether to train on the GPU.
        origin: Where the job's snapshot has the bytes of what arrived.

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
    group = Group(torch.device(place.device if place.in_job else "cuda" if cuda else "cpu"))
    if training.save_to is not None and group.rank == 0:
        model_file.check(training.save_to)
    with contextlib.ExitStack() as stack:
        made = parts.make(training, group)
        training = made.training
        setup = Setup.make(made, group, origin, stack)
        if setup.layout.shard is None:
            setup.strategy.serve()
            return TrainingResult(metrics={}, epochs=0)
        session = Session.build(setup, stack)
        progress = session.run()
        extra, folders = session.callbacks.results() | {"changes": tuple(session.changes())}, made.folders
        if folders is None:
            final = session.strategy.full_state()
        else:
            final = None if group.rank else parts.outlines(setup.trained)
            extra |= {"parts": folders.save_model(setup.trained.model), "rest": folders.rest}
    result = session.result(progress, final, extra)
    if training.save_to is not None and result.model_state is not None:
        model_file.save(training.save_to, result.model_state)
        group.log(f"The model was saved to {training.save_to}")
    return result


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A training after its first steps: its objects have equal values on all ranks, and the strategy has altered them."""

    training: Training
    trained: Trained
    arrived: Arrived
    """The objects of the call as they were then."""
    given: Given
    structure: Structure
    """The model's, as it was at the call."""
    layouts: Sequence[Layout]
    """The layouts of all ranks."""
    layout: Layout
    """This rank's."""
    resumption: Resumption
    parts: Parts
    strategy: Strategy
    folders: Folders | None
    """The folders of the states, where no rank holds them whole."""

    @classmethod
    def make(cls, made: Made, group: Group, origin: Origin | None, stack: contextlib.ExitStack) -> Setup:
        """Seed the rank, load the last checkpoint, copy what differs from rank 0's, and prepare the strategy.

        Args:
            made: What is trained, and how.
            group: All ranks.
            origin: Where the job's snapshot has the bytes of what arrived.
            stack: Undoes everything.
        """
        training, folders = made.training, made.folders
        layouts = [training.strategy.layout(rank, group.world_size) for rank in range(group.world_size)]
        layout = layouts[group.rank]
        if training.seed is not None:
            seed_generators(training.seed + (group.rank if layout.shard is None else layout.shard))
        trained = Trained.of(training)
        datasets = training.datasets
        data, roots = {*map(id, (*trained.loaders, *datasets.values()))}, lambda: training.objects() | datasets
        arrived = Arrived(roots, covered=training.covered, datasets=data, origin=origin)
        given = Given.of(training, trained, group.world_size, origin.digest if origin else "")
        structure = Structure.of(trained.model)
        stack.enter_context(CLOCK.watching_collectives())
        module, _, name = training.strategy.home.partition(".")
        kind = getattr(importlib.import_module(f"kale_dist.worker.parallel.{module}"), name)
        strategy: Strategy = kind(training.strategy, layout)
        if not strategy.divides:
            trained.move_to(group.device)
        resumption = Resumption(group, trained, given, arrived, is_in_parts=folders is not None)
        named = trained.tensors()
        # Without values they are alike.
        prints = group.gather(fingerprint(named.values())) if not group.is_alone and made.construction is None else []
        if names := copy_where_differing(group, list(named.items()), prints):
            group.log(
                f"Weights were not equal on all ranks at the start ({names}): rank 0's were copied to all.", warns=True
            )
        parts = Parts(
            model=trained.model,
            criterion=trained.criterion,
            optimizer=trained.optimizer,
            named=named,
            group=group,
            column=group.divided(_columns(layouts)),
            row=group.divided(sorted({one.peers for one in layouts})),
            pace=Pace(layout.shards, training.accumulate),
            move=functools.partial(trained.move_to, group.device),
            construction=made.construction,
            are_weights_read=folders is not None and folders.fills(resumption.found.parts),
        )
        with arrived.passing_over():
            strategy.prepare(parts, stack)
        if folders is not None:
            has_optimizer = resumption.differences.has_optimizer
            folders.fill(trained.model, trained.optimizer, resumption.found.parts, has_optimizer=has_optimizer)
        if (dispensable := training.strategy.dispensable(group.world_size)) and group.rank == 0:
            # Every connection stands by now, and ranks without data take part in nothing else.
            context.may_lose(dispensable)
        return cls(
            training=training,
            trained=trained,
            arrived=arrived,
            given=given,
            structure=structure,
            layouts=layouts,
            layout=layout,
            resumption=resumption,
            parts=parts,
            strategy=strategy,
            folders=folders,
        )

    @property
    def group(self) -> Group:
        """The ranks with data."""
        return self.parts.column if any(one.shard is None for one in self.layouts) else self.parts.group


@dataclasses.dataclass(kw_only=True)
class Session:
    """The epochs of one training, in a rank with data."""

    setup: Setup
    training: Training
    trained: Trained
    group: Group
    """The ranks with data."""
    strategy: Strategy
    named: Mapping[str, torch.Tensor]
    """The parameters that training may change, as the strategy has left them."""
    loaders: Loaders
    control: OptimizerControl
    losses: OwnLosses
    callbacks: Callbacks
    drifts: int = 0
    """After how many epochs weights were not equal on all ranks."""
    bits: list[int]
    """Of this rank's weights at the start; empty from the end of the first epoch on."""
    strategy_totals: dict[str, float] = dataclasses.field(default_factory=dict)
    """The strategy's numbers, added up over ranks and epochs."""
    within: Within = dataclasses.field(init=False)
    progress: Progress = dataclasses.field(default_factory=Progress)
    """The finished epochs."""
    told: set[str] = dataclasses.field(default_factory=set)
    """The changes that were named: after the first epoch, and after the last one, as some begin late."""

    @classmethod
    def build(cls, setup: Setup, stack: contextlib.ExitStack) -> Session:
        """Take over the optimizer and the loaders, and resume from the checkpoint if there is one.

        Args:
            setup: The training; its strategy is prepared.
            stack: Undoes everything.
        """
        training, trained, strategy, group = setup.training, setup.trained, setup.strategy, setup.group
        is_slow = training.precision == "bf16" and group.device.type == "cuda"
        if is_slow and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(group.device)
            group.log(f"precision='bf16' is emulated on this GPU ({name}), and slow. Use precision='fp16'.")
        _follow_lazy_modules((trained.model, trained.criterion), strategy)
        losses = OwnLosses(group, trained.model)
        loaders = _loaders(setup, losses)
        callbacks = Callbacks(training, trained.model, strategy, setup.layouts, group)
        control = _control(setup, loaders, callbacks)
        stack.enter_context(control.installed())
        stack.enter_context(losses.watched(trained.criterion, loaders, strategy.passed))
        stack.callback(loaders.restore)
        loaders.divide()
        if setup.layout.shards > 1 and training.shard:
            OtherLoaders(training, loaders, group, setup.parts.group).watch(stack)
        callbacks.load(setup.resumption.callbacks)
        setup.resumption.restore_rest(control.scaler, strategy.load_own_state)
        if not setup.parts.row.is_alone:
            # Peers draw alike, or their dropout would differ.
            states = RandomStates.now(group.device, trained.loaders)
            setup.parts.row.send(states).restore(group.device, trained.loaders)
        session = cls(
            setup=setup,
            training=training,
            trained=trained,
            group=group,
            strategy=strategy,
            named=trained.tensors(),
            loaders=loaders,
            control=control,
            losses=losses,
            callbacks=callbacks,
            bits=bits_of(trained.tensors().values()),
        )
        resumption = setup.resumption
        control.real_steps = resumption.before.steps
        seed = torch.initial_seed() if resumption.seed is None else resumption.seed
        for feed in (loaders.train, loaders.evaluation):
            feed.seed, feed.was_read = seed, resumption.progress.epochs > 0
        session.within = Within(
            training.checkpoint_every, trained, group, strategy, resumption, control, loaders.train,
            session.write_checkpoint, session.stops,
        )  # fmt: skip
        return session

    def run(self) -> Progress:
        """Train the epochs that are left, and write the checkpoints that are due."""
        self.progress = self.setup.resumption.progress
        epochs, every = self.training.epochs, self.training.checkpoint_every
        try:
            for epoch in range(self.progress.epochs + 1, epochs + 1):
                if self.progress.stopped:
                    break
                self.progress = self.epoch(epoch)
                is_last = epoch == epochs or self.progress.stopped
                if isinstance(every, int):
                    is_due = is_last or epoch % every == 0
                else:
                    is_due = self.within.ends_epoch(is_last=is_last)
                if is_due:
                    self.write_checkpoint()
        except BaseException:
            # The process ends with this error, and a checkpoint that is being written would be lost.
            try:
                self.within.writing.wait()
            except Exception as error:  # noqa: BLE001 - it is not why the training ends
                self.group.log(f"The last checkpoint is lost: {error}")
            raise
        self.within.writing.wait()
        if self.drifts > 1:
            self.group.log(f"Weights were not equal on all ranks after {self.drifts} epochs.")
        return self.progress

    # -- an epoch --------------------------------------------------------------------------------------------------

    def epoch(self, epoch: int) -> Progress:
        """Train and evaluate once."""
        if self.group.renumber():
            self.loaders.divide()
        self.loaders.set_epoch(epoch - 1)
        self.control.scheduler_calls.clear()
        trained = self._train(epoch)
        values, stop = trained.values, trained.stop
        evaluated: dict[str, float] = {}
        if self.trained.eval_loader is not None:
            outcome = self._evaluate(epoch)
            evaluated, stop = outcome.values, stop or outcome.stop
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics |= {f"eval/{name}": value for name, value in evaluated.items()}
        if (averages := self.callbacks.evaluates(epoch)) is not None and self.trained.eval_loader is not None:
            with averages:
                outcome = self._evaluate(epoch, source="averaged")
            metrics |= {f"averaged/{name}": value for name, value in outcome.values.items()}
        self._step_scheduler(evaluated.get("loss", values.get("loss")))
        if epoch in (self.setup.resumption.progress.epochs + 1, self.training.epochs):
            self._name_what_differs()
        if reason := self.callbacks.end_epoch(epoch, metrics):
            self.group.log(reason)
        return Progress(epochs=epoch, values=merge(values, evaluated), stopped=stop or bool(reason))

    def _name_what_differs(self) -> None:
        """Log what the ranks have changed each in its own way, and what cannot be sent, each once. All ranks call this."""
        digests, left = self.setup.arrived.digests()
        everyone = self.group.gather(digests)
        names = [name for name, first in digests.items() if any(one.get(name, first) != first for one in everyone)]
        names, stay = ([name for name in found if name not in self.told] for found in (names, left))
        self.told.update(names, stay)
        if names:
            self.group.log(
                f"Changed on each rank in its own way: {listed(names, _NAMED)}. Rank 0's comes back, and is every rank's after a"
                " restart. Floating-point buffers of the model and the criterion are averaged after each epoch; average others by"
                " torch.distributed.all_reduce."
            )
        if stay:
            self.group.log(
                f"Changed by a step, and left behind in the ranks: {listed(stay, _NAMED)}. Put it into a dict that is there before"
                " the call, as a tensor, an array or a plain value; or pass the list, dict or object that has it as state=[...].",
                warns=True,
            )

    def changes(self) -> list[Changes]:
        """In rank 0, what the ranks have changed besides their states: all that it has, and what others alone have. All ranks call this."""
        arrived = self.setup.arrived
        mine = None if self.group.rank else arrived.changes()[0]
        places = self.group.send(mine and mine.places)
        mine = mine or arrived.changes(without=places)[0]
        return [one for one in self.group.gather(mine, in_first=True) if one.places]

    def _train(self, epoch: int) -> Averaged:
        """Call the user's train_step, and bring the ranks to one state."""
        training, feed = self.training, self.loaders.train
        before_s = collective_s()
        scaler, totals = self.control.scaler, supervised.Totals()
        scale = None if scaler is None else scaler.scale
        is_divided = self.setup.layout.shards > 1
        ready_made = functools.partial(supervised.train_epoch, scale=scale, totals=totals, is_divided=is_divided)
        self.within.begin_epoch(None if training.train_step else totals)
        returned = self._call(
            training.train_step or ready_made,
            feed,
            epoch,
            (training.model, self.trained.train_loader, training.criterion, training.optimizer),
            training.train_args,
        )
        if not feed.counts.passes:
            # Before this rank meets the others, who may be in another place. Two ranks see it, whoever of them it is.
            self.group.log(
                "train_step did not iterate the loader it was given, or the loader's class overrides `__iter__`: the data is not sharded."
                " Where the step makes a loader of its own, all ranks read the same: make it before the call, and pass it.",
                ranks=2,
                warns=True,
            )
        self.control.flush()
        self._follow_names()
        self.strategy.end_epoch()
        prints = fingerprint(self.named.values()) if len(self.setup.layout.replicas) > 1 else []
        numbers = self.strategy.metrics()
        if len(self.setup.layouts) > 1:
            # Numbers are summed over ranks.
            numbers["collective_s"] = (collective_s() - before_s) / self.group.world_size
        mine = prints, bool(self.bits) and bits_of(self.named.values()) == self.bits, self.losses.rows()
        self.bits = []
        outcome = self._average("train_step", feed, epoch, returned, mine, numbers)
        self._mend_drift([prints for (prints, *_), *_ in outcome.extras], epoch)
        self.losses.compare_rows([rows for (*_, rows), *_ in outcome.extras])
        self.control.note_own_rates()
        # First: the last row of `job.metrics` is what a step returned.
        self._report_strategy([numbers for _, numbers, *_ in outcome.extras], epoch)
        self._report_pace([rate for _, _, rate, *_ in outcome.extras], epoch)
        if all(is_unchanged for (_, is_unchanged, _), *_ in outcome.extras):
            self._note_unchanged()
        self._emit(outcome.values, epoch, feed.role.name, feed.counts.from_batch)
        return outcome

    def _note_unchanged(self) -> None:
        """Log that the weights are, bit for bit, those of the call, and why that may be."""
        steps, others = self.control.real_steps, self.control.other_steps
        made = f"the optimizer made {steps} steps. Is loss.backward() missing, or is the learning rate 0?"
        if not steps:
            made = f"train_step made no step of the optimizer that it got{f', and {others} of others, for other weights' * bool(others)}."
        self.group.log(f"Training has changed no weight of the model: {made}", warns=True)

    def _evaluate(self, epoch: int, source: str = "eval") -> Averaged:
        """Call the user's eval_step; its metrics are emitted under the name `source`."""
        training, feed = self.training, self.loaders.evaluation
        step = training.eval_step or supervised.eval_epoch
        given = (training.model, self.trained.eval_loader, training.criterion)
        returned = self._call(step, feed, epoch, given, training.eval_args)
        self.strategy.end_evaluation()
        outcome = self._average("eval_step", feed, epoch, returned, None, {})
        self._emit(outcome.values, epoch, source)
        return outcome

    def _call(self, step: Callable[..., Any], feed: Feed, epoch: int, given: tuple[Any, ...], args: Any) -> Any:
        """Call a step with what it is given, the device and its `args`; return what it returns."""
        feed.begin(epoch)
        self.loaders.running = feed
        try:
            with self._autocast():
                returned = step(*given, self.group.device, args)
        except Exception as error:
            if not isinstance(error, KaleDistError):
                self.strategy.explain(error)
                batch = f"batch {feed.step} of {'' if feed.role.is_training else 'the evaluation after '}epoch {epoch}"
                note_layer(error, self.trained.model, self.trained.criterion, batch)
            raise
        # An iterator that the step keeps continues later.
        feed.change_to(None)
        return returned

    def _average(
        self, name: str, feed: Feed, epoch: int, returned: Any, mine: Any, numbers: Mapping[str, float]
    ) -> Averaged:
        """Average what a step returned over the ranks, and make learning rates equal."""
        if isinstance(returned, list) or (returned is None and feed.role.is_training):
            self.group.log(
                f"{name} returned {'nothing' if returned is None else 'a list'}, so there are no metrics. Return a number or a dict of"
                " numbers, such as {'loss': total / len(data_loader)}; they are averaged over the ranks.",
                warns=True,
            )
        extra = mine, numbers, feed.rate, self.losses.of_epoch() or {}, self.stops(), self._learning_rates()
        outcome = average(self.group, normalise(name, returned), feed.counts.samples, extra)
        self._emit_losses([losses for *_, losses, _, _ in outcome.extras], feed)
        if any(stops for *_, stops, _ in outcome.extras):
            raise KaleDistError(STOPPED)
        self._mend_learning_rates([rates for *_, rates in outcome.extras], epoch)
        return outcome

    def _emit(self, values: Mapping[str, float], epoch: int, source: str, from_batch: int = 0) -> None:
        if self.group.rank == 0 and values:
            row = MetricRow(values=tuple(values.items()), epoch=epoch, source=source, from_batch=from_batch)
            context.emit(row, is_of_job=True)

    def _emit_losses(self, ranks: Sequence[Mapping[int, tuple[float, float]]], feed: Feed) -> None:
        """Send the losses of an epoch's batches, each the mean over the ranks that have kept it."""
        if self.group.rank == 0 and (kept := sorted(set().union(*ranks))):
            found = [[losses[step] for losses in ranks if step in losses] for step in kept]
            means = [(some[0][0], sum(loss for _, loss in some) / len(some)) for some in found]
            batches = tuple((step, *mean) for step, mean in zip(kept, means, strict=True))
            steps = None if feed.counts.first is None else feed.counts.first.steps
            context.emit(events.EpochLosses(epoch=feed.counts.epoch, steps=steps, batches=batches), is_of_job=True)

    def _follow_names(self) -> None:
        """Take note of parameters that the step or a forward has replaced, or raise an error where ranks have parts of the old ones."""
        named = self.trained.tensors()
        gone = [name for name, parameter in self.named.items() if named.get(name) is not parameter]
        if gone and self.strategy.divides and not self.setup.parts.group.is_alone:
            raise KaleDistError(
                f"The training replaced or renamed the parameter {gone[0]}, as pruning does, and each rank has a part of the"
                " model as it was at the call. Do that before the call, or use strategy='ddp'"
            )
        self.named = named

    def _mend_drift(self, prints: Sequence[Any], epoch: int) -> None:
        """Make weights equal again where they drifted apart, or raise an error where no rank holds all of them."""
        replicas, when = self.setup.layout.replicas, f"after epoch {epoch}"
        if len(set(map(len, prints))) > 1:
            raise KaleDistError(
                f"The model did not have the same parameters on all ranks {when}: the step or a forward makes or removes some on"
                " some ranks only. Make them all before the call"
            )
        if len(replicas) == len(self.setup.layouts):
            if not self.control.real_steps and (positions := differing(prints)):
                raise KaleDistError(
                    f"train_step changed weights without optimizer.step(), on each rank by its own data ({list(self.named)[positions[0]]}"
                    f" differs {when}). Compute the gradients by loss.backward(), which averages them over the ranks, or"
                    " assign them to p.grad and call optimizer.step()"
                )
            if names := copy_where_differing(self.group, list(self.named.items()), prints):
                if not self.drifts:
                    text = f"Weights were not equal on all ranks {when} ({names}): rank 0's were copied to all.{_DRIFT_HINT}."
                    self.group.log(text, warns=True)
                self.drifts += 1
        elif len(replicas) > 1 and (positions := differing([p for rank, p in enumerate(prints) if rank in replicas])):
            raise KaleDistError(
                f"Weights of {self.setup.layout.part} were not equal on all ranks that hold them {when}"
                f" ({list(self.named)[positions[0]]}).{_DRIFT_HINT}"
            )

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups_with_rate()]

    def _groups_with_rate(self) -> list[dict[str, Any]]:
        """The optimizer's groups that have a learning rate; Adafactor may compute its own and have None."""
        return [group for group in self.trained.optimizer.param_groups if group.get("lr") is not None]

    def _mend_learning_rates(self, everyone: Sequence[list[float]], epoch: int) -> None:
        """Copy rank 0's learning rates to all ranks where a step has set them by the loss of its own rank."""
        first = everyone[0]
        if all(rates == first for rates in everyone) or any(len(rates) != len(first) for rates in everyone):
            return
        for group, rate in zip(self._groups_with_rate(), first, strict=True):
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
        if not differing(everyone, tolerance=1e-5):
            # By rounding alone.
            return
        self.group.log(
            f"Learning rates were not equal on all ranks after epoch {epoch}: rank 0's were copied to all. A step that sets"
            " them by the loss of its own samples does this: pass scheduler= to the call, or average the loss over the"
            " ranks first.",
            warns=True,
        )

    def _report_strategy(self, everyone: Sequence[Mapping[str, float]], epoch: int) -> None:
        """Sum the strategy's numbers over the ranks, and send them as metrics of the epoch."""
        values: dict[str, float] = {}
        for mine in everyone:
            for name, value in mine.items():
                values[name] = values.get(name, 0.0) + value
        for name, value in values.items():
            before = 0.0 if name in self.strategy.levels else self.strategy_totals.get(name, 0.0)
            self.strategy_totals[name] = before + value
        self._emit(values, epoch, "strategy")

    def _report_pace(self, rates: Sequence[float | None], epoch: int) -> None:
        """Send the learning rate and the samples a second of all shards together, as series for trackers."""
        total = sum(rate or 0.0 for rate in rates)
        values = {f"lr{f'_{number}' if number else ''}": rate for number, rate in enumerate(self._learning_rates())}
        if total:
            values["samples_per_s"] = total
        self._emit(values, epoch, "pace")

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = _PRECISIONS[self.training.precision]
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
        else:
            scheduler.step()

    # -- what remains ----------------------------------------------------------------------------------------------

    @CLOCK.phase("checkpoint")
    def write_checkpoint(self, position: Position | None = None, mine: RankPosition | None = None) -> None:
        """Write the states of rank 0 into the job's folder, if there is one and no weight is nan. All ranks have to call this.

        Args:
            position: Where the epoch is that has begun; None between epochs.
            mine: This rank's part of that.
        """
        files, within = context.context().files, self.within
        if files is None or self._is_spoilt():
            return
        progress, steps = self.progress, self.control.real_steps
        resume, calls = self.resume(position, mine), self.callbacks.state()
        folders, is_asked, within.is_asked = self.setup.folders, within.is_asked, False
        state = self.strategy.full_state() if folders is None else parts.outlines(self.trained)
        if state is None:
            return
        contents = Checkpoint(
            model=state.model,
            optimizer=state.optimizer,
            scheduler=None if self.trained.scheduler is None else self.trained.scheduler.state_dict(),
            epoch=progress.epochs,
            resume=resume,
            callbacks=calls,
        )

        def write(whole: Stored) -> None:
            checkpoint.save(files.checkpoint, whole)
            batches, size = 0 if position is None else position.batches, files.checkpoint.stat().st_size
            context.emit(
                events.CheckpointWritten(
                    epoch=progress.epochs,
                    step=steps,
                    batches=batches,
                    asked=is_asked,
                    path=files.checkpoint.name,
                    bytes=size,
                )
            )

        if folders is not None:
            left_out = folders.write_checkpoint(self.trained, contents, write)
        else:
            left_out = within.writing.write(contents, write, at_once=is_asked)
        if left_out:
            self.group.log(
                f"Checkpoints do not hold {listed(left_out, _NAMED)}, which are neither dense tensors nor plain values: they come"
                " back in the end, but a restart has them as they were at the call.",
                warns=True,
            )
        context.mark_progress()

    def _is_spoilt(self) -> bool:
        """Whether a loss was nan in any rank, and its weights are nan now: the last good checkpoint is to stay then."""
        is_spoilt = any(self.group.gather(self._holds_nan(waits=True)))
        if is_spoilt and self.training.stop_on_nan:
            raise KaleDistError(STOPPED)
        if is_spoilt:
            self.group.log("Weights are nan: no checkpoint is written from here on.", warns=True)
            if self.within.is_asked and self.group.rank == 0:
                context.can_save(can=False)
            self.within.is_asked = False
        return is_spoilt

    def _holds_nan(self, *, waits: bool) -> bool:
        return bool(self.losses.have_spoilt((*self.named.values(), *self.trained.model.buffers()), waits=waits))

    def stops(self) -> bool:
        """Whether this rank is one because of which the training is to stop. Nothing is exchanged, and no GPU waited for."""
        return self.training.stop_on_nan and self._holds_nan(waits=False)

    def resume(self, position: Position | None, mine: RankPosition | None) -> Resume:
        """Collect what a checkpoint holds besides the states, in rank 0; arguments as for `write_checkpoint`."""
        trained, scaler = self.trained, self.control.scaler
        # On the CPU: unpickled, a tensor of a GPU would be on that GPU in rank 0.
        own = on_cpu(self.strategy.own_state())
        states = RandomStates.now(self.group.device, trained.loaders)
        everyone = self.group.gather((states, own, self.loaders.train.seed, mine), in_first=True)
        random, strategy, seeds, positions = zip(*everyone, strict=True)
        return Resume(
            given=self.setup.given,
            random=random,
            strategy=strategy,
            seeds=seeds,
            steps=self.control.real_steps,
            position=None if position is None else dataclasses.replace(position, ranks=positions),
            criterion=trained.criterion.state_dict() if isinstance(trained.criterion, torch.nn.Module) else None,
            evaluating=[name for name, module in trained.model.named_modules() if not module.training],
            frozen=[name for name, parameter in trained.model.named_parameters() if not parameter.requires_grad],
            state=[state_of(value) for value in trained.state],
            changes=self.changes(),
            scaler=None if scaler is None else scaler.state_dict(),
            values=self.progress.values,
            stopped=self.progress.stopped,
        )

    def result(self, progress: Progress, state: FullState | None, extra: Mapping[str, Any]) -> TrainingResult:
        """The outcome in this rank, after everything was undone.

        Args:
            progress: How far the training is.
            state: The strategy's full state before that; None in all ranks but rank 0.
            extra: Results of the callbacks.
        """
        outcome = TrainingResult(metrics=progress.values, epochs=progress.epochs, stopped_early=progress.stopped)
        if state is None:
            return outcome
        trained, is_whole = self.trained, self.setup.folders is None
        changed = self.setup.structure.difference(Structure.of(trained.model, state.model))
        return dataclasses.replace(
            outcome,
            model_state=on_cpu(state.model) if is_whole else None,
            optimizer_state=on_cpu(state.optimizer) if is_whole else None,
            scheduler_state=None if trained.scheduler is None else on_cpu(trained.scheduler.state_dict()),
            state=tuple(map(state_of, trained.state)),
            model=trained.model if changed else None,
            reason=changed,
            strategy=self.strategy_totals,
            **extra,
        )


# -- parts of a session ----------------------------------------------------------------------------------------------


def _loaders(setup: Setup, losses: OwnLosses) -> Loaders:
    """The loaders with their feeds, not divided yet."""
    parts = setup.parts
    evaluation = Role(name="eval", group=parts.column, row=parts.row, epochs=setup.training.epochs, loss=losses.latest)
    train = dataclasses.replace(evaluation, name="train", pace=parts.pace, strategy=setup.strategy)
    feed = Feed(role=train)
    return Loaders(setup.training, setup.trained, setup.group, feed, Feed(role=evaluation, training=feed))


def _control(setup: Setup, loaders: Loaders, callbacks: Callbacks) -> OptimizerControl:
    """Make the object that decides about steps of the optimizer, without installing it."""
    training, trained, group, pace = setup.training, setup.trained, setup.group, setup.parts.pace
    schedules = Schedules(group=group, pace=pace, epochs=training.epochs, loaders=loaders)
    return OptimizerControl(trained, setup.strategy, schedules, training, callbacks.stepped)


def _columns(layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    """The ranks with the same position among their peers, in the order of their shards; each server alone."""
    columns: dict[tuple[str, int], list[int]] = {}
    for rank, one in enumerate(layouts):
        key = ("server", rank) if one.shard is None else ("position", one.peers.index(rank))
        columns.setdefault(key, []).append(rank)
    return [tuple(sorted(ranks, key=lambda rank: (layouts[rank].shard or 0, rank))) for ranks in columns.values()]


def _follow_lazy_modules(roots: Iterable[Any], strategy: Strategy) -> None:
    """Make modules that get their shapes in the first forward pass start from equal values on all ranks.

    Ranks draw from different seeds, so their own initial values would differ.
    """
    for module in (module for root in roots if isinstance(root, torch.nn.Module) for module in root.modules()):
        if any(map(torch.nn.parameter.is_lazy, own_parameters(module))):
            handle: list[Any] = []

            def adopt(module: torch.nn.Module, _: Any, handle: list[Any] = handle) -> None:
                if not any(map(torch.nn.parameter.is_lazy, own_parameters(module))):
                    strategy.adopt(own_parameters(module))
                    handle.pop().remove()

            # Torch's own hook, which makes the parameters, was registered by the constructor and so runs before.
            handle.append(module.register_forward_pre_hook(adopt))
