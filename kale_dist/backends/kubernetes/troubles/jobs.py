"""Troubles that are no single pod's. They are recognised by what is there and what is not."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern
from kale_dist.contract import FailureCause

TROUBLES = (
    Trouble(
        name="operator-missing",
        title="The Training Operator is not installed",
        place=Place.STRUCTURE,
        sentence="the cluster knows no PyTorchJob: the Kubeflow Training Operator is not installed",
        remedy="Have the administrator install it: kubectl apply --server-side -k "
        "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'",
    ),
    Trouble(
        name="operator-dead",
        title="The Training Operator does nothing",
        place=Place.STRUCTURE,
        sentence="the Training Operator has not looked at the job for {waited} s: it has no status, no pods and no events",
        remedy="Have the administrator look at it: 'kubectl get pods -A -l control-plane=kubeflow-training-operator'",
    ),
    Trouble(
        name="managed-elsewhere",
        title="Another controller is to run the job",
        place=Place.STRUCTURE,
        sentence="the job is left to {manager} (runPolicy.managedBy), which has done nothing with it for {waited} s",
        remedy="Take managedBy out of the patch, or see to that controller",
    ),
    Trouble(
        name="no-pods",
        title="No pods, and no right to see why",
        place=Place.STRUCTURE,
        sentence="the job has no pods after {waited} s, and why cannot be seen without the right to list and watch events",
        remedy="Have the administrator grant it, or ask for 'kubectl -n {namespace} describe pytorchjob {job}'",
    ),
    Trouble(
        name="queued",
        title="Queued by Kueue",
        place=Place.STRUCTURE,
        sentence="the job is queued in {queue}{queue_said}",
        remedy="Wait; 'kubectl -n {namespace} get workloads' shows the queue",
    ),
    Trouble(
        name="queued-for-ever",
        title="Too large for Kueue's queue",
        place=Place.STRUCTURE,
        sentence="the job asks for more than {queue} ever has{queue_said}",
        remedy="Cancel it, and ask for less (resources=, number_of_processes=), or have the administrator raise the queue's quota",
    ),
    Trouble(
        name="suspended",
        title="Suspended",
        place=Place.STRUCTURE,
        sentence="the job is suspended (runPolicy.suspend)",
        remedy="Resume it with kubectl -n {namespace} patch pytorchjob {job} --type merge "
        '-p \'{{"spec":{{"runPolicy":{{"suspend":false}}}}}}\'',
    ),
    Trouble(
        name="sidecar",
        title="A sidecar keeps the pod alive",
        place=Place.STRUCTURE,
        sentence="{pod} stays although its ranks have ended, because the container {sidecar} runs on, so that the "
        "PyTorchJob says Running",
        remedy='Keep the sidecar away (for Istio the annotation sidecar.istio.io/inject: "false" on the pods), or delete '
        "the job",
    ),
    Trouble(
        name="job-deadline",
        title="The job's own deadline",
        place=Place.STRUCTURE,
        sentence="the operator ended the job because it was active longer than runPolicy.activeDeadlineSeconds, and "
        "deleted its pods with their logs",
        remedy="Use timeout_s= instead, which keeps the logs",
        is_final=True,
        cause=FailureCause.TIMEOUT,
    ),
    Trouble(
        name="job-backoff",
        title="The job's own limit of retries",
        place=Place.STRUCTURE,
        sentence="the operator ended the job because it had failed more often than runPolicy.backoffLimit allows",
        remedy="Take backoffLimit and restartPolicy out of the patch",
        is_final=True,
        cause=FailureCause.DIED,
    ),
    Trouble(
        name="job-failed",
        title="The operator gave the job up",
        place=Place.STRUCTURE,
        sentence="the operator says that the job failed: {detail}",
        remedy="'kubectl -n {namespace} describe pytorchjob {job}' shows all that is known",
        is_final=True,
        cause=FailureCause.AGENT_DIED,
    ),
    Trouble(
        name="job-deleted",
        title="The PyTorchJob was deleted",
        place=Place.STRUCTURE,
        sentence="somebody deleted the PyTorchJob {job} from the namespace {namespace}",
        remedy="Submit it again if that was a mistake",
        is_final=True,
        cause=FailureCause.USER,
    ),
    Trouble(
        name="job-expired",
        title="The PyTorchJob is gone",
        place=Place.STRUCTURE,
        sentence="the PyTorchJob {job} is no longer in the namespace {namespace}, and no notebook saw how it ended: the "
        "cluster deletes it {ttl} s after its end (ttl_s), if nobody did so before",
        remedy="What its store has (store=) is still there; a longer ttl_s leaves the time to attach",
        is_final=True,
        cause=FailureCause.USER,
    ),
    Trouble(
        name="waits-for-master",
        title="Workers wait for the master's name",
        place=Place.STRUCTURE,
        container="init-pytorch",
        pattern=pattern(""),
        sentence="{pod} waits until the master's name can be resolved (init-pytorch)",
        remedy="It begins by itself; if it does not, the cluster's DNS does not work",
    ),
)
