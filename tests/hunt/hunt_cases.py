"""A case of the hunt: drawn or read from a line, trained by `kd.distribute`, and compared with plain PyTorch.

python tests/hunt/hunt_cases.py 'model=tied-3 strategy=tensor'    # one case
python tests/hunt/hunt_cases.py 7 300                             # 300 cases of the seed 7
python tests/hunt/hunt_cases.py 7:42                              # number 42 of them
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import hunt_tables as tables
import torch
from hunt_found import KNOWN
from torch.utils.data import TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError, JobError, KaleDistError

EQUAL, MAGNIFIED = 1e-9, 1e-5
"""Largest differences, relative to a tensor's largest number or to 1; the second with optimizers that magnify rounding."""

_REMEDY = re.compile(
    r"\b(use|keep|leave|make|pass|call|write|plan|clip|clear|cut|register|decide|give|name|do not|have to|has to|must)\b",
    re.IGNORECASE,
)

_UNTRUE = ("were not equal on all ranks", "Training has changed no weight")
"""What the log must not say of trainings that do the same on all ranks, and train."""


def _pairs(line):
    return dict(pair.split("=") for pair in line.split())


def _rare(draw, table, share):
    """Draw a row; the first one with this probability."""
    first, *others = table
    return first if draw.random() < share else draw.choice(others)


# -- a case -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Names of rows, and numbers."""

    model: str = "mlp"
    loader: str = "plain"
    optimizer: str = "sgd"
    step: str = "plain"
    strategy: str = "ddp"
    ranks: int = 0
    """0 for the strategy's first number."""
    option: str = "none"
    fault: str = "none"
    killed: int = 0
    thing: str = "none"
    place: str = "global"
    samples: int = 22
    criterion: str = "function"

    @classmethod
    def read(cls, line: str) -> Case:
        """Read a line; of alternatives (`a|b`) it takes the first."""
        pairs = {name: value.split("|")[0] for name, value in _pairs(line).items()}
        numbers = {name: int(pairs[name]) for name in ("ranks", "killed", "samples") if name in pairs}
        return cls(**{**pairs, **numbers})

    @classmethod
    def drawn(cls, seed: int, number: int) -> Case:
        """Draw the case of this number until plain PyTorch can run it."""
        draw = random.Random(f"{seed}:{number}")
        while True:
            strategy = draw.choice(list(tables.STRATEGIES))
            case = cls(
                model=draw.choice(list(tables.MODELS)),
                loader=draw.choice(list(tables.LOADERS)),
                optimizer=draw.choice(list(tables.OPTIMIZERS)),
                # The usual step and no fault as often as all others together: two rare things at once hide each other.
                step=_rare(draw, tables.STEPS, 0.3),
                strategy=strategy,
                ranks=draw.choice(tables.STRATEGIES[strategy].ranks),
                option=_rare(draw, tables.OPTIONS, 0.6),
                fault=_rare(draw, tables.FAULTS, 0.8),
                killed=draw.choice(tables.RANKS_KILLED),
                thing=_rare(draw, tables.THINGS, 0.6),
                place=draw.choice(list(tables.PLACES)),
                samples=draw.choice(tables.SAMPLES),
                criterion=draw.choice(list(tables.CRITERIA)),
            )
            if case.step in tables.BY_BATCH and "accumulate" in case.option:
                continue
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                case.expected()
                return case

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        defaults = dataclasses.asdict(Case())
        if self.fault == "none":
            values.pop("killed")
        if self.thing == "none":
            values.pop("place")
        return " ".join(f"{name}={value}" for name, value in values.items() if value != defaults[name]) or "model=mlp"

    def fits(self, line: str) -> bool:
        """Whether the case has all values that a line names."""
        return all(str(getattr(self, name)) in value.split("|") for name, value in _pairs(line).items())

    @property
    def way(self) -> tables.Way:
        return tables.STRATEGIES[self.strategy]

    @property
    def world(self) -> int:
        return self.ranks or self.way.ranks[0]

    @property
    def shards(self) -> int:
        return self.way.settings.layout(0, self.world).shards

    @property
    def restarts(self) -> bool:
        """Whether the fault ends the attempt: servers run no step, and others carry on without an asynchronous worker."""
        settings = self.way.settings
        has_data = settings.layout(self.killed, self.world).shard is not None
        spare = self.killed and any(self.killed in ranks for ranks in settings.dispensable(self.world))
        return self.fault != "none" and has_data and not spare

    # -- what is trained -----------------------------------------------------------------------------------------------

    def made(self):
        """Model and optimizer, equal in each call."""
        torch.manual_seed(3)
        model = tables.MODELS[self.model]().double()
        return model, tables.OPTIMIZERS[self.optimizer](model)

    def data(self):
        """Inputs and targets."""
        made, some = torch.Generator().manual_seed(1), self.samples
        if tables.MODELS[self.model]().data == "words":
            words = torch.randint(0, tables.WORDS, (some, 5), generator=made)
            return TensorDataset(words, words.roll(1, 1))
        x = torch.randn(some, 6, generator=made, dtype=torch.float64)
        return TensorDataset(x, torch.randint(0, tables.CLASSES, (some,), generator=made))

    def made_loader(self, note=None):
        """The loader of one process, with a rank's batch size."""
        return tables.LOADERS[self.loader](tables.Noted(self.data(), note))

    # -- in plain PyTorch ----------------------------------------------------------------------------------------------

    def expected(self):
        """Weights, state of the optimizer and metrics (None where ranks have others) of the same training without kale_dist."""
        n, passes = self.world if self.way.mixes else 1, _Passes(self)
        together = threading.Barrier(n)
        copies = [_Alone(self, passes, rank, n, together) for rank in range(n)]
        for one in copies:
            one.copies = copies
        torch.manual_seed(0)
        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(_Alone.train, copies))[0]  # noqa: RUF015 - an exception of any thread is raised


class _Passes:
    """The passes over a loader, each drawn once: for each step of the optimizer, the batches of all ranks."""

    def __init__(self, case):
        self.case, self.loader, self.lock = case, case.made_loader(), threading.Lock()
        self.drawn, self.evaluated = [], []

    def windows(self, number):
        return self._once(self.drawn, number, self._draw)

    def to_evaluate(self, number):
        make = tables.OPTIONS[self.case.option]["eval_data_loader"]
        return self._once(self.evaluated, number, lambda: tables.joined(list(make(self.loader))))

    def _once(self, drawn, number, draw):
        """Draw for the first rank that comes: each iterator of a loader takes a number from torch's global generator."""
        with self.lock:
            if number == len(drawn):
                drawn.append(draw())
            return drawn[number]

    def _draw(self):
        options, n = tables.OPTIONS[self.case.option], self.case.shards
        is_split, window = "split_batches" in options, options.get("accumulate", 1)
        batches, size = list(self.loader), 1 if is_split else n
        chunks = [batches[start : start + size] for start in range(0, len(batches), size)]
        if self.loader.drop_last and len(chunks[-1]) < size:
            chunks.pop()
        is_divided = is_split and self.case.loader == "batch-sampler"
        share = _in_order if is_divided else tables.SHARES.get(self.case.loader, _in_order)
        dealt = [share(chunk, n) for chunk in chunks]
        return [dealt[start : start + window] for start in range(0, len(dealt), window)]

    @property
    def has_idle(self):
        """Whether a rank had nothing in a batch, and so repeated a sample."""
        return any(
            not len(share[0]) for windows in self.drawn for window in windows for ranks in window for share in ranks
        )


def _in_order(batches, n):
    return list(zip(*(torch.tensor_split(part, n) for part in tables.joined(batches)), strict=True))


class _Alone:
    """A training in this thread: that of one process, or of one rank of several that mix their weights."""

    def __init__(self, case, passes, rank, n, together):
        self.case, self.passes, self.rank, self.n, self.together = case, passes, rank, n, together
        self.model, self.optimizer = case.made()
        self.stepping = getattr(self.optimizer, "base_optimizer", self.optimizer)
        self.dataset = passes.loader.dataset
        self.factor, self.steps, self.number = 1.0, 0, -1

    def train(self):
        try:
            return self._train()
        except BaseException:
            self.together.abort()
            raise

    def _train(self):
        case, options, sampler = self.case, tables.OPTIONS[self.case.option], self.passes.loader.sampler
        if self.n > 1:
            self._watch()
        if "clip_norm" in options:
            self.stepping.register_step_pre_hook(self._clip)
        args = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)}
        scheduler = options["scheduler"](self.optimizer) if "scheduler" in options else None
        metrics = None
        for epoch in range(tables.EPOCHS):
            getattr(sampler, "set_epoch", tables.leave)(epoch)
            self.steps = 0
            step = tables.STEPS[case.step]
            metrics = step(self.model, self, tables.criterion, self.optimizer, torch.device("cpu"), args)
            self._mix(range(self.n))
            if "eval_data_loader" in options:
                data = self.passes.to_evaluate(epoch)
                metrics = metrics and {**metrics, "eval_loss": self.model.loss(*data).item()}
            if scheduler is not None:
                scheduler.step()
        is_own = self.n > 1 or self.passes.has_idle
        return self.model.state_dict(), self.optimizer.state_dict(), None if is_own else metrics

    # As a loader:

    def __len__(self):
        len(self.passes.loader)  # raises where there is no length
        return len(self.passes.windows(max(0, self.number)))

    def __iter__(self):
        self.number += 1
        for window in self.passes.windows(self.number):
            everything = tables.joined([share for ranks in window for share in ranks])
            mine = tables.joined([ranks[self.rank] for ranks in window]) if self.n > 1 else everything
            self.factor = self.n * len(mine[0]) / len(everything[0])
            # As ranks do: a repeated batch decides which parameters have a gradient.
            yield mine if len(mine[0]) else tables.joined([ranks[0] for ranks in window])

    # As a rank:

    def _watch(self):
        """Weigh gradients by the samples of the rank, as ranks do, and mix weights after steps."""
        for p in self.model.parameters():
            is_trained = p.requires_grad
            # A gradient that goes into a loss is weighed with that.
            p.requires_grad_(True).register_hook(lambda g: g if torch.is_grad_enabled() else g * self.factor)
            p.requires_grad_(is_trained)

        if self.case.step == "copy":  # whose gradients come past the hooks

            def weigh(*_):
                for p in self.model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(self.factor)

            self.stepping.register_step_pre_hook(weigh)

        def stepped(*_):
            self.steps += 1
            self._mix(self.case.way.mixes(self.steps, self.rank, self.n))

        self.stepping.register_step_post_hook(stepped)

    def _clip(self, _, args, kwargs):
        """Clip before a step; in a step that evaluates a closure, after the closure has made the gradients."""

        def clip(result=None):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), tables.OPTIONS[self.case.option]["clip_norm"])
            return result

        optimizer, *closures = args
        if not closures:
            return clip()
        return (optimizer, lambda: clip(closures[0]())), kwargs

    def _mix(self, whose):
        """Take the mean of the weights of these ranks. All ranks call this together."""
        if self.n == 1:
            return
        self.together.wait(20)
        means = [
            sum(several) / len(whose) for several in zip(*(self.copies[one].weights() for one in whose), strict=True)
        ]
        self.together.wait(20)
        with torch.no_grad():
            for p, mean in zip(self.model.parameters(), means, strict=True):
                p.copy_(mean)

    def weights(self):
        return [p.detach() for p in self.model.parameters()]


# -- on ranks -----------------------------------------------------------------------------------------------------------


def trained(case):
    """Train by `kd.distribute`: weights, state of the optimizer, metrics, log, attempts, and how often samples were read."""
    model, optimizer = case.made()
    with tempfile.NamedTemporaryFile() as note:
        loader = case.made_loader(note.name if case.way.only_learns else None)
        options = {}
        for name, value in tables.OPTIONS[case.option].items():
            needed = optimizer if name == "scheduler" else loader
            options[name] = value(needed) if callable(value) else value
        thing, criterion = tables.THINGS[case.thing].make(), tables.CRITERIA[case.criterion]()
        touch, twin = tables.THINGS[case.thing].touch, None
        if touch is not None:
            twin = copy.deepcopy(thing)
            for _ in range(tables.EPOCHS):
                touch(twin)
        args = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}
        holder = {"train_args": args, "model": vars(model), "optimizer": vars(optimizer)}.get(case.place)
        if holder is not None and case.thing != "none":
            holder["thing"] = thing
        job = kd.distribute(
            model, loader, criterion, optimizer, _step(case, thing), train_args=args, epochs=tables.EPOCHS, seed=0,
            strategy=case.way.settings, number_of_processes=case.world, threads=1, on="local",
            max_restarts=int(case.fault != "none"), timeout_s=60, **options,
        )  # fmt: skip
        try:
            metrics = job.result().metrics
            log = "\n".join(line.text for line in job.logs())
            read = pathlib.Path(note.name).read_text().split()
            comes_back = touch and not tables.THINGS[case.thing].said
            touched = [("the thing", tables.contents(thing), tables.contents(twin))] if comes_back else []
            if case.criterion == "buffer":
                touched.append(("the table", criterion.thirds, torch.full((5,), 1 / 3)))
            return model.state_dict(), optimizer.state_dict(), metrics, log, job.status.attempt, read, touched
        except JobError as error:
            error.add_note("\n".join(line.text for line in job.logs())[-3000:])
            raise
        finally:
            job.delete()


_CELL = """
def cell(thing):
    def train_step(model, loader, criterion, optimizer, device, args):
        begin_epoch(*fault)
        touch({the_thing})
        return step(model, loader, criterion, optimizer, device, args)

    return train_step

train_step = cell(None{closed})
"""


def _step(case, thing):
    """The step as a cell of a notebook defines it: its globals are the notebook's."""
    notebook = {
        "__name__": "__main__",
        "begin_epoch": tables.begin_epoch,
        "fault": (case.fault, case.killed),
        "touch": tables.THINGS[case.thing].touch or tables.leave,
        "step": tables.STEPS[case.step],
        "thing_of_notebook": thing,
        "box": {"thing": thing},
        "given": thing,
    }
    closed = " or given" if case.place == "closure" else ""
    exec(_CELL.format(the_thing=tables.PLACES[case.place], closed=closed), notebook)
    return notebook["train_step"]


# -- the verdict --------------------------------------------------------------------------------------------------------


def found(case):
    """What is wrong with a case; empty if nothing is. A refusal is right if it says what to do instead."""
    expected = case.expected()
    try:
        got = trained(case)
    except KaleDistError as error:
        cause = error.__cause__ if isinstance(error, JobError) else error
        if isinstance(cause, ConfigError) or (isinstance(cause, KaleDistError) and _REMEDY.search(str(cause))):
            return ""
        return f"failed: {type(cause).__name__}: {cause}"
    return "; ".join(_wrong(case, expected, *got))


def _wrong(case, expected, weights, state, metrics, log, attempt, read, touched):
    if attempt != int(case.restarts):
        yield f"attempt {attempt}"
    if case.way.only_learns:
        yield from _not_learnt(case, weights, expected[0], read)
    else:
        tolerance = MAGNIFIED if case.optimizer in tables.ADAPTIVE else EQUAL
        yield from _unequal("weights", weights, expected[0], tolerance)
        if case.way.mixes is None:
            yield from _unequal("optimizer", state, expected[1], tolerance)
        # A step that is called again within an epoch counts the rest of it.
        if expected[2] is not None and "its own variables begin again" not in log:
            yield from _unequal("metrics", metrics, {**metrics, **expected[2]}, tolerance)
        yield from (f"the log says {sentence!r}" for sentence in _UNTRUE if sentence in log)
    if said := tables.THINGS[case.thing].said:
        name = {"dict": "box", "closure": "thing", "global": "thing_of_notebook"}.get(case.place, case.place)
        if not re.search(said.format(name), log) and (case.shards > 1 or case.thing != "second-loader"):
            yield f"the log does not say that {name} was changed"
    for one in touched:
        yield from _unequal(*one, 1e-12)


def _unequal(what, mine, theirs, tolerance):
    """The first difference of two states."""
    if isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            yield f"{what} has {sorted(mine.keys() ^ theirs.keys(), key=str)}"
            return
        for key, value in theirs.items():
            if wrong := next(_unequal(f"{what} {key}", mine[key], value, tolerance), None):
                yield wrong
                return
    elif isinstance(theirs, list | tuple):
        yield from _unequal(what, dict(enumerate(mine)), dict(enumerate(theirs)), tolerance)
    elif isinstance(theirs, torch.Tensor | float):
        mine, theirs = (torch.as_tensor(each).detach().to_dense() for each in (mine, theirs))
        if mine.shape != theirs.shape:
            yield f"{what} is of shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
        elif mine.numel():
            off = (mine - theirs).abs().max().item()
            if not off <= tolerance * max(1.0, theirs.abs().max().item()):
                yield f"{what} differs by {off:.2g}"
    elif mine != theirs:
        yield f"{what} is {mine!r}, not {theirs!r}"


def _not_learnt(case, weights, of_one, read):
    (model, _), data = case.made(), case.data()

    def loss(state):
        model.load_state_dict(state)
        return model.loss(*data.tensors).item()

    before, after, alone = (loss(state) for state in (copy.deepcopy(model.state_dict()), weights, of_one))
    if not after < max(before, alone + 0.05):
        yield f"the loss was {before:.4f} and is {after:.4f}; that of one process is {alone:.4f}"
    passes = tables.EPOCHS * {"leaves-early": 0, "goes-twice": 2}.get(case.step, 1)
    if case.loader in tables.ALL_ONCE and passes and case.fault == "none" and case.option != "evaluates":
        counts = collections.Counter(map(int, read))
        if min(counts[index] for index in range(len(data))) < passes:
            yield f"not every sample was read {passes} times: {sorted(counts.items())}"
        # In the last step of a pass, a rank without samples repeats one.
        if counts.total() > passes * (len(data) + case.shards - 1):
            yield f"samples were read more than {passes} times: {sorted(counts.items())}"


# -- many cases ---------------------------------------------------------------------------------------------------------


def hunted(seed, numbers):
    """Try the cases of these numbers; yields those that are wrong and not known, with what is wrong."""
    for number in numbers:
        case = Case.drawn(seed, number)
        begun = time.monotonic()
        if known := next((one for one in KNOWN if case.fits(one.case)), None):
            print(f"{seed}:{number} {case}: known: {known.why}", flush=True)
            continue
        wrong = found(case)
        print(f"{seed}:{number} {case}: {wrong or 'right'} ({time.monotonic() - begun:.1f} s)", flush=True)
        if wrong:
            yield f"{seed}:{number} {case}", wrong


def main(what, *count):
    """Run what the command line names."""
    import own_state

    with tempfile.TemporaryDirectory(prefix="kd-", dir="/tmp") as folder:
        own_state.move_into(pathlib.Path(folder))
        if "=" in what:
            print(found(Case.read(what)) or "right")
            return
        seed, _, number = what.partition(":")
        numbers = [int(number)] if number else range(int(count[0]))
        wrong = list(hunted(int(seed), numbers))
    print(f"\n{len(wrong)} of {len(numbers)} are wrong")
    for line, why in wrong:
        print(f"- {line}\n  {why}")


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    import hunt_cases  # what ranks import by name

    hunt_cases.main(*sys.argv[1:])
