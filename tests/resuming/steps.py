"""Steps as users write them, each with what is special about it, and where a training with it resumes within an epoch."""

import itertools
import threading

import torch
from tqdm import tqdm

import kale_dist as kd
from kale_dist.worker.training import supervised

EXACT = "exact"
"""It resumes at the batch of the checkpoint: weights and optimizer are those of the undisturbed training to the last bit."""

STEERS = "steers"
"""It resumes there, too, with other weights: what it computes them from begins again with the step."""

FALLS_BACK = "falls back"
"""It resumes after the last whole epoch, and the log says why."""

CASES = {}


def case(outcome=EXACT, **options):
    """Add a step to the cases; `options` say what else is special about its training."""

    def add(step):
        CASES[step.__name__] = step, outcome, options
        return step

    return add


def learn(model, criterion, optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# -- exact -----------------------------------------------------------------------------------------------------------


@case()
def running_loss(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    for x, y in loader:
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total / len(loader)}


@case(STEERS)
def enumerated_with_a_warm_up(model, loader, criterion, optimizer, device, args):
    model.train()
    total, seen = 0.0, 0
    for i, (x, y) in enumerate(loader, 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * i
        total += learn(model, criterion, optimizer, x, y).item()
        seen += i
    return {"loss": total, "seen": seen}


@case(STEERS)
def hidden_state(model, loader, criterion, optimizer, device, args):
    model.train()
    hidden = torch.zeros(4, device=device)
    for x, y in loader:
        loss = learn(model, criterion, optimizer, x + 0.1 * hidden, y)
        hidden = (0.5 * hidden + x.mean(0)).detach()
    return {"hidden": hidden.sum().item(), "loss": loss.item()}


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0
        self.values = []

    def update(self, value, n):
        self.sum += value * n
        self.count += n
        self.values.append(value)


@case()
def average_meter(model, loader, criterion, optimizer, device, args):
    model.train()
    meter = AverageMeter()
    for x, y in loader:
        meter.update(learn(model, criterion, optimizer, x, y).item(), len(x))
    return {"loss": meter.sum / meter.count, "number": len(meter.values)}


@case()
def nonlocal_in_a_closure(model, loader, criterion, optimizer, device, args):
    total = 0.0

    def add(value):
        nonlocal total
        total += value

    model.train()
    for x, y in loader:
        add(learn(model, criterion, optimizer, x, y).item())
    return {"loss": total}


@case(STEERS)
def break_by_number(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        if i == 9:
            break
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case()
def own_accumulation(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / 2
        loss.backward()
        total += loss.item()
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": total}


@case(STEERS)
def first_weights(model, loader, criterion, optimizer, device, args):
    model.train()
    first = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        optimizer.zero_grad()
        pull = sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), first, strict=True))
        loss = criterion(model(x), y) + pull
        loss.backward()
        optimizer.step()
    return {"pull": pull.item()}


@case()
def loop_in_a_helper(model, loader, criterion, optimizer, device, args):
    def run(stats):
        for i, (x, y) in enumerate(loader):
            stats["loss"] += learn(model, criterion, optimizer, x, y).item()
            stats["last"] = i

    stats = {"loss": 0.0, "last": 0}
    model.train()
    run(stats)
    return stats


@case()
def through_tqdm(model, loader, criterion, optimizer, device, args):
    model.train()
    total, bar = 0.0, tqdm(loader, disable=False)
    for i, (x, y) in enumerate(bar):
        total += learn(model, criterion, optimizer, x, y).item() + i
        bar.set_postfix(loss=total)
    return {"loss": total}


@case()
def tqdm_with_update(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    with tqdm(total=len(loader)) as bar:
        for x, y in loader:
            total += learn(model, criterion, optimizer, x, y).item()
            bar.update(1)
    return {"loss": total}


@case(calls=24, says=True)
def two_passes(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    for _ in range(2):
        for x, y in loader:
            total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.total, self.steps = model, optimizer, 0.0, {"done": 0}

    def epoch(self, loader, criterion):
        for x, y in loader:
            self.total += learn(self.model, criterion, self.optimizer, x, y).item()
            self.steps["done"] += 1


@case()
def loop_in_a_method(model, loader, criterion, optimizer, device, args):
    model.train()
    trainer = Trainer(model, optimizer)
    trainer.epoch(loader, criterion)
    return {"loss": trainer.total, "done": trainer.steps["done"]}


@case()
def catches_exceptions(model, loader, criterion, optimizer, device, args):
    model.train()
    skipped, total = 0, 0.0
    for i, (x, y) in enumerate(loader):
        try:
            total += learn(model, criterion, optimizer, x, y).item()
            if i % 3 == 0:
                int("a bad batch")
        except ValueError:
            skipped += 1
            continue
        finally:
            total += 1
    return {"loss": total, "skipped": skipped}


@case()
def a_name_that_shadows_ours(model, loader, criterion, optimizer, device, args):
    model.train()
    enumerate, feed, self = 0, 0.0, []  # noqa: A001
    for batches, portion in loader:
        feed += learn(model, criterion, optimizer, batches, portion).item()
        enumerate += 1  # noqa: A001
        self.append(feed)
    return {"loss": feed, "batches": enumerate, "last": self[-1]}


@case()
def recursion(model, loader, criterion, optimizer, device, args, depth=2):
    if depth:
        return recursion(model, loader, criterion, optimizer, device, args, depth - 1)
    total = 0.0
    for x, y in loader:
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case()
def two_names_of_a_list(model, loader, criterion, optimizer, device, args):
    model.train()
    current, other = [0.0], [1.0]
    for x, y in loader:
        current.append(learn(model, criterion, optimizer, x, y).item())
        current, other = other, current
    return {"current": sum(current), "other": sum(other), "is_longer": len(current) > len(other)}


@case()
def deletes_its_batch(model, loader, criterion, optimizer, device, args):
    model.train()
    total = 0.0
    for x, y in loader:
        loss = learn(model, criterion, optimizer, x, y)
        total += loss.item()
        del x, y, loss
    return {"loss": total}


@case()
def threads_in_the_step(model, loader, criterion, optimizer, device, args):
    model.train()
    found = []
    for x, y in loader:
        loss = learn(model, criterion, optimizer, x, y)
        thread = threading.Thread(target=found.append, args=(loss.item(),))
        thread.start()
        thread.join()
    return {"loss": sum(found), "number": len(found)}


@case(STEERS)
def a_wrapping_generator(model, loader, criterion, optimizer, device, args):
    def looking_ahead():
        held = None
        for batch in loader:
            if held is not None:
                yield held
            held = batch
        yield held

    model.train()
    total = 0.0
    for x, y in looking_ahead():
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case()
def a_set_an_array_and_an_ema(model, loader, criterion, optimizer, device, args):
    import copy

    import numpy as np

    model.train()
    seen, sums, teacher = set(), np.zeros(2), copy.deepcopy(model)
    for x, y in loader:
        loss = learn(model, criterion, optimizer, x, y)
        seen.update(y.tolist())
        sums[y[0]] += loss.item()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(0.1 * q)
    return {"seen": len(seen), "sums": float(sums.sum()), "teacher": sum(p.sum().item() for p in teacher.parameters())}


@case()
def scheduler_before_the_loop(model, loader, criterion, optimizer, device, args):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    return supervised.train_epoch(model, loader, criterion, optimizer, device)


@case()
def own_optimizer_of_a_local_model(model, loader, criterion, optimizer, device, args):
    torch.manual_seed(1)
    extra = torch.nn.Linear(4, 1).to(device)
    other = torch.optim.Adam(extra.parameters(), lr=0.1)
    model.train()
    for x, y in loader:
        learn(model, criterion, optimizer, x, y)
        other.zero_grad()
        gap = extra(x.detach()).pow(2).mean()
        gap.backward()
        other.step()
    return {"gap": gap.item()}


# -- from the epoch's start, said -------------------------------------------------------------------------------------


@case()
def zipped(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for (x, y), k in zip(loader, itertools.count(), strict=False):
        total += learn(model, criterion, optimizer, x, y).item() * k
    return {"loss": total}


@case(STEERS)
def sliced(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for x, y in itertools.islice(loader, 10):
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case()
def next_of_iter(model, loader, criterion, optimizer, device, args):
    total, it = 0.0, iter(loader)
    for _ in range(len(loader)):
        x, y = next(it)
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case()
def comprehension(model, loader, criterion, optimizer, device, args):
    return {"loss": sum([learn(model, criterion, optimizer, x, y).item() for x, y in loader])}


@case()
def generator_in_sum(model, loader, criterion, optimizer, device, args):
    return {"loss": sum(learn(model, criterion, optimizer, x, y).item() for x, y in loader)}


@case()
def one_iterator_in_several_loops(model, loader, criterion, optimizer, device, args):
    total, it = 0.0, iter(loader)
    for part in range(4):
        for i, (x, y) in enumerate(it):
            total += learn(model, criterion, optimizer, x, y).item() * (part + 1)
            if i == 2:
                break
    return {"loss": total}


@case()
def step_as_generator(model, loader, criterion, optimizer, device, args):
    def losses():
        for x, y in loader:
            yield learn(model, criterion, optimizer, x, y).item()

    it, total = losses(), 0.0
    while (value := next(it, None)) is not None:
        total += value
    return {"loss": total}


@case()
def a_second_loader_beside(model, loader, criterion, optimizer, device, args):
    other, total = iter(kd.share(torch.utils.data.DataLoader(torch.arange(64.0), 2))), 0.0
    for x, y in loader:
        total += learn(model, criterion, optimizer, x, y).item() * next(other).sum().item()
    return {"loss": total}


@case(FALLS_BACK)
def nested_loaders(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        total += learn(model, criterion, optimizer, x, y).item()
        for a, b in loader:
            total += learn(model, criterion, optimizer, a, b).item() / 100
            if i:
                break
        if i == 2:
            break
    return {"loss": total}


COUNT = 0


@case()
def a_global_counter(model, loader, criterion, optimizer, device, args):
    global COUNT  # noqa: PLW0603
    total = 0.0
    for x, y in loader:
        COUNT += 1
        total += learn(model, criterion, optimizer, x, y).item()
    return {"loss": total}


@case(STEERS)
def gradients_that_are_never_cleared(model, loader, criterion, optimizer, device, args):
    optimizer.zero_grad()
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return {"loss": total}


@case()
def a_deque_with_a_generator(model, loader, criterion, optimizer, device, args):
    numbers, total = (k * k for k in range(100)), 0.0
    for x, y in loader:
        total += learn(model, criterion, optimizer, x, y).item() * next(numbers)
    return {"loss": total}


@case(STEERS)
def own_random_generator(model, loader, criterion, optimizer, device, args):
    import random

    own, total = random.Random(3), 0.0
    for x, y in loader:
        total += learn(model, criterion, optimizer, x + own.random(), y).item()
    return {"loss": total}


@case(FALLS_BACK)
def a_prefetching_thread(model, loader, criterion, optimizer, device, args):
    import queue

    batches, total = queue.Queue(2), 0.0

    def read():
        for batch in loader:
            batches.put(batch)
            # The training takes it before the next one is read, as the library's count of batches needs it.
            batches.join()
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := batches.get()) is not None:
        total += learn(model, criterion, optimizer, *batch).item()
        batches.task_done()
    return {"loss": total}


@case(FALLS_BACK)
def weights_changed_before_the_loop(model, loader, criterion, optimizer, device, args):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.95)
    return supervised.train_epoch(model, loader, criterion, optimizer, device)
