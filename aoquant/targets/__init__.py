"""Targets: what convert leaves behind for each PTQ config, and what prepare therefore has to compute.

A target joins a recipe (formats and the GEMM contract of the deployed kernel), the shapes and dtypes which that kernel
takes, and `build`, which wraps the codes we encoded in the deployed tensor. torchao's configs keep torchao's own tensor
subclasses, built from OUR codes, so that the deploy path is unchanged and converting needs no kernel package.
"""

import difflib
import importlib.metadata
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from aoquant._messages import naming
from aoquant.config import WeightConfig

from . import fake, torchao_floats, torchao_int4, torchao_integers
from .refused import CALIBRATED, REASONS
from .target import Fields, Target, packed_target

__all__ = ["CALIBRATED", "REASONS", "Target", "fake_target", "resolve", "supported"]

fake_target = fake.target

# Releases of torchao whose numbers test/golden holds and test/targets compares. Others moved: 0.17's intx and int8
# scales, and what is to be 0.19 rounds MX's scales of tiny and of infinite blocks otherwise
# (docs/evidence/compatibility.md).
PROVED = ("0.18",)

# by class name, so that torchao's prototype configs need not be imported here
_TORCHAO: dict[str, Callable[[Any], Target]] = {
    **torchao_integers.TARGETS,
    **torchao_int4.TARGETS,
    **torchao_floats.TARGETS,
}


def resolve(config: Any) -> Target:
    """The target of a PTQ config, torchao's or ours.

    Raises:
        ValueError: the config's type, or one of its options, has no exact target here, or this torchao's numbers were
            not proved equal.
    """
    if isinstance(config, WeightConfig):
        return packed_target(config.recipe())
    name, torchaos = type(config).__name__, type(config).__module__.startswith("torchao.")
    if torchaos and name in _TORCHAO:
        try:
            with naming(name):
                _check_version()
                fields = Fields(config)
                target = _TORCHAO[name](fields)
                fields.check()
                return target
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{name}: a field holds a value of another type than torchao's: {error}") from None
    if torchaos and name in REASONS:
        why, instead = REASONS[name]
        raise ValueError(f"{name} has no exact prepare: {why}. Use {instead} instead")
    near = difflib.get_close_matches(name, _TORCHAO, 3, 0.3)
    raise ValueError(
        f"{name} is not supported; near it: {', '.join(near) or 'none'}. aoquant takes its own configs and torchao's "
        f"{', '.join(_TORCHAO)}"
    )


@cache
def _torchao(version: Callable[[str], str]) -> str:
    return version("torchao")


def _check_version() -> None:
    """Raise ValueError for a torchao whose layers were not compared with ours, byte for byte."""
    found = _torchao(importlib.metadata.version)  # which takes 5 ms
    if not re.fullmatch(rf"({'|'.join(map(re.escape, PROVED))})\.\d+(\+(?!git).*)?", found):
        raise ValueError(
            f"torchao {found} was not proved exact, and its layers may compute other numbers than a prepared layer: install torchao "
            f"{PROVED[-1]} for its configs, or train aoquant's own, which every torchao serves"
        )


def supported() -> list[str]:
    """Names of the torchao configs that have a target."""
    return list(_TORCHAO)
