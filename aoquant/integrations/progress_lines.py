"""transformers' own progress bars, which fill a log with control characters; aoquant's are `_messages.progress`."""

from __future__ import annotations

import sys


def no_bars_in_logs() -> None:
    """Switch off transformers' own bars where there is no terminal."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
