"""What the hunt has found. Each difference is a line: known, with its reason, or mended, and tried again in each gate."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Found:
    """A case that was wrong."""

    case: str
    """A line as `Case.read` takes it. All cases with these rows count as the same; `a|b` means either."""
    why: str
    is_certain: bool = True
    """Whether it comes with each run."""


KNOWN = (
    Found(
        "step=clips-values|clips-by-hand strategy=server|server-2|server-backup",
        "the page of parameter servers says that a step's own clipping comes before the mean over workers",
    ),
    Found(
        "step=gathers strategy=server|server-2|server-backup",
        "the page of parameter servers says that a step's own collectives would wait for the servers; the error names the lines",
        is_certain=False,
    ),
    Found(
        "optimizer=distance strategy=server|server-2|server-backup",
        "the page of parameter servers says that optimizers have to work tensor by tensor; known ones are refused by name",
    ),
    Found(
        "model=functional-head strategy=tensor|mesh-data-tensor|mesh-fsdp-tensor",
        "the page of tensor says that a weight used outside of its layer is this rank's part; torch complains of the shape",
    ),
    Found(
        "step=clamps-weights strategy=pipeline|pipeline-1|pipeline-checkpointed|mesh-data-pipeline",
        "weights of other stages cannot be written; torch complains that their elements share memory",
    ),
    Found(
        "model=frozen step=clips-values strategy=pipeline|pipeline-1|pipeline-checkpointed|mesh-data-pipeline",
        "torch cannot clip the values of no gradients, which is what a stage of frozen layers has",
    ),
    Found(
        "model=frozen step=sam-in-the-step strategy=pipeline|pipeline-1|pipeline-checkpointed|mesh-data-pipeline",
        "the step stacks the norms of a stage's gradients, and a stage of frozen layers has none",
    ),
    Found(
        "step=sam-by-two-steps optimizer=sam strategy=fsdp|fsdp-whole",
        "after `p.data = old` the two share memory in one process, and with parts the values are copied: only the kept ones differ",
    ),
    Found(
        "step=penalizes-weights strategy=tensor|mesh-data-tensor",
        "parts that weigh nearly the same: losses of ranks differ by less than a thousandth, which is taken for rounding",
        is_certain=False,
    ),
    Found(
        "model=attention step=penalizes-weights optimizer=adam|adamw|adam-fused|adagrad|rmsprop",
        "Adam magnifies the rounding of a gradient that is 0 but for the penalty: that of the bias of the keys",
        is_certain=False,
    ),
    Found(
        "model=experts step=clips-norm fault=within|between strategy=local-sgd-1|local-sgd-2|local-sgd-epoch",
        "zero_grad(set_to_none=False) leaves zeros, which move a weight by its momentum; after a restart it finds None",
        is_certain=False,
    ),
    Found(
        "step=clamps-weights strategy=diloco",
        "the momentum of DiLoCo's step takes the first clamp for a direction, and goes on in it",
        is_certain=False,
    ),
    Found(
        "model=sparse-embedding fault=within|between",
        "checkpoints hold no sparse tensors, here of the optimizer's momentum, and the log says so",
        is_certain=False,
    ),
)
"""Wrong, and why. The nightly tells when one is right: then it goes to `MENDED`."""

MENDED = (
    Found("step=penalizes-weights strategy=fsdp", "torch complained in its own words of parts and ordinary tensors"),
    Found(
        "step=sets-gradients strategy=fsdp",
        "gradients of torch.autograd.grad were not refused, and trained other weights",
    ),
    Found("model=tied-3 strategy=tensor", "a layer read the shape of a shared weight that was divided before"),
    Found("model=tied-head-first strategy=tensor ranks=4", "the same, with the Linear before its Embedding"),
    Found("thing=coo", "a notice asked a sparse tensor for its address"),
    Found("thing=csr place=train_args", "the same, in the step's arguments"),
    Found("thing=hostile place=train_args", "what is noted of train_args asked it for `item`"),
    Found(
        "loader=stream ranks=3 option=split samples=16",
        "unequal parts of a stream were of other batches; it is refused",
    ),
    Found("step=closure ranks=2 option=clip", "here the hunt itself was wrong: it clipped before the closure"),
    Found("thing=second-optimizer place=dict", "no notice named an optimizer whose state stays in the ranks"),
    Found("step=adds-to-data strategy=local-sgd-2", "weights that no optimizer changed were not averaged"),
    Found("step=sam-by-two-steps optimizer=sam strategy=local-sgd-2", "steps of an optimizer within did not count"),
    Found("step=sam-by-two-steps optimizer=sam fault=within", "the state of an optimizer within was in no checkpoint"),
    Found("step=adds-to-data strategy=server ranks=3", "the error named random numbers as the reason"),
    Found("step=sam-in-the-step strategy=fsdp", "the norm was that of this rank's part"),
    Found("step=penalizes-weights strategy=tensor", "the loss had the penalty of this rank's part"),
    Found("step=penalizes-gradients samples=17", "gradients within a loss were weighed twice in an uneven batch"),
    Found("step=sam-in-the-step option=accumulate", "zero_grad() between two passes of a batch was ignored"),
    Found("step=sets-gradients option=accumulate strategy=server ranks=3", "only the window's last batch counted"),
    Found("step=copy option=accumulate strategy=tensor", "the same"),
    Found(
        "step=sets-gradients strategy=pipeline", "gradients of torch.autograd.grad were None, and nothing was trained"
    ),
    Found(
        "model=sparse-embedding optimizer=two-groups strategy=diloco", "sparse states of the optimizer were averaged"
    ),
    Found("step=penalizes-gradients strategy=fsdp", "the penalty was left out"),
    Found("step=copy strategy=server samples=17 ranks=4", "gradients of a copy were not weighed in an uneven batch"),
    Found(
        "step=clips-norm strategy=fsdp option=accumulate", "held parts (DTensor) did not show that they were clipped"
    ),
    Found(
        "step=adds-to-data strategy=pipeline option=accumulate",
        "the rest of a window was stepped where no step is made",
    ),
    Found("step=unfreezes option=split ranks=3", "parameters that a step unfreezes were not weighed in uneven batches"),
    Found(
        "model=own-parameters strategy=ddp-powersgd ranks=3 option=split samples=27",
        "a gradient without dimensions was compressed",
    ),
    Found(
        "model=experts loader=stream optimizer=two-groups strategy=gossip-exponential ranks=4 option=clip samples=17",
        "an idle rank of a stream repeated its own last batch, and so used parameters that no sample used",
    ),
    Found(
        "model=experts loader=stream optimizer=adam step=backward-twice strategy=fsdp-whole samples=17",
        "the same",
    ),
    Found("model=sparse-embedding optimizer=two-groups strategy=tensor ranks=2", "a sparse momentum was not gathered"),
    Found("step=adds-to-data option=scheduler", "no scheduler moved where the optimizer had made no step"),
    Found(
        "loader=shuffled-by-seed strategy=gossip option=evaluates",
        "here the hunt itself was wrong: each of its ranks drew a random number to evaluate",
    ),
    Found(
        "model=sparse-embedding optimizer=two-groups strategy=ddp-ring ranks=2 samples=17",
        "here the hunt itself was wrong: it took the maximum of a sparse momentum",
    ),
)
"""What was wrong once."""
