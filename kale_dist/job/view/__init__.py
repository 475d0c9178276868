"""A job as text and as HTML. Pure: everything shown, including the present time, comes from the arguments.

Both pictures have the same content: the state in one sentence, the progress, the metrics, a row for each rank, notes,
and the end of the log. The HTML has inline styles and no script, so that it looks the same in a saved
notebook, an exported page, and a viewer that strips styles.
"""

from __future__ import annotations

from kale_dist.job.view.markup import html, parts
from kale_dist.job.view.plain import text

__all__ = ["LOG_LINES", "html", "parts", "text"]

LOG_LINES = 12
"""How many of the log's last lines a picture shows."""
