"""Steps and a metric as notebooks for Kale have them; pods have no pytest."""

import torch


class Accuracy(torch.nn.Module):
    """As a metric of torchmetrics: called with each batch, `compute` gives the mean."""

    def __init__(self):
        super().__init__()
        self.right, self.seen = 0, 0

    def forward(self, predicted, labels):
        self.right += int((predicted.argmax(1) == labels).sum())
        self.seen += len(labels)
        return self.compute()

    def compute(self):
        return torch.tensor(self.right / max(1, self.seen))


def train_step(model, data_loader, criterion, optimizer, device, args):
    import logging

    log = logging.getLogger(__name__)
    metric = args.get("metric", None)
    if metric:
        metric.to(device)
    for i, (features, labels) in enumerate(data_loader):
        pred = model(features.to(device))
        loss = criterion(pred, labels.to(device))
        if metric:
            metric(pred, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % args.get("log_interval", 2) == 0:
            log.info("Loss = %s", loss.item())


def eval_step(model, data_loader, criterion, device, args):
    import logging

    metric = args.get("metric", None)
    for features, labels in data_loader:
        loss = criterion(model(features.to(device)), labels.to(device))
        if metric:
            metric(model(features), labels)
    logging.getLogger(__name__).info("Accuracy = %s after loss %s", metric.compute().item(), loss.item())
