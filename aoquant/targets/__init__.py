"""Targets: what convert leaves behind for each PTQ config, and what prepare therefore has to compute.

A target joins a recipe (formats and the GEMM contract of the deployed kernel), the shapes and dtypes which that kernel
takes, and `build`, which wraps the codes we encoded in the deployed tensor. torchao's configs keep torchao's own tensor
subclasses, built from OUR codes, so that the deploy path is unchanged and converting needs no kernel package.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from aoquant.config import WeightConfig

from . import fake, floats, int4, integers
from .base import Fields, Target, packed_target
from .refused import REASONS

__all__ = ["REASONS", "Target", "fake_target", "resolve", "supported"]

fake_target = fake.target

# by class name, so that torchao's prototype configs need not be imported here
_TORCHAO: dict[str, Callable[[Any], Target]] = {**integers.TARGETS, **int4.TARGETS, **floats.TARGETS}


def resolve(config: Any) -> Target:
    """The target of a PTQ config, torchao's or ours.

    Raises:
        ValueError: the config's type, or one of its options, has no exact target here.
    """
    if isinstance(config, WeightConfig):
        return packed_target(config.recipe())
    name, torchaos = type(config).__name__, type(config).__module__.startswith("torchao.")
    if torchaos and name in _TORCHAO:
        try:
            fields = Fields(config)
            target = _TORCHAO[name](fields)
            fields.check()
            return target
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        except AttributeError as error:  # an older torchao, whose numerics are older too
            raise ValueError(
                f"{name}: torchao {importlib.metadata.version('torchao')} lacks the option {error.name!r}, so its layer computes something "
                "else than what is known here: upgrade to torchao 0.18"
            ) from None
    if torchaos and name in REASONS:
        why, instead = REASONS[name]
        raise ValueError(f"{name} has no exact prepare: {why}. Use {instead} instead")
    near = difflib.get_close_matches(name, _TORCHAO, 3, 0.3)
    raise ValueError(
        f"{name} is not supported; near it: {', '.join(near) or 'none'}. aoquant takes its own configs and torchao's "
        f"{', '.join(_TORCHAO)}"
    )


def supported() -> list[str]:
    """Names of the torchao configs that have a target."""
    return list(_TORCHAO)
