"""Containers that do not start, or start again and again."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern

TROUBLES = (
    Trouble(
        name="runs-as-root",
        title="The image's user is root where that is forbidden",
        place=Place.WAITING,
        pattern=pattern("runAsNonRoot and image"),
        sentence="{pod} cannot start: the container {container} must not run as root, and the image {image} does",
        remedy="Give cluster={{'run_as_user': 1000}}, or an image with a numeric user",
        is_final=True,
    ),
    Trouble(
        name="environment-missing",
        title="An environment variable's Secret does not exist",
        place=Place.WAITING,
        pattern=pattern(r'CreateContainerConfigError: .*(?P<kind>secret|configmap) "(?P<object>[^"]+)" not found'),
        sentence="{pod} waits: there is no {kind} {object} in the namespace {namespace}, from which a variable is to come",
        remedy="Make it, or correct cluster={{'secret_environment': ...}}",
    ),
    Trouble(
        name="environment-key",
        title="A Secret lacks a key",
        place=Place.WAITING,
        pattern=pattern(r"CreateContainerConfigError: .*couldn't find key (?P<key>\S+) in (?P<object>.+)"),
        sentence="{pod} waits: there is no key {key} in {object}, from which a variable is to come",
        remedy="Add it, or correct cluster={{'secret_environment': ...}}",
    ),
    Trouble(
        name="config-error",
        title="A container cannot be made",
        place=Place.WAITING,
        pattern=pattern("CreateContainerConfigError|CreateContainerError|RunContainerError"),
        sentence="{pod} waits: node {node} cannot make the container {container}: {detail}",
        remedy="'kubectl -n {namespace} describe pod {pod_name}' shows all that the node says",
    ),
    Trouble(
        name="crash-loop",
        title="A container is started again and again",
        place=Place.WAITING,
        pattern=pattern("CrashLoopBackOff"),
        sentence="{pod}: the container {container} has ended {restarts} times, last with {last_exit}, and is started "
        "again after a pause{last_said}",
        remedy="Take restartPolicy out of the patch, so that the job fails at once and says why",
    ),
    Trouble(
        name="wrong-processor",
        title="The image is made for another processor",
        place=Place.ENDED,
        pattern=pattern("exec format error"),
        sentence="{pod} could not start: the programs in the image {image} are not made for the processor of node {node} "
        "(exec format error)",
        remedy="Build the image for that processor, or choose other nodes with cluster={{'node_selector': ...}}",
        is_final=True,
    ),
    Trouble(
        name="no-python",
        title="The image has no Python",
        place=Place.ENDED,
        pattern=pattern(r'exec: "(?P<program>[^"]+)".*(executable file not found|no such file or directory)'),
        sentence="{pod} could not start: there is no {program} in the image {image}",
        remedy="Name an image with Python and torch with image=",
        is_final=True,
    ),
    Trouble(
        name="old-python",
        title="The image's Python is too old",
        place=Place.ENDED,
        pattern=pattern(r"kale_dist: the image's Python is (?P<version>\S+) "),
        sentence="{pod} could not start: the Python of the image {image} is {version}, and 3.11 or later is needed",
        remedy="Name an image with the notebook's version of Python with image=",
        is_final=True,
    ),
    Trouble(
        name="start-error",
        title="A container could not be started",
        place=Place.ENDED,
        pattern=pattern("(StartError|ContainerCannotRun): "),
        sentence="{pod} could not start: node {node} cannot start the container {container} of the image {image}: {detail}",
        remedy="Try the image with 'docker run', and leave out what changes the container (a patch)",
        is_final=True,
    ),
)
