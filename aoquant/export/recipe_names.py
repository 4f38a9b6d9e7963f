"""Names of recipes for formats to train instead: what `aoquant run --recipe` and `get_recipe` take.

A format alone is no recipe: "intx4-g32-asym" is refused there, and "intx4-g32-asym/" is taken. Where a recipe with a
name has the format, its name is the better advice: it brings the contract that engines compute.
"""

from __future__ import annotations

from functools import cache

from aoquant.config import WeightConfig
from aoquant.recipes import list_recipes


def recipe_name(weight: str, activation: str = "") -> str:
    """The recipe of two formats; activation: "" for high precision."""
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
