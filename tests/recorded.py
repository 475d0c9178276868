"""Records of events as files have them, with the fields that are as by default."""

import json

from kale_dist import wire
from kale_dist.wire.events import Event


def whole(record):
    event = Event.read(record)
    return record if event is None else json.loads(wire.encode_json({**wire.fields_of(event.what), **record}))


def events_in(data):
    """The events in whole lines."""
    return [whole(record) for record in wire.decode_json_lines(data)]
