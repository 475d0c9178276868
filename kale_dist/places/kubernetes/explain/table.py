"""Everything that can be wrong with a job on a cluster: where it is seen, what it looks like, one sentence and a remedy.

Each fact stands here once. The table serves the errors of a call, the status of a job, `kale-dist doctor`, the page
`docs/troubleshooting.md` and the tests. An entry is recognised by the cluster's own words and by where they
were seen; the first entry that fits is taken, so the most specific ones come first. Pure.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping

from kale_dist.errors import BackendError, BackendUnavailableError, JobExistsError, JobNotFoundError
from kale_dist.job.backend import LostBy
from kale_dist.job.spec import quantities
from kale_dist.wire import FailureCause


class Seen(enum.Enum):
    """Where a trouble shows. The comments give the form of the words that patterns search."""

    CONNECTION = "a request that got no answer"
    """`names of exception classes: their messages`"""
    API = "an answer of the API server"
    """`status verb resource reason: message`"""
    JOB_EVENT = "an event of a job that lacks pods"
    """`reason: message`, as in all that follow"""
    SCHEDULING = "the condition PodScheduled of a pod"
    POD_EVENT = "the last event of a pod that has a node and no running container"
    WAITING = "the state of a waiting container"
    ENDED = "the state of a container that ended"
    POD = "the reason of a pod that failed"
    DISRUPTION = "the condition DisruptionTarget of a pod"
    STRUCTURE = "the objects themselves"
    """No pattern: the code that compares the objects names the entry."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One trouble."""

    name: str
    """For code and tests."""
    seen: tuple[Seen, ...]
    pattern: str
    """A regular expression; its named groups are facts for the sentence."""
    sentence: str
    """Without its full stop; `{names}` stand for facts."""
    remedy: str
    """What to do, without its full stop; `{names}` stand for facts."""
    _: dataclasses.KW_ONLY
    heals: bool = True
    """Whether the job waits for its end, or the same call may succeed later. Otherwise the job fails at once."""
    is_usual: bool = False
    """Whether a healthy start shows it, too, for some seconds: the remedy is told only of a pod that waits for long."""
    needs_action: bool = False
    """Whether it ends only if a person acts (pushes the image, creates the Secret): the job waits 5 minutes for that."""
    cause: FailureCause = FailureCause.NOT_STARTED
    """The cause of the job's failure, if this ends the job."""
    lost: LostBy = ""
    """Why the cluster, or a person, ended a pod that had done nothing wrong: `evicted`, `deleted`, ... (`Part.lost`)."""
    container: str = ""
    """Only for the container of this name."""
    error: type[BackendError] = BackendError
    """Class of the error that a call raises."""
    fits: Callable[[Mapping[str, str]], bool] | None = None
    """Asked beside the pattern, with what its groups found."""


def _exceeds(found: Mapping[str, str]) -> bool:
    """Whether a pod, or an object, asks for more than a quota ever allows."""
    requested, limited = (
        dict(part.split("=", 1) for part in found[name].split(",") if "=" in part) for name in ("requested", "limited")
    )
    return any(
        key in limited and quantities.amount(amount) > quantities.amount(limited[key])
        for key, amount in requested.items()
    )


_REFUSED = (Seen.API, Seen.JOB_EVENT)
WAITS = (Seen.SCHEDULING, Seen.POD_EVENT, Seen.WAITING)
"""Their sentences follow "pod train-worker-0 waits: ", or "cannot start" if the entry does not heal."""
_QUOTA = (
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limited>.+)"
)
_PULL = "(ErrImagePull|ImagePullBackOff|RegistryUnavailable)"
_REFUSED_PULL = _PULL + (
    r"(?!.*(: 5\d\d [A-Z]|i/o timeout|deadline exceeded|Client\.Timeout|handshake timeout|connection (refused|reset)))"
)
"""A pull that the registry itself refuses; a mirror may do so while the registry does not answer."""
_AGAIN = "With max_restarts= the job resumes in new pods by itself; without, submit it again"
_DIED, _POD_LOST = FailureCause.DIED, FailureCause.AGENT_DIED

GROUPS: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    ("The way to the cluster", (
        Entry(
            "certificate", (Seen.CONNECTION,),
            "CERTIFICATE_VERIFY_FAILED|certificate verify failed|hostname .* doesn't match",
            "the certificate of the API server is not accepted: {detail}",
            "Get a new kubeconfig, or have the administrator renew the server's certificate",
            error=BackendUnavailableError,
        ),
        Entry(
            "client-certificate", (Seen.CONNECTION,),
            r"TLSV1\S*_ALERT|SSLV3_ALERT|tlsv1 alert|certificate required",
            "the API server ended the connection: {detail}",
            "Get a new kubeconfig: its client certificate is wrong or has expired",
            error=BackendUnavailableError,
        ),
        Entry(
            "no-tls", (Seen.CONNECTION,), r"\bSSLError",
            "there is no TLS at the other end: {detail}",
            "Check the kubeconfig's `server`: it has to be the URL of the API server, with https",
            error=BackendUnavailableError,
        ),
        Entry(
            "proxy", (Seen.CONNECTION,), "ProxyError",
            "the proxy does not let the request through: {detail}",
            "Check HTTPS_PROXY and NO_PROXY; the API server's host usually belongs in NO_PROXY",
            error=BackendUnavailableError,
        ),
        Entry(
            "unreachable", (Seen.CONNECTION,),
            "gaierror|NameResolutionError|Timeout|OSError|EOFError|Connection|refused|closed",
            "the API server cannot be reached: {detail}",
            "Check the network or VPN (a firewall that drops packets shows as a time-out), the kubeconfig's `server`, and that the "
            "cluster runs: 'kubectl get nodes'",
            error=BackendUnavailableError,
        ),
        Entry(
            "no-answer", (Seen.CONNECTION,), "",
            "{detail}", "If 'kubectl get pods' works, please report this", heals=False,
        ),
    )),
    ("Answers of the API server", (
        Entry(
            "credentials", (Seen.API,), "^401 |^403 .*system:anonymous",
            "the cluster does not accept these credentials, or the kubeconfig has none ({status})",
            "Log in to the cluster again, until 'kubectl get pods' works; kale_dist reads the kubeconfig again when it changes",
            heals=False, error=BackendUnavailableError,
        ),
        Entry(
            "namespace-ends", _REFUSED, "because it is being terminated",
            "the namespace {namespace} is being deleted", "Use another namespace, or create it again once it is gone",
            heals=False,
        ),
        Entry(
            "rights", (Seen.API,),
            r'^403 .*User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)"',
            "{user} may not {verb} {resource} {where}",
            "An administrator can grant all that kale_dist needs, by 'kubectl apply -f -' of:\n\n{role}",
            heals=False,
        ),
        Entry(
            "namespace-missing", (Seen.API,), r'^404 .*namespaces "(?P<missing>[^"]+)" not found',
            "there is no namespace {missing}", "Correct it, or create it: kubectl create namespace {missing}", heals=False,
        ),
        Entry(
            "operator-missing", (Seen.API,),
            r'^404 \S+ \w*jobs (?!NotFound: \S+ ")',
            "the cluster has no {job_kind}s: {controller} is not installed",
            "Leave out kind= to use what the cluster serves, or have an administrator install it by: {install}",
            heals=False, error=BackendUnavailableError,
        ),
        Entry(
            "job-missing", (Seen.API,), "^404 \\S+ \\w*jobs ", "{detail}",
            "It may have been deleted; kale_dist.jobs(on='kubernetes') lists the jobs that exist",
            heals=False, error=JobNotFoundError,
        ),
        Entry(
            "object-missing", (Seen.API,), "^404 ", "{detail}",
            "It may have been deleted", heals=False,
        ),
        Entry(
            "job-exists", (Seen.API,), "^409 create \\w*jobs AlreadyExists",
            "{resource}/{name} exists already",
            "Give another name=, or attach to it: kd.attach('kubernetes://{namespace}/{name}')",
            heals=False, error=JobExistsError,
        ),
        Entry(
            "object-exists", (Seen.API,), r"^409 \S+ \S+ AlreadyExists",
            "{resource}/{name} exists already", "Delete it, or give the job another name", heals=False,
        ),
        Entry(
            "changed", (Seen.API,), "^409 ",
            "another client changed it at the same time: {detail}", "Try again",
        ),
        Entry(
            "busy", (Seen.API,), "^429 ",
            "the API server has too many requests (429)", "Try again {retry_after}",
        ),
        Entry(
            "too-large", (Seen.API,),
            r"^413 |(must have at most|may not be more than) \d+ (bytes|characters)|request is too large|etcdserver: request"
            r"|larger than max",
            "it is larger than the cluster accepts: {detail}", "Give a store=, which keeps the snapshot out of the object",
            heals=False,
        ),
    )),
    ("Pods and jobs that are refused", (
        Entry(
            "quota-too-small", _REFUSED, _QUOTA,
            "the quota {quota} of the namespace {namespace} allows {limited} in all, and {requested} is asked for",
            "Ask for less (resources=, number_of_processes=), or have the administrator raise the quota",
            heals=False, fits=_exceeds,
        ),
        Entry(
            "quota", _REFUSED, _QUOTA,
            "the quota {quota} of the namespace {namespace} allows {limited}, of which {used} is used, and {requested} is asked for",
            "Delete finished jobs (kale-dist delete), wait until other jobs end, or have the administrator raise the quota",
        ),
        Entry(
            "quota-limits", _REFUSED,
            r"failed quota: (?P<quota>[^:]+): must specify (?P<what>.+)",
            "the quota {quota} of the namespace {namespace} demands that pods specify {what}",
            "Give them in resources=, or with patch= for a container that is not ours", heals=False,
        ),
        Entry(
            "limit-range", _REFUSED,
            r"forbidden: \[?(?P<rule>(maximum|minimum) \S+ usage per [^\]]+|.*limit to request ratio.+)",
            "a LimitRange of the namespace {namespace} forbids the size of the pod: {rule}", "Change resources= accordingly",
            heals=False,
        ),
        Entry(
            "pod-security-init", _REFUSED,
            r'violates PodSecurity "(?P<level>[^"]+)": .*init-pytorch',
            'the namespace {namespace} enforces Pod Security "{level}", which forbids the init-pytorch that the operator puts '
            "before the workers of a job with a master",
            "Give master=False", heals=False,
        ),
        Entry(
            # Of Trainer 2.2 and later, and of all other kinds, each container has a context of its own.
            "pod-security-runtime", _REFUSED,
            r'violates PodSecurity "(?P<level>[^"]+)": .*container "node" must set securityContext',
            'the namespace {namespace} enforces Pod Security "{level}", and the runtime of the TrainJob sets no security context',
            "Have an administrator make the runtime that 'kale-dist runtime' prints, or install Trainer 2.2 or later; or give kind='job'",
            heals=False,
        ),
        Entry(
            "pod-security", _REFUSED,
            r'violates PodSecurity "(?P<level>[^"]+)": (?P<rule>.+)',
            'the namespace {namespace} enforces Pod Security "{level}", which forbids: {rule}',
            "Leave out what it forbids (volumes 'hostpath://...': use a claim; run_as_user=0; a patch=), or use another "
            "namespace",
            heals=False,
        ),
        Entry(
            "service-account", _REFUSED, r'service ?account "?(?P<account>[^" ]+)"? not found',
            "there is no service account {account} in the namespace {namespace}", "Create it, or correct service_account=",
            needs_action=True,
        ),
        Entry(
            "priority-class", _REFUSED, r"no PriorityClass with name (?P<class_name>\S+)",
            "there is no priority class {class_name}",
            "Correct priority_class=; 'kubectl get priorityclasses' lists them", needs_action=True,
        ),
        Entry(
            "runtime-class", _REFUSED, r'RuntimeClass "(?P<class_name>[^"]+)" not found',
            "there is no runtime class {class_name}", "Correct runtime_class=; 'kubectl get runtimeclasses' lists them",
            needs_action=True,
        ),
        Entry(
            "webhook-unreachable", _REFUSED,
            r'failed calling webhook "(?P<webhook>[^"]+)": ?(?P<why>.+)',
            "the cluster's webhook {webhook} does not answer: {why}",
            "Try again; if it lasts, ask the administrator",
        ),
        Entry(
            "webhook", _REFUSED,
            r"(admission webhook \"|ValidatingAdmissionPolicy ')(?P<policy>[^\"']+).*?denied (the )?request: ?(?P<why>.+)",
            "the cluster's policy {policy} refuses it: {why}",
            "Do as it says, with labels=, annotations= or patch=, or use another namespace",
        ),
        Entry(
            "forbidden", (Seen.API,), "^403 ", "it is forbidden: {detail}",
            "Ask the administrator", heals=False,
        ),
        Entry(
            "runtime-missing", (Seen.STRUCTURE,), "",
            "there is no runtime {object} for TrainJobs; there are: {there}", "Give one of them with runtime=", heals=False,
        ),
        Entry(
            "name-taken", (Seen.JOB_EVENT,), r'"(?P<object>[^"]+)" already exists',
            "there is a {object} already, which does not belong to this job", "Delete it, or give this job another name",
            needs_action=True,
        ),
        Entry(
            "invalid", (Seen.API,), "^(400|422) ",
            "the cluster rejects it as invalid: {detail}",
            "If patch= set that field, correct it; otherwise please report this", heals=False,
        ),
        Entry(
            "server-error", (Seen.API,), r"^5\d\d ",
            "the API server has an error of its own ({status}): {detail}", "Try again; if it lasts, ask the administrator",
        ),
        Entry(
            "answer", (Seen.API,), "", "the cluster answers {status}: {detail}",
            "Correct it and try again", heals=False,
        ),
        Entry(
            "refused", (Seen.JOB_EVENT,), "", "{detail}",
            "'kubectl -n {namespace} describe {jobs} {job}' shows all that was said",
        ),
    )),
    ("Before the job is submitted", (
        Entry(
            "nodes-too-small", (Seen.STRUCTURE,), "",
            "a pod needs {wanted} {resource}, and the largest node has {largest}: no node can ever run it",
            "Ask for less (resources=, processes_per_pod=), or give wait_for_nodes=True if the cluster adds nodes when pods wait",
            heals=False,
        ),
        Entry(
            "pull-secret-missing", (Seen.STRUCTURE,), "",
            "there is no Secret {object} in the namespace {namespace}, which image_pull_secrets= names",
            "Without it the nodes may not be able to pull the image",
        ),
        Entry(
            "queue-missing", (Seen.STRUCTURE,), "",
            "the namespace {namespace} has no Kueue queue {object} that you can see",
            "Without Kueue and this queue the job may stay suspended; correct queue=",
        ),
        Entry(
            "queue-ignored", (Seen.STRUCTURE,), "",
            "Kueue does not manage this {job_kind}: it starts without the quota of the queue {object}",
            "Give kind='job', or have the administrator add {jobs} to Kueue's integrations",
        ),
        Entry(
            "claim-one-node", (Seen.STRUCTURE,), "",
            "the claim {object} is ReadWriteOnce: all {pods} pods have to fit on one node",
            "If they do not, use a claim with access mode ReadWriteMany",
        ),
        Entry(
            "claim-lost", (Seen.STRUCTURE,), "",
            "the claim {object} cannot be used: {why}", "Use another claim", heals=False,
        ),
    )),
    ("Images", (
        Entry(
            "image-python", (Seen.STRUCTURE,), "",
            "the image {image} says that it has Python {version}, and this notebook has {here}",
            "Name an image with Python {here}, or the ranks cannot read what is sent to them",
        ),
        Entry(
            "init-image", (Seen.WAITING,),
            "ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|RegistryUnavailable",
            "the image {image} of init-pytorch, which the operator puts before workers, cannot be pulled: "
            "{detail}",
            "Give master=False, which needs no such image, or have the administrator set the operator's "
            "--pytorch-init-container-image",
            container="init-pytorch",
        ),
        Entry(
            "image-rate", (Seen.WAITING,),
            _PULL + ".*(toomanyrequests|429 Too Many|Too Many Requests|rate limit)",
            "the registry limits how many images it gives, among them {image}",
            "Wait, log in with image_pull_secrets=, or push the image to a registry of your own",
        ),
        Entry(
            "pull-forbidden", (Seen.WAITING,),
            _REFUSED_PULL + r".*(40[13] (Unauthorized|Forbidden)|[Uu]nauthorized|[Ff]orbidden|denied|insufficient_scope"
            r"|authorization failed|authentication required|no basic auth|may require)",
            "the registry refuses to give the node the image {image}: {detail}",
            "Create a Secret with 'kubectl -n {namespace} create secret docker-registry' and name it in image_pull_secrets=",
            needs_action=True,
        ),
        Entry(
            "image-platform", (Seen.WAITING,),
            _PULL + ".*no match for platform",
            "the registry has no image {image} for the processor of node {node}",
            "Build it for that processor, or choose other nodes with node_selector=", needs_action=True,
        ),
        Entry(
            "image-not-found", (Seen.WAITING,),
            _REFUSED_PULL + r".*(not found|NotFound|manifest unknown|name unknown|does not exist)",
            "the image {image} was not found in its registry", "Push it there, or name another one with image=",
            needs_action=True,
        ),
        Entry(
            "registry-unreachable", (Seen.WAITING,),
            _PULL + ".*(no such host|connection refused|timeout|deadline exceeded|connection reset|no route|x509|tls"
            "|HTTP response to HTTPS|failed to do request)",
            "node {node} does not reach the registry of {image}: {detail}",
            "Give the address by which the nodes pull, which may differ from yours",
        ),
        Entry(
            "image-invalid", (Seen.WAITING,), "InvalidImageName|" + _PULL + ".*invalid reference format",
            "{image} is not the name of an image",
            "Write it as registry/repository:tag, all but the tag in lower case", heals=False,
        ),
        Entry(
            "pull-failed", (Seen.WAITING,), _PULL,
            "the image {image} cannot be pulled: {detail}",
            "'kubectl -n {namespace} describe pod {pod_name}' shows all that the node says",
        ),
        Entry(
            "image-never", (Seen.WAITING,), "ErrImageNeverPull",
            "the image {image} is not on node {node}, and image_pull_policy='Never' forbids pulling it",
            "Leave image_pull_policy out", needs_action=True,
        ),
    )),
    ("Volumes and Secrets", (
        Entry(
            "input-missing", (Seen.POD_EVENT,),
            r'FailedMount.*secret "(?P<secret>\S+-input)" not found',
            "the Secret {secret} with the job's input does not exist yet",
            "It should be there within seconds of the job: delete the job and submit it again", is_usual=True,
        ),
        Entry(
            "missing", WAITS,
            r'(?P<kind>secret|configmap|persistentvolumeclaim) "(?P<object>[^"]+)" not found',
            "there is no {kind} {object} in the namespace {namespace}",
            "Create it, or correct its name in volumes=, store= or secret_environment=; 'kubectl -n {namespace} get {kind}' lists those "
            "that exist",
            needs_action=True,
        ),
        Entry(
            "claim-two-nodes", (Seen.POD_EVENT,), "Multi-Attach",
            "its claim {claims} is ReadWriteOnce, and another node than {node} uses the volume",
            "Use a claim with access mode ReadWriteMany, or all ranks in one pod with processes_per_pod=",
        ),
        Entry(
            "host-path", (Seen.POD_EVENT,),
            r"hostPath type check failed: (?P<path>\S+)", "node {node} has no folder {path}",
            "Create it there, or choose nodes that have it with node_selector=", needs_action=True,
        ),
    )),
    ("No node for a pod", (
        Entry(
            "claim-pending", (Seen.SCHEDULING,),
            "unbound (immediate )?PersistentVolumeClaims|didn't find available persistent volumes",
            "its claim {claims} has no volume yet{claim_said}",
            "'kubectl -n {namespace} describe pvc' says why: often its StorageClass does not exist or makes no volumes",
        ),
        Entry(
            "claim-one-pod", (Seen.SCHEDULING,), "ReadWriteOncePod",
            "the claim {claims} is ReadWriteOncePod, which is for a single pod, and another pod has or needs it",
            "Use a claim with access mode ReadWriteMany, or all ranks in one pod with processes_per_pod=",
        ),
        Entry(
            "volume-elsewhere", (Seen.SCHEDULING,),
            "volume node affinity conflict|PersistentVolume's node affinity",
            "only nodes that do not take the pod reach the volume of its claim {claims} ({nodes})",
            "Use a claim with access mode ReadWriteMany on storage that all nodes reach, or all ranks in one pod with "
            "processes_per_pod=",
        ),
        Entry(
            "gpu", (Seen.SCHEDULING,), r"Insufficient (?P<resource>\S*gpu\S*?)(?=[,.;]|$|\s)",
            "it asks for {wanted} {resource} and no node has that many free ({nodes})",
            "Ask for fewer GPUs a pod (processes_per_pod=, gpus in resources=), or wait until other jobs end",
        ),
        Entry(
            "resource", (Seen.SCHEDULING,),
            r"Insufficient (?P<resource>[^,;\s]+?)(?=[,.;]|$|\s)",
            "it asks for {wanted} {resource} and no node has that much free ({nodes})",
            "Ask for less of it in resources=, or wait until other jobs end",
        ),
        Entry(
            "pods-full", (Seen.SCHEDULING,), "Too many pods",
            "the nodes hold as many pods as they can ({nodes})",
            "Wait until other jobs end, or use fewer pods with processes_per_pod=",
        ),
        Entry(
            "node-selector", (Seen.SCHEDULING,), "didn't match Pod's node affinity",
            "no free node fits its node selector or affinity ({nodes})",
            "Compare node_selector= with 'kubectl get nodes --show-labels'; if the nodes with those labels are tainted, add "
            "tolerations=",
        ),
        Entry(
            "taint", (Seen.SCHEDULING,), "untolerated taint|had taint",
            "the nodes that it fits are tainted ({nodes})",
            "Tolerate it with tolerations=; 'kubectl describe nodes' shows the taints",
        ),
        Entry(
            "nodes-closed", (Seen.SCHEDULING,), "were unschedulable|no nodes available",
            "no node takes pods now ({nodes})",
            "Wait, or ask the administrator: 'kubectl get nodes' shows which nodes are closed",
        ),
        Entry(
            "scheduling-gate", (Seen.SCHEDULING,), "SchedulingGated",
            "a scheduling gate, such as a queue's, holds it back",
            "Wait; 'kubectl -n {namespace} get pod {pod_name} -o yaml' names the gate",
        ),
        Entry(
            "unschedulable", (Seen.SCHEDULING,), "",
            "the scheduler finds no node for it ({nodes})",
            "'kubectl -n {namespace} describe pod {pod_name}' shows all that the scheduler says",
        ),
    )),
    ("Containers that do not start", (
        Entry(
            "runs-as-root", (Seen.WAITING,), "runAsNonRoot and image",
            "the container {container} must not run as root, and the image {image} does",
            "Give run_as_user=1000, or an image with a numeric user", heals=False,
        ),
        Entry(
            "environment-key", (Seen.WAITING,),
            r"CreateContainerConfigError: .*couldn't find key (?P<key>\S+) in (?P<object>.+)",
            "there is no key {key} in {object}, from which a variable comes",
            "Add it, or correct secret_environment=", needs_action=True,
        ),
        Entry(
            "node-failed", (Seen.POD_EVENT, Seen.WAITING),
            # A kubelet that does not know a new Secret yet reports it of every second pod, and mounts it soon after.
            r"^(?!.*failed to sync \w+ cache).*(Failed(Mount|AttachVolume|MapVolume|CreatePodSandBox)|NetworkNotReady|"
            "CreateContainer(Config)?Error|RunContainerError)",
            "node {node} cannot start it: {detail}",
            "'kubectl -n {namespace} describe pod {pod_name}' shows all that the node says; it tries again by itself",
        ),
        Entry(
            "crash-loop", (Seen.WAITING,), "CrashLoopBackOff",
            "the container {container} has ended {restarts} times, last with {last_exit}, and is started again after "
            "a pause{last_said}",
            "Take restartPolicy out of the patch, so that the job fails at once and says why",
        ),
        Entry(
            "wrong-processor", (Seen.ENDED,), "exec format error",
            "{pod} could not start: the programs in the image {image} are not made for the processor of node {node} (exec "
            "format error)",
            "Build the image for that processor, or choose other nodes with node_selector=", heals=False,
        ),
        Entry(
            "no-python", (Seen.ENDED,),
            r'exec: "(?P<program>[^"]+)".*(executable file not found|no such file or directory)',
            "{pod} could not start: there is no {program} in the image {image}",
            "Name an image with Python and torch with image=", heals=False,
        ),
        Entry(
            "old-python", (Seen.ENDED,), r"kale_dist: the image's Python is (?P<version>\S+) ",
            "{pod} could not start: the Python of the image {image} is {version}, and 3.11 or later is needed",
            "Name an image with the notebook's version of Python with image=", heals=False,
        ),
        Entry(
            "start-error", (Seen.ENDED,), "(StartError|ContainerCannotRun): ",
            "{pod} could not start: node {node} cannot start the container {container} of the image {image}: {detail}",
            "Try the image with 'docker run', and leave out what changes the container (patch=)", heals=False,
        ),
    )),
    ("Pods that ended", (
        Entry(
            "out-of-memory", (Seen.ENDED,), "OOMKilled",
            "{pod} was killed because it needed more memory than its limit of {memory_limit}",
            "Ask for more with memory in resources=, or load less at once; /dev/shm and files in memory count, too",
            heals=False, cause=_DIED, lost="out of memory",
        ),
        Entry(
            "deadline", (Seen.POD,), "DeadlineExceeded",
            "{pod} was ended because it ran longer than its deadline (activeDeadlineSeconds)",
            "Give a longer timeout_s, or none", heals=False, cause=FailureCause.TIMEOUT,
        ),
        Entry(
            "evicted-disk", (Seen.POD,), r"Evicted: (?P<why>.*(EmptyDir|ephemeral).*)",
            "{pod} was evicted from node {node}: {why}",
            "Write to a claim instead of the pod's own disk, or ask for a larger empty folder in volumes=",
            heals=False, cause=_POD_LOST,
        ),
        Entry(
            "evicted", (Seen.POD,), "Evicted: (?P<why>.+)", "{pod} was evicted from node {node}: {why}",
            _AGAIN + ". Pods that request as much as they use (resources=) are evicted last",
            heals=False, cause=_POD_LOST, lost="evicted",
        ),
        Entry(
            "preempted", (Seen.DISRUPTION,), "PreemptionByScheduler|PreemptionByKube",
            "{pod} was ended to make room for a pod of higher priority",
            _AGAIN + ". A higher priority_class= helps, if you may use one",
            heals=False, cause=_POD_LOST, lost="preempted",
        ),
        Entry(
            "node-lost", (Seen.POD, Seen.DISRUPTION),
            "UnexpectedAdmissionError|OutOf|NodeAffinity|NodeLost|NodeShutdown|Terminated|Shutdown"
            "|EvictionByEvictionAPI|DeletionByTaintManager|DeletionByPodGC|TerminationByKubelet",
            "{pod} was ended because its node {node} was drained, shut down or lost, or could not keep it: {detail}",
            _AGAIN, heals=False, cause=_POD_LOST, lost="node lost",
        ),
        Entry(
            "pod-deleted", (Seen.STRUCTURE,), "", "{pod} was deleted while it ran",
            _AGAIN + ". To cancel a job, call job.cancel() instead of deleting its pods",
            heals=False, cause=_POD_LOST, lost="deleted",
        ),
        Entry(
            "init-failed", (Seen.STRUCTURE,), "",
            "{pod} could not start: its init container {container} ended with {exit}{last_said}",
            "'kubectl -n {namespace} logs {pod_name} -c {container}' shows its log", heals=False,
        ),
        Entry(
            "init-gave-up", (Seen.STRUCTURE,), "",
            "{pod} gave up: the pod of the master did not start within about 4 minutes (init-pytorch)",
            "Give master=False, which needs no such container, or free resources for the first pod",
            heals=False, lost="killed",
        ),
        Entry(
            "agent-gave-up", (Seen.STRUCTURE,), "", "the agent of {pod} gave up: {said}",
            "'kubectl -n {namespace} logs {pod_name}' shows its log", heals=False,
        ),
        Entry(
            "ended", (Seen.STRUCTURE,), "",
            "{pod} ended with {exit} before its agent could say why{last_said}",
            "'kubectl -n {namespace} logs {pod_name}' shows its log", heals=False, cause=_POD_LOST,
        ),
        Entry(
            "pod-failed", (Seen.POD,), "", "{pod} failed: {detail}",
            "'kubectl -n {namespace} describe pod {pod_name}' shows all that is known", heals=False, cause=_POD_LOST,
        ),
    )),
    ("The job as a whole", (
        Entry(
            "operator-dead", (Seen.STRUCTURE,), "",
            "{controller} has not looked at the job for {waited} s: it has no status, no pods and no events",
            "Have the administrator look at it: '{find_controller}'",
        ),
        Entry(
            "queued", (Seen.STRUCTURE,), "", "the job is queued in {queue}{position}{queue_said}",
            "Wait; 'kubectl -n {namespace} get workloads' shows the queue",
        ),
        Entry(
            "queue-closed", (Seen.STRUCTURE,), "", "the job is suspended: {queue} does not take it ({detail})",
            "Cancel it and correct queue=, or have the administrator make or open the queue",
        ),
        Entry(
            "queued-for-ever", (Seen.STRUCTURE,), "",
            "the job asks for more than {queue} ever has{queue_said}",
            "Cancel it, and ask for less (resources=, number_of_processes=), or have the administrator raise the queue's quota",
        ),
        Entry(
            "suspended", (Seen.STRUCTURE,), "", "the job is suspended (`suspend` in the object)",
            "Resume it with kubectl -n {namespace} patch {jobs} {job} --type merge -p '{resume}'",
        ),
        Entry(
            "sidecar", (Seen.STRUCTURE,), "",
            "the ranks of {pod} have ended, but its container {sidecar} still runs",
            'Keep the sidecar away (for Istio the annotation sidecar.istio.io/inject: "false" on the pods), or delete the job',
        ),
        Entry(
            "job-failed", (Seen.STRUCTURE,), "",
            "{controller} says that the job failed: {detail}",
            "'kubectl -n {namespace} describe {jobs} {job}' shows all that is known", heals=False, cause=_POD_LOST,
        ),
        Entry(
            "job-deleted", (Seen.STRUCTURE,), "",
            "the {job_kind} {job} was deleted from the namespace {namespace}", "Submit it again if that was a mistake",
            heals=False, cause=FailureCause.USER,
        ),
        Entry(
            "job-expired", (Seen.STRUCTURE,), "",
            "the {job_kind} {job} was deleted from the namespace {namespace}, and this notebook did not see how it ended: a person "
            "deleted it, or the cluster did, {ttl} s after its end (ttl_s)",
            "Its store keeps the results, if it has one (store=); a longer ttl_s leaves more time to attach",
            heals=False, cause=FailureCause.USER,
        ),
        Entry(
            "waits-for-master", (Seen.STRUCTURE,), "",
            "{pod} waits until the master's name can be resolved (init-pytorch)",
            "That should take seconds: the cluster's DNS does not work", is_usual=True,
        ),
        Entry(
            "not-readable", (Seen.STRUCTURE,), "",
            "you may not list and watch {kind} in the namespace {namespace}, so {unknown} is not known",
            "Have the administrator grant get, list and watch of {kind}",
        ),
        Entry(
            "watch-cut", (Seen.STRUCTURE,), "",
            "the API server {what}; what is shown is what was last seen", "kale_dist asks again by itself",
        ),
    )),
)  # fmt: skip
"""Titles and entries, in the order in which the page shows them."""

ALL: tuple[Entry, ...] = tuple(entry for _, group in GROUPS for entry in group)

_BY_NAME = {entry.name: entry for entry in ALL}
_BY_SEEN = {seen: tuple(entry for entry in ALL if seen in entry.seen) for seen in Seen}
_PATTERNS = {entry.name: re.compile(entry.pattern, re.DOTALL) for entry in ALL}


def named(name: str) -> Entry:
    """The entry of this name.

    Raises:
        KeyError: There is none.
    """
    return _BY_NAME[name]


def match(seen: Seen, words: str, container: str = "") -> tuple[Entry, dict[str, str]] | None:
    """The first entry that fits.

    Args:
        seen: Where the words were found.
        words: The cluster's words, in the form that `Seen` gives.
        container: The container they are about; empty for none.

    Returns:
        The entry, and what its pattern's named groups found; None if no entry fits.
    """
    for entry in _BY_SEEN[seen]:
        if entry.container not in ("", container) or not (found := _PATTERNS[entry.name].search(words)):
            continue
        facts = {name: value.strip() for name, value in found.groupdict().items() if value}
        if entry.fits is None or entry.fits(facts):
            return entry, facts
    return None
