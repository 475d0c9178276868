"""Ready-made steps for supervised learning, used where `train_step` or `eval_step` is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import ConfigError
from kale_dist.wire import context
from kale_dist.worker.training.data.moving import move
from kale_dist.worker.training.result import on_cpu

_LEFT_OUT = -100
"""PyTorch's `ignore_index`."""


def train_epoch(
    model: Any,
    data_loader: Any,
    criterion: Any,
    optimizer: Any,
    device: Any,
    args: Any = None,  # noqa: ARG001 - the signature of every train_step
    *,
    scale: Callable[[Tensor], Tensor] | None = None,
    totals: Totals | None = None,
    is_divided: bool = False,
) -> dict[str, float]:
    """Train one epoch: `loss = criterion(model(x), y)`, backward, step.

    Args:
        model: Takes the inputs of a batch.
        data_loader: Yields pairs (inputs, targets), or mappings with `labels`, `label`, `targets` or `target`.
        criterion: Takes outputs and targets, returns the mean loss. None for a model that takes the whole batch with its
            `labels` and returns an output with a `loss`, as Hugging Face's models do.
        optimizer: Steps once a batch.
        device: Where the batches are to be.
        args: Not used.
        scale: Multiplies the loss before the backward pass (16-bit floats); None for none.
        totals: Sums to add to, as where the epoch continues; None for new ones.
        is_divided: Whether other ranks have other parts of each batch.

    Returns:
        `loss`, and `accuracy` where outputs are class scores (N, C, ...) and targets are whole numbers (N, ...).
    """
    model.train()
    totals = totals or Totals()
    for number, batch in enumerate(data_loader):
        optimizer.zero_grad()
        loss, outputs, targets = _forward(model, criterion, batch, device)
        if is_divided and not number:
            _note_left_out(criterion, targets)
        (loss if scale is None else scale(loss)).backward()
        optimizer.step()
        totals.add(loss, outputs, targets)
    return totals.means()


def _note_left_out(criterion: Any, targets: Any) -> None:
    is_mean = getattr(criterion, "reduction", "mean") == "mean"
    if not is_mean or not isinstance(targets, Tensor) or targets.is_floating_point() or context.context().rank:
        return
    if (targets == (left_out := getattr(criterion, "ignore_index", _LEFT_OUT))).any():
        context.log_once(
            f"Targets of {left_out} are left out of the loss, which is the mean over the others of each rank: where ranks have"
            " unequally many, the gradient is not that of one process."
        )


def eval_epoch(model: Any, data_loader: Any, criterion: Any, device: Any, args: Any = None) -> dict[str, float]:  # noqa: ARG001
    """Evaluate once without gradients; arguments and result are those of `train_epoch`."""
    model.eval()
    totals = Totals()
    with torch.no_grad():
        for batch in data_loader:
            totals.add(*_forward(model, criterion, batch, device))
    return totals.means()


class Totals:
    """Sums over the samples of an epoch, kept on the device so that nothing waits for it."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._correct: Tensor | None = None
        self._samples = 0
        self._predictions = 0

    def add(self, loss: Tensor, outputs: Any, targets: Any) -> None:
        """Add a batch: its mean loss, and what the model made of it."""
        size = len(targets) if isinstance(targets, Tensor) and targets.dim() else 1
        self._samples += size
        weighted = loss.detach().double() * size
        self._loss = weighted if self._loss is None else self._loss + weighted
        if (
            isinstance(outputs, Tensor)
            and isinstance(targets, Tensor)
            and outputs.dim() > 1
            and targets.shape == outputs.shape[:1] + outputs.shape[2:]
            and not targets.is_floating_point()
        ):
            correct = (outputs.detach().argmax(1) == targets).sum()
            self._correct = correct if self._correct is None else self._correct + correct
            self._predictions += targets.numel()

    def state(self) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        found: dict[str, Any] = on_cpu(vars(self))
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; tensors get to the device with the next batch."""
        vars(self).update(state)

    def means(self) -> dict[str, float]:
        """`loss`, and `accuracy` where it is known."""
        if self._loss is None:
            return {}
        metrics = {"loss": self._loss.item() / max(1, self._samples)}
        if self._correct is not None and self._predictions:
            metrics["accuracy"] = self._correct.item() / self._predictions
        return metrics


def _forward(model: Any, criterion: Any, batch: Any, device: Any) -> tuple[Any, Any, Any]:
    """Run the model on a batch; return loss, outputs and targets."""
    device = torch.device(device)
    if criterion is not None:
        inputs, targets = _pair(batch, device)
        outputs = _call(model, inputs)
        try:
            return criterion(outputs, targets), outputs, targets
        except Exception as error:
            if hasattr(outputs, "logits"):
                error.add_note(
                    f"{type(model).__name__} computes its own loss: give no criterion (None), and batches as dicts with `labels`."
                )
            raise
    # Datasets name it `label` as often as `labels`, the name that the models take.
    given = (
        {"labels" if key == "label" else key: value for key, value in batch.items()}
        if isinstance(batch, Mapping)
        else {}
    )
    given = move(given, device)
    outputs = model(**given) if "labels" in given else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        shown = f"a batch with {', '.join(map(str, given))}" if given else f"a {type(batch).__name__}"
        raise ConfigError(
            "criterion",
            f"it is None, and {type(model).__name__} gives no loss for {shown}",
            "Give batches as dicts with `labels`, pass a loss function, or write a train_step (and an eval_step)",
        )
    return loss, getattr(outputs, "logits", None), given["labels"]


def _pair(batch: Any, device: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and targets, on the device."""
    if isinstance(batch, Mapping):
        for name in ("labels", "label", "targets", "target"):
            if name in batch:
                inputs = {key: value for key, value in batch.items() if key != name}
                return move(inputs, device), move(batch[name], device)
    elif isinstance(batch, tuple | list) and len(batch) == 2:  # noqa: PLR2004 - a pair
        return move(batch[0], device), move(batch[1], device)
    shown = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
    if isinstance(batch, Mapping):
        shown = f"dicts with {', '.join(map(repr, batch))}, of which none is 'labels' or 'target'"
    raise ConfigError(
        "train_step",
        f"is left out, and the loader's batches are not pairs (inputs, targets) but {shown}",
        "Write a train_step (and an eval_step) for these batches",
    )


def _call(model: Any, inputs: Any) -> Any:
    if not isinstance(inputs, Mapping):
        return model(inputs)
    return model(next(iter(inputs.values()))) if len(inputs) == 1 else model(**inputs)
