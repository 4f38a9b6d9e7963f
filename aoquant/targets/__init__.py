"""Targets: what convert leaves behind for each PTQ config, and what prepare therefore has to compute.

A target joins a recipe (formats and the GEMM contract of the deployed kernel), the shapes and dtypes which that kernel takes, and
`build`, which wraps the codes we encoded in the deployed tensor. torchao's configs keep torchao's own tensor subclasses, built from
OUR codes, so that the deploy path is unchanged and converting needs no kernel package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aoquant.config import WeightConfig

from . import fake, floats, int4, integers
from .base import Target, packed_target

__all__ = ["Target", "fake_target", "resolve", "supported"]

fake_target = fake.target

# by class name: torchao's prototype configs are not imported before somebody else has
_TORCHAO: dict[str, Callable[[Any], Target]] = {**integers.TARGETS, **int4.TARGETS, **floats.TARGETS}


def resolve(config: Any) -> Target:
    """The target of a PTQ config, torchao's or ours.

    Raises:
        ValueError: the config's type, or one of its options, has no exact target here.
    """
    if isinstance(config, WeightConfig):
        return packed_target(config.recipe())
    make = _TORCHAO.get(type(config).__name__) if type(config).__module__.startswith("torchao.") else None
    if make is None:
        raise ValueError(
            f"{type(config).__name__} is not supported; aoquant takes its own configs and torchao's {', '.join(_TORCHAO)}"
        )
    try:
        return make(config)
    except ValueError as error:
        raise ValueError(f"{type(config).__name__}: {error}") from None


def supported() -> list[str]:
    """Names of the torchao configs that have a target."""
    return list(_TORCHAO)
