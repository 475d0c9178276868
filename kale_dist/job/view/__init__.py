"""A job as text and as HTML. Pure: everything shown comes from the arguments, the present moment too.

Both pictures say the same: the state in one sentence, how far the training is, the metrics, a row for each rank, notes,
and the end of the log. The HTML carries its styles inline and no script, so that it stays what it is in a saved
notebook, an exported page, and a viewer that strips styles.
"""

from __future__ import annotations

from kale_dist.job.view.markup import html, parts
from kale_dist.job.view.markup import profile as profile_html
from kale_dist.job.view.plain import profile as profile_text
from kale_dist.job.view.plain import text

__all__ = ["LOG_LINES", "html", "parts", "profile_html", "profile_text", "text"]

LOG_LINES = 12
"""Lines of the log's end that a picture has room for."""
