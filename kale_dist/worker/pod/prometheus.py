"""A job in Prometheus's text format: what the head has seen of its events, and a small server for `GET /metrics`.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import collections
import http.server
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.wire import MetricRow, RankStateName
from kale_dist.wire.events import Event, Members, RankProgress, RankState, Usage
from kale_dist.worker.pod.byte_server import HttpServer

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SILENCE_LIMIT_S = 30.0

_USAGE = {
    "memory_bytes": "Memory of the rank's processes",
    "memory_limit_bytes": "Memory limit of the container, which its ranks share",
    "gpu_memory_bytes": "GPU memory that the rank uses",
    "gpu_memory_limit_bytes": "Memory of the rank's GPUs",
}


class Gauges:
    """What the events of a job add up to. `note` and `text` may be called by different threads.

    Args:
        name: The job's name.
        ranks: How many ranks were asked for. As many are pending until the first attempt states how many it has.
        earlier_runs: Runs before this one.
    """

    def __init__(self, name: str, ranks: int, earlier_runs: int = 0) -> None:
        self._name = name
        self._earlier_runs = earlier_runs
        self._lock = threading.Lock()
        self._attempt = 0
        self._states: dict[int, str] = dict.fromkeys(range(ranks), str(RankStateName.PENDING))
        self._progress: dict[int, RankProgress] = {}
        self._usage: dict[int, Usage] = {}
        self._samples: collections.Counter[int] = collections.Counter()
        self._metrics: dict[tuple[str, str, str], float] = {}

    def note(self, event: Event) -> None:
        """Take an event in, whatever its kind."""
        with self._lock:
            if event.attempt > self._attempt:
                self._attempt = event.attempt
                self._states = dict.fromkeys(self._states, str(RankStateName.PENDING))
                self._progress, self._usage = {}, {}
            match event.what, event.rank:
                case Members(members=members), _:
                    self._states = {rank: str(RankStateName.PENDING) for member in members for rank in member.ranks}
                case MetricRow(source=source, values=values), rank:
                    for name, value in values:
                        self._metrics[source, name, "" if rank is None else str(rank)] = value
                case RankState(state=state), int(rank):
                    self._states[rank] = str(state)
                case RankProgress() as progress, int(rank):
                    self._note_progress(rank, progress)
                case Usage() as usage, int(rank):
                    self._usage[rank] = usage

    def _note_progress(self, rank: int, now: RankProgress) -> None:
        if now.phase == "train" and now.samples:
            before = self._progress.get(rank)
            is_same = before is not None and (before.phase, before.epoch) == ("train", now.epoch)
            self._samples[rank] += max(0, now.samples - (before.samples if before is not None and is_same else 0))
        self._progress[rank] = now

    def text(self) -> str:
        """All as text."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _family("job_info", "The job", "gauge", [({"name": self._name}, 1)])
        counts = collections.Counter(self._states.values())
        states: list[tuple[dict[str, Any], Any]] = [({"state": str(s)}, counts[str(s)]) for s in RankStateName]
        yield from _family("ranks", "Ranks in each state", "gauge", states)
        restarts = self._earlier_runs + self._attempt
        yield from _family("restarts_total", "Restarts of all ranks after one was lost", "counter", [({}, restarts)])
        first = self._progress.get(0)
        yield from _family("epoch", "The epoch that rank 0 is in, from 1", "gauge", [({}, first and first.epoch)])
        yield from _family("epochs", "Epochs of the training", "gauge", [({}, first and first.epochs)])
        for name, kind, help_text, values in (
            ("samples_total", "counter", "Samples that the rank has trained on", self._samples),
            ("samples_per_second", "gauge", "The rank's pace in this pass", self._of(self._progress, "samples_per_s")),
            ("loss", "gauge", "The rank's last loss", self._of(self._progress, "loss")),
            *((name, "gauge", help_text, self._of(self._usage, name)) for name, help_text in _USAGE.items()),
        ):
            yield from _family(name, help_text, kind, [({"rank": rank}, values[rank]) for rank in sorted(values)])
        busy = self._of(self._usage, "gpu_percent")
        ratios = [({"rank": rank}, None if busy[rank] is None else busy[rank] / 100) for rank in sorted(busy)]
        yield from _family("gpu_utilization_ratio", "How busy the rank's GPU is, 0 to 1", "gauge", ratios)
        metrics = [
            ({"source": source, "name": name, "rank": rank}, value)
            for (source, name, rank), value in sorted(self._metrics.items())
        ]
        yield from _family(
            "metric", "The last value of each metric; without a rank, the mean over ranks", "gauge", metrics
        )

    @staticmethod
    def _of(ranks: Mapping[int, RankProgress | Usage], field: str) -> dict[int, Any]:
        return {rank: getattr(one, field) for rank, one in ranks.items()}


def _family(name: str, help_text: str, kind: str, samples: list[tuple[dict[str, Any], Any]]) -> Iterator[str]:
    """The lines of one metric; none where nothing is known."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    yield f"# HELP kale_dist_{name} {help_text}."
    yield f"# TYPE kale_dist_{name} {kind}"
    # Values as Go's ParseFloat reads them, so that nan and inf are fine, too.
    for labels, value in known:
        pairs = ",".join(f'{key}="{_escaped(str(one))}"' for key, one in labels.items())
        yield f"kale_dist_{name}{f'{{{pairs}}}' if pairs else ''} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsRequest(http.server.BaseHTTPRequestHandler):
    """Answers `GET /metrics`, to anyone who can reach the port: Prometheus has no key, and there are only numbers.

    The server's owner is a function that gives the text.
    """

    timeout = _SILENCE_LIMIT_S
    server: HttpServer

    def do_GET(self) -> None:
        """Answer."""
        is_there = self.path.partition("?")[0] == "/metrics"
        body = self.server.owner().encode() if is_there else b"The metrics are at /metrics\n"
        self.send_response_only(200 if is_there else 404)
        self.send_header("Content-Type", _CONTENT_TYPE if is_there else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Write nothing: stderr is the pod's log."""
