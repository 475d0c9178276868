"""A step that takes its time, for pods, which have no pytest."""

import time


def train_slowly(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
        time.sleep(args)
    return {"loss": total}
