"""`kale-dist runtime`: prints a runtime for TrainJobs of Kubeflow Trainer, for `kubectl apply -f -`."""

from __future__ import annotations

import argparse

from kale_dist.cli.arguments import Commands, add_parser
from kale_dist.job.spec import names
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places import manifests
from kale_dist.places.manifests import train_runtime
from kale_dist.wording import needing

_TTL = "# ttlSecondsAfterFinished needs Trainer 2.4: before it, a TrainJob that has ended runs again, for ever.\n"
_HELP = {
    "namespace": "make a TrainingRuntime of this namespace (a ClusterTrainingRuntime)",
    **dict.fromkeys(train_runtime.SETTINGS, "of the pods"),
    "run_as_user": "user of the processes before Trainer 2.2 (1000); -1: left to the cluster",
    "ttl_s": "seconds after its end when a job is deleted; needs Trainer 2.4",
}


def add_command(commands: Commands) -> None:
    """Add `runtime`."""
    what = "print a runtime with which TrainJobs have what the other kinds have"
    made = add_parser(commands, "runtime", what, _runtime, "Apply it with: kale-dist runtime | kubectl apply -f -")
    made.add_argument("--name", default=train_runtime.NAME, help="(%(default)s, which calls take by themselves)")
    for field, text in _HELP.items():
        kind = int if field in ("run_as_user", "ttl_s") else str
        made.add_argument(train_runtime.option(field), dest=field, type=kind, metavar="VALUE", help=text)


def _runtime(options: argparse.Namespace) -> int:
    names.OBJECT_NAME("--name", options.name)
    asked = ClusterOptions(**{field: getattr(options, field) for field in _HELP})
    with needing("kubernetes", "runtime", "to write YAML"):
        text = manifests.to_yaml(train_runtime.make(options.name, asked, asked.ttl_s))
    print(text if asked.ttl_s is None else _TTL + text, end="")
    return 0
