"""A public function refuses what is no model, or no path, before any work, and by the argument's name."""

from __future__ import annotations

import os

from torch import nn


def check_model(given: object, name: str = "model") -> None:
    """Raise ValueError unless the argument called `name` is a module."""
    if not isinstance(given, nn.Module):
        raise ValueError(
            f"{name} must be an nn.Module, got {type(given).__name__}: give the model itself, not a list, its name or its state_dict"
        )


def check_path(given: object, name: str, what: str) -> None:
    """Raise ValueError unless the argument called `name` is a path. what: has to be given."""
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"{name} must be {what}, got {type(given).__name__}: give a path, a str or os.PathLike")
