"""The formats that notebook and worker share: files, the log, events, the order, signed requests. Standard library only.

Nothing here depends on how bytes are sent. The same order reaches an agent through a socket on this machine, a mounted Secret
or a container's archive; the same blocks stand in a job's log, come over a connection and appear on a head's stdout.
"""

from __future__ import annotations

from kale_dist.wire.decoding import WRITTEN, decode, decode_json_lines, encode, encode_json, fields_of, readers_of
from kale_dist.wire.events import (
    HISTORY,
    MEASURED_SOURCES,
    BatchLoss,
    FailureCause,
    MetricRow,
    Moment,
    RankStateName,
    StateName,
    Verdict,
    last_name,
)
from kale_dist.wire.files import JobFiles
from kale_dist.wire.log import (
    MAX_ATTEMPT,
    MAX_LINE_BYTES,
    OUTCOME_PART_BYTES,
    PREFIX,
    Block,
    BlockReader,
    EventBlock,
    Foreign,
    LineBlock,
    LogLine,
    OutcomePart,
    ProgressBlock,
    Stream,
    body_of,
    clean,
    encode_event,
    encode_lines,
    encode_outcome,
    encode_progress,
    lines_after,
    own_lines,
    prefix_of,
    visible,
)
from kale_dist.wire.order import (
    CANCEL_GRACE_S,
    EXIT_BROKEN,
    EXIT_LOST_HEAD,
    EXIT_TERMINATED,
    FIRST_SIGNAL,
    GRACE_S,
    STACKS_SIGNAL,
    STALL_WARN_S,
    TRAINERS_VARIABLE,
    VERSION,
    Assignment,
    Attempt,
    Debugging,
    EndsWith,
    InputFiles,
    Member,
    Offer,
    Op,
    Order,
    Package,
    PodVariable,
    Policy,
    ProcessState,
    Source,
    socket_address,
)
from kale_dist.wire.requests import (
    BODY_HEADER,
    MAC_HEADER,
    SIZE_HEADER,
    check_request,
    mark_of,
    sign_request,
)
from kale_dist.wire.sealing import seal, unseal
