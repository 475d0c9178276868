"""Calls of tests that change one setting at a time: arguments of the call and of its place stand in one dict.

`cluster` may hold some of the place's arguments in a dict of its own.
"""

import kale_dist as kd
from kale_dist.calls.request import gathered


def launch(fn, *args, cluster=None, **given):
    return kd.launch(fn, *args, **gathered({**given, **(cluster or {})}))


def distribute(*args, cluster=None, **given):
    return kd.distribute(*args, **gathered({**given, **(cluster or {})}))


def render(*args, cluster=None, **given):
    return kd.render(*args, **gathered({**given, **(cluster or {})}))
