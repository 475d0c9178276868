"""Images that cannot be pulled or are not what they should be."""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble, pattern

_PULL = "(ErrImagePull|ImagePullBackOff|RegistryUnavailable)"

TROUBLES = (
    Trouble(
        name="init-image",
        title="The image of the operator's init container",
        place=Place.WAITING,
        container="init-pytorch",
        pattern=pattern("ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|RegistryUnavailable"),
        sentence="{pod} waits: the image {image} of init-pytorch, which the operator puts before workers, cannot be "
        "pulled: {detail}",
        remedy="Give cluster={{'master': False}}, for which it is not needed, or have the administrator set the "
        "operator's --pytorch-init-container-image",
    ),
    Trouble(
        name="pull-forbidden",
        title="The registry does not let the node pull",
        place=Place.WAITING,
        pattern=pattern(
            _PULL + r".*(40[13] (Unauthorized|Forbidden)|[Uu]nauthorized|[Ff]orbidden|denied|insufficient_scope"
            r"|authorization failed|authentication required|no basic auth|may require)"
        ),
        sentence="{pod} waits: the registry refuses to give the node the image {image}: {detail}",
        remedy="Make a Secret with 'kubectl -n {namespace} create secret docker-registry' and name it in "
        "cluster={{'image_pull_secrets': [...]}}",
    ),
    Trouble(
        name="image-platform",
        title="The image is not made for the node's processor",
        place=Place.WAITING,
        pattern=pattern(_PULL + ".*no match for platform"),
        sentence="{pod} waits: the image {image} is not there for the processor of node {node}",
        remedy="Build it for that processor, or choose other nodes with cluster={{'node_selector': ...}}",
    ),
    Trouble(
        name="image-rate",
        title="The registry has had too many requests",
        place=Place.WAITING,
        pattern=pattern(_PULL + ".*(toomanyrequests|429|rate limit)"),
        sentence="{pod} waits: the registry gives no more images for now, among them {image}",
        remedy="Wait, log in with cluster={{'image_pull_secrets': [...]}}, or push the image to a registry of your own",
    ),
    Trouble(
        name="image-not-found",
        title="The image does not exist",
        place=Place.WAITING,
        pattern=pattern(_PULL + r".*(not found|NotFound|manifest unknown|name unknown|does not exist)"),
        sentence="{pod} waits: the image {image} was not found in its registry",
        remedy="Push it there, or name another one with image=",
    ),
    Trouble(
        name="registry-unreachable",
        title="The node does not reach the registry",
        place=Place.WAITING,
        pattern=pattern(
            _PULL + ".*(no such host|connection refused|timeout|deadline exceeded|connection reset|no route"
            "|x509|tls|HTTP response to HTTPS|failed to do request)"
        ),
        sentence="{pod} waits: node {node} does not reach the registry of {image}: {detail}",
        remedy="Give the address by which the nodes pull, which may differ from the one by which you push",
    ),
    Trouble(
        name="pull-failed",
        title="The image cannot be pulled for another reason",
        place=Place.WAITING,
        pattern=pattern(_PULL),
        sentence="{pod} waits: the image {image} cannot be pulled: {detail}",
        remedy="'kubectl -n {namespace} describe pod {pod_name}' shows all that the node says",
    ),
    Trouble(
        name="image-invalid",
        title="The image's name is not a name",
        place=Place.WAITING,
        pattern=pattern("InvalidImageName"),
        sentence="{pod} cannot start: {image} is not the name of an image",
        remedy="Write it as registry/repository:tag, all but the tag in lower case",
        is_final=True,
    ),
    Trouble(
        name="image-never",
        title="The image is not on the node and must not be pulled",
        place=Place.WAITING,
        pattern=pattern("ErrImageNeverPull"),
        sentence="{pod} waits: the image {image} is not on node {node}, and image_pull_policy='Never' forbids to pull it",
        remedy="Leave image_pull_policy out",
    ),
)
