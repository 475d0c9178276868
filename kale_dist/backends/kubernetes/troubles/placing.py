"""Pods for which the scheduler finds no node. Its message has one part for each group of nodes that do not fit."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern

TROUBLES = (
    Trouble(
        name="claim-missing",
        title="A claim does not exist",
        place=Place.SCHEDULING,
        pattern=pattern(r'persistentvolumeclaim "(?P<claim>[^"]+)" not found'),
        sentence="{pod} waits: there is no claim {claim} in the namespace {namespace}",
        remedy="Make the PersistentVolumeClaim, or correct its name in volumes=",
    ),
    Trouble(
        name="claim-pending",
        title="A claim has no volume yet",
        place=Place.SCHEDULING,
        pattern=pattern("unbound (immediate )?PersistentVolumeClaims|didn't find available persistent volumes"),
        sentence="{pod} waits: its claim {claims} has no volume yet{claim_said}",
        remedy="'kubectl -n {namespace} describe pvc' says what it waits for; a StorageClass that exists and makes "
        "volumes helps",
    ),
    Trouble(
        name="claim-one-pod",
        title="A claim that only one pod may mount",
        place=Place.SCHEDULING,
        pattern=pattern("ReadWriteOncePod"),
        sentence="{pod} waits: its claim {claims} is ReadWriteOncePod, and another pod has it",
        remedy="Use a claim with access mode ReadWriteMany, or all ranks in one pod with processes_per_pod=",
    ),
    Trouble(
        name="volume-elsewhere",
        title="A volume that cannot be reached from free nodes",
        place=Place.SCHEDULING,
        pattern=pattern("volume node affinity conflict|PersistentVolume's node affinity"),
        sentence="{pod} waits: the volume of its claim {claims} can be reached only from nodes that do not take the pod "
        "({nodes})",
        remedy="Use a claim with access mode ReadWriteMany on storage that all nodes reach, or all ranks in one pod with "
        "processes_per_pod=",
    ),
    Trouble(
        name="gpu",
        title="Not enough GPUs",
        place=Place.SCHEDULING,
        pattern=pattern(r"Insufficient (?P<resource>\S*gpu\S*?)(?=[,.;]|$|\s)"),
        sentence="{pod} waits: it asks for {wanted} {resource} and no node has that many free{cluster_has} ({nodes})",
        remedy="Ask for fewer GPUs a pod (processes_per_pod=, resources={{'gpus': ...}}), or wait until others end",
    ),
    Trouble(
        name="memory",
        title="Not enough memory",
        place=Place.SCHEDULING,
        pattern=pattern(r"Insufficient (?P<resource>memory)"),
        sentence="{pod} waits: it asks for {wanted} memory and no node has that much free{cluster_has} ({nodes})",
        remedy="Ask for less with resources={{'memory_gib': ...}}, or wait until others end",
    ),
    Trouble(
        name="cpu",
        title="Not enough cores",
        place=Place.SCHEDULING,
        pattern=pattern(r"Insufficient (?P<resource>cpu)"),
        sentence="{pod} waits: it asks for {wanted} cpu and no node has that much free{cluster_has} ({nodes})",
        remedy="Ask for less with resources={{'cpu': ...}}, or wait until others end",
    ),
    Trouble(
        name="resource",
        title="Not enough of another resource",
        place=Place.SCHEDULING,
        pattern=pattern(r"Insufficient (?P<resource>[^,;\s]+?)(?=[,.;]|$|\s)"),
        sentence="{pod} waits: it asks for {wanted} {resource} and no node has that much free{cluster_has} ({nodes})",
        remedy="Ask for less in resources=, or wait until others end",
    ),
    Trouble(
        name="pods-full",
        title="Nodes that hold no more pods",
        place=Place.SCHEDULING,
        pattern=pattern("Too many pods"),
        sentence="{pod} waits: the nodes hold as many pods as they can ({nodes})",
        remedy="Wait until others end, or use fewer pods with processes_per_pod=",
    ),
    Trouble(
        name="node-selector",
        title="No node has the labels asked for",
        place=Place.SCHEDULING,
        pattern=pattern("didn't match Pod's node affinity"),
        sentence="{pod} waits: no free node fits its node selector or affinity ({nodes})",
        remedy="Compare cluster={{'node_selector': ...}} with 'kubectl get nodes --show-labels'; if the nodes with those "
        "labels are tainted, add cluster={{'tolerations': [...]}}",
    ),
    Trouble(
        name="taint",
        title="Nodes are tainted",
        place=Place.SCHEDULING,
        pattern=pattern("untolerated taint|had taint"),
        sentence="{pod} waits: nodes that would do keep pods away by a taint ({nodes})",
        remedy="Tolerate it with cluster={{'tolerations': [...]}}; 'kubectl describe nodes' shows the taints",
    ),
    Trouble(
        name="nodes-closed",
        title="Nodes take no pods",
        place=Place.SCHEDULING,
        pattern=pattern("were unschedulable|no nodes available"),
        sentence="{pod} waits: no node takes pods now ({nodes})",
        remedy="Wait, or ask the administrator: 'kubectl get nodes' shows which nodes are closed",
    ),
    Trouble(
        name="scheduling-gate",
        title="A pod is held back",
        place=Place.SCHEDULING,
        pattern=pattern("SchedulingGated"),
        sentence="{pod} waits: something else, such as a queue, holds it back from the scheduler (a scheduling gate)",
        remedy="Wait; 'kubectl -n {namespace} get pod {pod_name} -o yaml' names the gate",
    ),
    Trouble(
        name="unschedulable",
        title="No node for another reason",
        place=Place.SCHEDULING,
        pattern=pattern("."),
        sentence="{pod} waits: the scheduler finds no node for it ({nodes})",
        remedy="'kubectl -n {namespace} describe pod {pod_name}' shows all that the scheduler says",
    ),
)
