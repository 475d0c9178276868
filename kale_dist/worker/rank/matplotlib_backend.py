"""Matplotlib's backend in a rank: figures are drawn in memory, and `show()` sends them to the notebook.

Matplotlib imports this module itself, by the name in MPLBACKEND.
"""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from kale_dist.worker.rank import stand_ins

__all__ = ["FigureCanvas", "show"]


def show(*_args: Any, **_kwargs: Any) -> None:
    """Send all open figures, and close them, as a notebook does at the end of a cell."""
    for number in plt.get_fignums():
        stand_ins.display(plt.figure(number))
    plt.close("all")
