"""The vocabulary of a target: how it stores a layer, and how it says that it cannot."""

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from aoquant.config import WeightConfig
from aoquant.linear.tensor import PackedTensor
from aoquant.recipes import list_recipes

# format -> (the library that it needs, the module here that stores its layers and describes its folders)
FORMATS = {
    "compressed-tensors": ("compressed_tensors", "compressed"),
    "modelopt": ("compressed_tensors", "modelopt"),
    "gguf": ("gguf", "ggml_types"),
}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")  # one expert's matrix, by its module; the group names all of the layer's


@dataclass(frozen=True)
class Stored:
    """A packed layer as a target stores it. tensors: by the name that follows the module's. scheme: what the target's
    config says of it.

    notes: where an engine will compute something else than training did, though every stored number is the same.
    """

    tensors: dict[str, Tensor]
    scheme: Any
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Description:
    """How a folder is quantised. config: config.json's quantization_config. files: further JSON files, by name."""

    config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def layout_of(format: str) -> Any:
    """Return the module of a format. Raises ImportError: its library is missing."""
    return import_module(f"aoquant.export.{FORMATS[format][1]}")


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
    """Return whether every value and its reciprocal are normal powers of two: multiplying by either is exact."""
    mantissa, exponent = t.float().frexp()
    return bool(((mantissa == 0.5) & (exponent - 1 >= -126) & (exponent - 1 <= 126)).all())


def one_outer(p: PackedTensor, holder: str, instead: str) -> Tensor:
    """Return the one outer scale (1,) of a layer, 1 where it has none. holder: of the scale, with its verb.

    Raises:
        Unfit: its rows have scales of their own.
    """
    outer = torch.ones(1, device="cpu") if p.per_tensor_scale is None else p.per_tensor_scale.flatten()
    if not torch.equal(outer, outer[:1].expand_as(outer)):
        raise Unfit(f"{p.format} has an outer scale for each row, and {holder}", instead)
    return outer[:1]


def recipe_name(weight: str, activation: str = "") -> str:
    """Return the recipe of two formats, which `get_recipe` takes; activation: "" for high precision.

    A format alone is no recipe. Where a recipe with a name has the formats, that name is the better advice: it brings
    the contract that engines compute.
    """
    return _named().get((weight, activation), f"{weight}/{activation}")


@cache
def _named() -> dict[tuple[str, str], str]:
    """Recipes by weight and activation; of several the first, and none that has a backward of its own."""
    found: dict[tuple[str, str], str] = {}
    for recipe in list_recipes():
        config = recipe.make()
        if isinstance(config, WeightConfig) and "backward" not in recipe.training:
            linear = config.recipe()
            found.setdefault((linear.fprop_weight.name, linear.input_name), recipe.name)
    return found
