"""Volumes and Secrets that hold up a pod which has a node."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern

TROUBLES = (
    Trouble(
        name="input-missing",
        title="The job's own Secret is not there",
        place=Place.POD_EVENT,
        pattern=pattern(r'FailedMount.*secret "(?P<secret>\S+-input)" not found'),
        sentence="{pod} waits: the Secret {secret} with the job's input is not there",
        remedy="It is made right after the job; if it does not come within seconds, delete the job and submit it again",
    ),
    Trouble(
        name="secret-missing",
        title="A Secret or ConfigMap does not exist",
        place=Place.POD_EVENT,
        pattern=pattern(r'FailedMount.*(?P<kind>secret|configmap) "(?P<object>[^"]+)" not found'),
        sentence="{pod} waits: there is no {kind} {object} in the namespace {namespace}",
        remedy="Make it, or correct its name in volumes=",
    ),
    Trouble(
        name="claim-two-nodes",
        title="A claim that only one node may mount",
        place=Place.POD_EVENT,
        pattern=pattern("Multi-Attach"),
        sentence="{pod} waits: its claim {claims} is ReadWriteOnce, and the volume is in use on another node than {node}",
        remedy="Use a claim with access mode ReadWriteMany, or all ranks in one pod with processes_per_pod=",
    ),
    Trouble(
        name="host-path",
        title="A path that the node does not have",
        place=Place.POD_EVENT,
        pattern=pattern(r"hostPath type check failed: (?P<path>\S+)"),
        sentence="{pod} waits: node {node} has no folder {path}",
        remedy="Make it there, or choose nodes that have it with cluster={{'node_selector': ...}}",
    ),
    Trouble(
        name="mount-failed",
        title="A volume cannot be mounted",
        place=Place.POD_EVENT,
        pattern=pattern("FailedMount|FailedAttachVolume|FailedMapVolume"),
        sentence="{pod} waits: a volume cannot be mounted on node {node}: {detail}",
        remedy="'kubectl -n {namespace} describe pod {pod_name}' shows all that the node says",
    ),
    Trouble(
        name="sandbox",
        title="A pod gets no network",
        place=Place.POD_EVENT,
        pattern=pattern("FailedCreatePodSandBox|NetworkNotReady"),
        sentence="{pod} waits: node {node} cannot make its network: {detail}",
        remedy="Tell the administrator; the node tries again by itself",
    ),
)
