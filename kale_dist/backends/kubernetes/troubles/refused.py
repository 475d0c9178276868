"""Pods that the API server refuses to the operator. The job's status may stay empty for ever; only events tell."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern

TROUBLES = (
    Trouble(
        name="quota",
        title="A quota is exhausted",
        place=Place.JOB_EVENT,
        pattern=pattern(
            r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limited>.+)"
        ),
        sentence="{missing}: the quota {quota} of the namespace {namespace} allows {limited}, of which {used} is taken, "
        "and the pod asks for {requested}",
        remedy="Ask for less, wait until others end, or have the administrator raise the quota",
    ),
    Trouble(
        name="quota-limits",
        title="A quota demands requests or limits",
        place=Place.JOB_EVENT,
        pattern=pattern(r"failed quota: (?P<quota>[^:]+): must specify (?P<what>.+)"),
        sentence="{missing}: the quota {quota} of the namespace {namespace} demands that pods say {what}",
        remedy="Give them in resources=, or through cluster={{'patch': ...}} for a container that is not ours",
    ),
    Trouble(
        name="limit-range",
        title="A LimitRange forbids the pod's size",
        place=Place.JOB_EVENT,
        pattern=pattern(r"forbidden: \[?(?P<rule>(maximum|minimum) \S+ usage per .+|.*limit to request ratio.+)"),
        sentence="{missing}: a LimitRange of the namespace {namespace} forbids its size: {rule}",
        remedy="Change resources= accordingly",
    ),
    Trouble(
        name="pod-security-init",
        title="Pod Security refuses workers because of init-pytorch",
        place=Place.JOB_EVENT,
        pattern=pattern(r'violates PodSecurity "(?P<level>[^"]+)": .*init-pytorch'),
        sentence='{missing}: the namespace {namespace} enforces Pod Security "{level}", which forbids the init-pytorch '
        "that the operator puts before the workers of a job with a master",
        remedy="Give cluster={{'master': False}}",
    ),
    Trouble(
        name="pod-security",
        title="Pod Security refuses the pods",
        place=Place.JOB_EVENT,
        pattern=pattern(r'violates PodSecurity "(?P<level>[^"]+)": (?P<rule>.+)'),
        sentence='{missing}: the namespace {namespace} enforces Pod Security "{level}": {rule}',
        remedy="Leave out what it forbids (host paths, a patch), or use another namespace",
    ),
    Trouble(
        name="service-account",
        title="The service account does not exist",
        place=Place.JOB_EVENT,
        pattern=pattern(r'serviceaccount "(?P<account>[^"]+)" not found'),
        sentence="{missing}: there is no service account {account} in the namespace {namespace}",
        remedy="Make it, or correct cluster={{'service_account': ...}}",
    ),
    Trouble(
        name="priority-class",
        title="The priority class does not exist",
        place=Place.JOB_EVENT,
        pattern=pattern(r"no PriorityClass with name (?P<class_name>\S+)"),
        sentence="{missing}: there is no priority class {class_name}",
        remedy="Correct cluster={{'priority_class': ...}}; 'kubectl get priorityclasses' lists them",
    ),
    Trouble(
        name="webhook-unreachable",
        title="A webhook does not answer",
        place=Place.JOB_EVENT,
        pattern=pattern(r'failed calling webhook "(?P<webhook>[^"]+)": (?P<why>.+)'),
        sentence="{missing}: the webhook {webhook}, which has to look at every pod, does not answer: {why}",
        remedy="Tell the administrator; the pods are made by themselves once it answers",
    ),
    Trouble(
        name="webhook",
        title="A webhook or policy refuses the pods",
        place=Place.JOB_EVENT,
        pattern=pattern(
            r"(admission webhook \"|ValidatingAdmissionPolicy ')(?P<policy>[^\"']+).*?denied (the )?request: (?P<why>.+)"
        ),
        sentence="{missing}: the cluster's policy {policy} refuses it: {why}",
        remedy="Do as it says, by cluster={{'labels': ...}} or cluster={{'patch': ...}}, or use another namespace",
    ),
    Trouble(
        name="name-taken",
        title="Pods of this name are there already",
        place=Place.JOB_EVENT,
        pattern=pattern(r'"(?P<object>[^"]+)" already exists'),
        sentence="{missing}: there is a {object} already, which does not belong to this job",
        remedy="Delete it, or give this job another name",
    ),
    Trouble(
        name="refused",
        title="Pods are refused for another reason",
        place=Place.JOB_EVENT,
        pattern=pattern("."),
        sentence="{missing}: {detail}",
        remedy="'kubectl -n {namespace} describe pytorchjob {job}' shows all that was said",
    ),
)
