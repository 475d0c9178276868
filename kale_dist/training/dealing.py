"""Who gets which indices: the samplers that a rank's loader draws from."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import SequentialSampler

from kale_dist.training import sharding
from kale_dist.training.group import Group
from kale_dist.training.pace import Portion
from kale_dist.training.views import View


class Dealer(View):
    """Stands in for a loader's sampler or batch sampler and gives this rank's part of every chunk.

    The order of a pass is drawn once, by rank 0 at the first batch (so rank 0's generators are used as one process
    would use them), and sent to all. Without a length it is drawn and sent chunk by chunk.

    Args:
        shown: The object that this one stands in for.
        source: What is drawn from: gives indices, or whole batches of them.
        group: The ranks.
        per_chunk: Items of `source` in the chunk of one step.
        items: Kind of the items: `samples` (a chunk is divided), `batches` (dealt whole) or `split` (each batch is a
            chunk and is divided).
        single: Whether to give bare indices instead of lists of them.
        drop_unit: Only multiples of so many items are used; 1 for all.
        aligned: Whether all ranks take the same number of steps.
        accumulate: Steps in an accumulation window.
    """

    def __init__(
        self,
        shown: Any,
        source: Any,
        group: Group,
        *,
        per_chunk: int,
        items: str = "samples",
        single: bool = False,
        drop_unit: int = 1,
        aligned: bool = True,
        accumulate: int = 1,
    ) -> None:
        super().__init__(shown, self._steps)
        fields = {
            "_kale_source": source,
            "_kale_group": group,
            "_kale_per_chunk": per_chunk,
            "_kale_items": items,
            "_kale_single": single,
            "_kale_drop_unit": drop_unit,
            "_kale_aligned": aligned,
            "_kale_accumulate": accumulate,
            "kale_portions": collections.deque(),
            "kale_samples": None,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_kale_", "kale_")):
            raise AttributeError(name)
        return super().__getattr__(name)

    def _steps(self) -> int:
        """Steps of this rank in a pass.

        Raises:
            TypeError: The source has no length.
        """
        used = len(self._kale_source) // self._kale_drop_unit * self._kale_drop_unit
        steps = -(-used // self._kale_per_chunk)
        if self._kale_aligned or not steps:
            return int(steps)
        last = used - (steps - 1) * self._kale_per_chunk
        has_last = self._kale_items == "split" or last > self._kale_group.rank
        return int(max(1, steps - (not has_last)))

    def __iter__(self) -> Iterator[Any]:
        # Each pass has its own queue: two passes may be under way at once.
        portions: collections.deque[Portion] = collections.deque()
        object.__setattr__(self, "kale_portions", portions)
        return self._deal(portions)

    def _deal(self, portions: collections.deque[Portion]) -> Iterator[Any]:
        rank, world = self._kale_group.rank, self._kale_group.world_size
        given = 0
        whole = self._kale_items == "batches"
        for index, (chunk, last, window) in enumerate(self._chunks()):
            samples = chunk[0] if self._kale_items == "split" else chunk
            if whole:
                mine = list(samples[rank]) if rank < len(samples) else []
                total = sum(map(len, samples))
            else:
                mine = sharding.part(samples, rank, world)
                total = len(samples)
            local = len(mine)
            if not mine:
                if not self._kale_aligned and index:
                    continue
                mine = list(samples[0]) if whole else [samples[0]]
            given += local
            object.__setattr__(self, "kale_samples", given)
            portions.append(Portion(index=index, local=local, total=total, last=last, window=window))
            yield mine[0] if self._kale_single else mine

    def _chunks(self) -> Iterator[tuple[list[Any], bool, int | None]]:
        """The chunks of a pass, whether each is the last, and the samples of its accumulation window."""
        size = self._kale_per_chunk
        try:
            len(self._kale_source)
        except (TypeError, NotImplementedError):
            yield from ((chunk, last, None) for chunk, last in _drawn_ahead(self._kale_source, size, self._kale_group))
            return
        order = self._draw()
        used = len(order) // self._kale_drop_unit * self._kale_drop_unit
        sizes = [1] * used if self._kale_items == "samples" else [len(batch) for batch in order[:used]]
        per_window = size * self._kale_accumulate
        for start in range(0, used, size):
            first = start // per_window * per_window
            window = sum(sizes[first : first + per_window]) if self._kale_items != "samples" else None
            if window is None:
                window = min(per_window, used - first)
            yield order[start : min(start + size, used)], start + size >= used, window

    def _draw(self) -> Any:
        source = self._kale_source
        if type(source) is SequentialSampler:
            return range(len(source))
        group = self._kale_group
        return group.send(list(source) if group.rank == 0 else None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("the sampler of a training loader stays in its rank")


def _drawn_ahead(source: Iterable[Any], size: int, group: Group) -> Iterator[tuple[list[Any], bool]]:
    """Chunks of a source without length, drawn by rank 0 one ahead so that the last one is known to be it."""
    items = iter(source) if group.rank == 0 else iter(())
    ahead = list(itertools.islice(items, size))
    while True:
        current = ahead
        if group.rank == 0:
            ahead = list(itertools.islice(items, size))
        chunk, last = group.send((current, not ahead))
        if chunk:
            yield chunk, last
        if last:
            return


class Counter(View):
    """Stands in for a sampler or batch sampler that is taken as it is, and notes the size of each batch."""

    def __init__(self, inner: Any, *, single: bool) -> None:
        super().__init__(inner)
        object.__setattr__(self, "_kale_single", single)
        object.__setattr__(self, "kale_portions", collections.deque())

    def __iter__(self) -> Iterator[Any]:
        sizes: collections.deque[int] = collections.deque()
        object.__setattr__(self, "kale_portions", sizes)
        return self._count(sizes)

    def _count(self, sizes: collections.deque[int]) -> Iterator[Any]:
        for item in self._kale_inner:
            sizes.append(1 if self._kale_single else len(item))
            yield item
