"""The training loop of one rank: epochs around the user's steps, with everything that makes n ranks act as one."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kale_dist.errors import ConfigError
from kale_dist.runtime import context
from kale_dist.strategies import AllReduce, Strategy
from kale_dist.training import supervised
from kale_dist.training.checkpoint import Progress
from kale_dist.training.group import Group
from kale_dist.training.objects import one_model, one_optimizer
from kale_dist.training.result import TrainingResult
from kale_dist.training.session import PRECISIONS, Session


def train(
    *,
    model: torch.nn.Module | dict[str, torch.nn.Module],
    train_data_loader: torch.utils.data.DataLoader[Any],
    criterion: Any,
    optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer],
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
    state: Sequence[Any] = (),
) -> TrainingResult:
    """Train a model in this rank, together with all ranks of the ready process group (or alone, without one).

    The objects are altered in place while this runs and are as before when it ends, but for what was learnt. For the
    gradient of n ranks to be that of one process with the global batch, `criterion` has to average over samples; one
    that sums gives that gradient divided by the number of ranks.

    Args:
        model: The model, or several by name.
        train_data_loader: Its batch size is that of one rank, unless `split_batches`.
        criterion: Passed to the steps.
        optimizer: Over the model's parameters, or several by name.
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
        state: Other objects whose contents come back from rank 0: with a `state_dict`, or lists, dicts and sets.

    Returns:
        The metrics, and on rank 0 the states.

    Raises:
        ConfigError: An argument, or what a step does, cannot be combined with another.
        KaleDistError: The ranks do not do the same.
    """
    if precision not in PRECISIONS:
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
        session = Session(
            group=group,
            model=one_model(model),
            criterion=criterion,
            optimizer=one_optimizer(optimizer),
            state=tuple(state),
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
        call_train = _bind_train(session, train_step, model, train_data_loader, optimizer, train_args)
        call_eval = None
        if eval_data_loader is not None:
            step = eval_step or supervised.eval_epoch
            call_eval = functools.partial(step, model, eval_data_loader, criterion, device, eval_args)
        arguments = {"train_args": train_args, "eval_args": eval_args}
        session.watch((train_step, eval_step), arguments)
        every = checkpoint_every or 0
        progress = session.resumption.progress
        for epoch in range(progress.epochs + 1, epochs + 1):
            if progress.stopped:
                break
            values, stopped = session.epoch(epoch, call_train, call_eval)
            progress = Progress(epochs=epoch, values=values, stopped=stopped)
            if every and (epoch % every == 0 or epoch == epochs or stopped):
                session.write_checkpoint(progress)
    return session.result(progress.values, progress.epochs, stopped=progress.stopped)


def _bind_train(
    session: Session, step: Callable[..., Any] | None, model: Any, data: Any, optimizer: Any, args: Any
) -> Callable[[], Any]:
    if step is None:
        scaler = session.control.scaler
        step = functools.partial(supervised.train_epoch, scale=None if scaler is None else scaler.scale)
    return functools.partial(step, model, data, session.criterion, optimizer, session.group.device, args)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
