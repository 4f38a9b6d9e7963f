"""The vocabulary of a target: how it stores a layer, and how it says that it cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aoquant.export.recipe_names import recipe_name

EXPERT = re.compile(r"(.*\.experts)\.\d+\.")  # one expert's matrix, by its module; the group names all of the layer's


@dataclass(frozen=True)
class Stored:
    """A packed layer as a target stores it. tensors: by the name that follows the module's. scheme: what the target's
    config says of it.

    notes: where an engine that reads it will compute something else than training did, though every stored number is
        the same.
    """

    tensors: dict[str, Tensor]
    scheme: Any
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Description:
    """The description of a folder's quantisation. config: config.json's quantization_config. files: further JSON files,
    by name.
    """

    config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


class Unfit(Exception):
    """A target cannot hold a layer's numbers as they are. instead: what would fit, as advice; beside_experts: what
    would in a model with experts, where that is something else.
    """

    def __init__(self, reason: str, instead: str, beside_experts: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.instead, self.beside_experts = reason, instead, beside_experts or instead


def symmetric(group: int) -> str:
    """Advice for 4-bit integers of experts: engines' kernels for these have no zero points."""
    name = recipe_name(f"intx4-g{group or 32}")
    recipe = f"{name}-experts, or {name} for linear layers too" if group == 32 else name
    return f"train the recipe {recipe} (symmetric integers, as engines run experts)"


def power_of_two(t: Tensor) -> bool:
    """Whether every value is a normal power of two, by which multiplying and dividing are exact."""
    mantissa, _ = t.float().frexp()
    return bool(((mantissa == 0.5) & (t > 0)).all())
