"""Functions for ranks in an image that has nothing but Python."""

import os
import sys

import kale_dist as kd


def where():
    kd.report(loss=0.5)
    print("hello from", kd.context().rank)
    return "torch" in sys.modules, int(os.environ["RANK"]), kd.context().world_size


def give_back(value):
    return value
