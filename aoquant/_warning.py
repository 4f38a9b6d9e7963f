"""The category of aoquant's warnings, so that a program can filter them alone:

warnings.filterwarnings("error", category=aoquant.AoquantWarning)
"""

from __future__ import annotations


class AoquantWarning(UserWarning):
    """Any warning of aoquant's."""
