"""`kale-dist run`: execute a notebook here, or in a pod of a cluster."""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import signal
import sys

from kale_dist import places, scripts, wording
from kale_dist.cli import launch_command
from kale_dist.cli.arguments import Commands, add_pairs, add_parser
from kale_dist.errors import ConfigError


def add_command(commands: Commands) -> None:
    """Add `run`."""
    run = add_parser(commands, "run", "execute a notebook, and show its jobs' logs and progress", _run)
    run.add_argument("notebook", type=pathlib.Path, metavar="NOTEBOOK")
    out = "where the executed notebook goes (NAME.executed.ipynb)"
    run.add_argument("-o", "--output", type=pathlib.Path, metavar="OUT", help=out)
    add_pairs(run, "-p", "--parameters", what="a value for the cell tagged `parameters`")
    run.add_argument("--kernel", metavar="NAME", help="an installed kernel (the Python that runs this command)")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="how long a cell may take (no limit)")
    run.add_argument("--on", choices=places.NAMES, help="where jobs run whose calls do not say so")
    run.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write a summary as JSON")
    run.add_argument("--in-cluster", action="store_true", help="run the notebook itself in a pod of the cluster")
    pod = run.add_argument_group("with --in-cluster")
    pod.add_argument("--image", help="the pod's image (the configured one)")
    packages = "installed on top of the image; may be given several times; auto for what executes notebooks and what it imports"
    pod.add_argument("--packages", action="append", default=[], metavar="REQUIREMENT", help=packages)
    pod.add_argument("--namespace", metavar="NAME", help="where the pod runs (the configured one)")
    what = 'another argument of kale_dist.Kubernetes, such as `resources \'{"memory": "8Gi"}\'`'
    add_pairs(pod, "--pod", what=what)
    pod.add_argument("--keep", action="store_true", help="leave the pod's job and its log on the cluster")


def _run(options: argparse.Namespace) -> int:
    with wording.needing("notebook", "run", "to run a notebook"):
        from kale_dist.runner import documents, execution, in_cluster
    pod = {name: wording.parse(value) for name, value in options.pod.items()}
    pod |= {name: getattr(options, name) for name in ("image", "packages", "namespace") if getattr(options, name)}
    if options.in_cluster:
        if options.kernel:
            raise ConfigError("--kernel", "the notebook runs with the Python of the pod's image", "Leave it out")
        run_notebook = functools.partial(in_cluster.run_notebook, pod=pod, keep=options.keep)
    elif pod or options.keep:
        raise ConfigError("run", "there is no pod to be set up", "Add --in-cluster, or leave out the pod's options")
    else:
        run_notebook = functools.partial(execution.run_notebook, kernel=options.kernel)
    if options.json is not None:
        documents.check_target("--json", options.json, options.notebook)
    with launch_command.interrupted_by_sigterm() as caught:
        result = run_notebook(
            options.notebook,
            parameters={name: wording.parse(value) for name, value in options.parameters.items()},
            output=options.output,
            timeout_s=options.timeout,
            on=options.on,
        )
    if options.json is not None:
        summary = {"notebook": str(options.notebook), **result.to_json()}
        documents.write(options.json, json.dumps(summary, indent=2).encode())
    if result.failure:
        print(f"{options.notebook}, {result.failure}", file=sys.stderr)
    print(f"Executed notebook: {result.output}", file=sys.stderr if result.failure else sys.stdout)
    if result.interrupted:
        return scripts.BY_SIGNAL + (caught[0] if caught else signal.SIGINT)
    return 1 if result.failure else 0
