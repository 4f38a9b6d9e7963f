"""A target: a recipe, the kernel's limits, and how the deployed tensor is built."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.formats import Encoded, Operand, Scales
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor

Build = Callable[[Encoded, Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """recipe: of the prepared layer. build(encoded, weight): the deployed tensor. limit(n, k, dtype): why the kernel
    cannot take a weight, or None. tensor: the deployed class's name. fix(scales): this target with the layer's
    calibrated activation scales, for recipes whose input_scales are held.
    """

    recipe: LinearRecipe
    build: Build
    tensor: str
    limit: Callable[[int, int, torch.dtype], str | None] = lambda n, k, dtype: None
    fix: "Callable[[Scales], Target] | None" = None

    def why_not(self, n: int, k: int, dtype: torch.dtype) -> str | None:
        """Return why an (n, k) weight of `dtype` cannot have this target, and what to do; None when it can."""
        formats: list[Operand] = [f for f in (self.recipe.fprop_weight, self.recipe.fprop_input) if f is not None]
        return next((reason for f in formats if (reason := f.why_not(k, dtype))), None) or self.limit(n, k, dtype)

    def widened(self) -> "Target":
        """The target of float16 weights: scales that a packed tensor stores in float32 are computed so too. A tensor of
        torchao's has torchao's numbers.
        """
        weight = self.recipe.fprop_weight
        wide = weight.format.widened
        if self.tensor != "PackedTensor" or weight.transform is not None or wide is None:
            return self
        recipe = dataclasses.replace(self.recipe, fprop_weight=dataclasses.replace(weight, format=wide))
        return packed_target(recipe)

    def why_not_embedding(self, embedding: nn.Embedding, *, has_gemm: bool) -> str | None:
        """Return why an embedding cannot have this target, and what to do; None when it can. The kernel's limits are
        about its GEMM.

        has_gemm: whether a linear layer shares the weight and quantises its inputs.
        """
        if self.tensor not in EMBEDDABLE:
            return f"{self.tensor} is a weight of linear layers, no embedding reads it: use aoquant's weight-only configs, or IntxWeightOnlyConfig"
        if self.recipe.fprop_input is not None and self.recipe.transform is None and not has_gemm:
            return f"the config quantises activations ({self.recipe.input_name}), and an embedding has none: use a weight-only config"
        if self.recipe.transform is not None:
            return f"the config transforms the weight ({self.recipe.transform}), and nothing transforms what an embedding reads: leave out transform="
        if embedding.max_norm is not None:
            return f"max_norm = {embedding.max_norm} renormalises the float weight in every forward, and packed codes cannot be: set max_norm to None"
        return self.recipe.fprop_weight.why_not(embedding.embedding_dim, embedding.weight.dtype)


# deployed tensors whose rows F.embedding can read
EMBEDDABLE = ("PackedTensor", "IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor")


def packed_target(recipe: LinearRecipe, matrix: Tensor | None = None) -> Target:
    """aoquant's packed tensor; calibrated scales go into its activation format's name, a fitted transform into it."""

    def fix(scales: Scales) -> Target:
        assert recipe.fprop_input is not None
        if scales.dynamic:
            return packed_target(recipe.deployed, scales.transform)
        fixed = recipe.fprop_input.fix(*numbers(scales))
        return packed_target(dataclasses.replace(recipe.deployed, fprop_input=fixed, input_scales="dynamic"))

    def build(e: Encoded, w: Tensor) -> Tensor:
        return PackedTensor.from_encoded(e, recipe, w.dtype, matrix)

    return Target(recipe, build, "PackedTensor", fix=fix)


def numbers(scales: Scales) -> list[float]:
    """Per-tensor scales as Python numbers, exactly, in `Scales`' order."""
    return [t.item() for t in scales if t is not None]


# fields that a target does not read: quantize_ takes the step, and the state of the process is not a layer's
_ELSEWHERE = ("step", "set_inductor_config")


class Fields:
    """A torchao config that records which of its fields a target reads, so that `check` can refuse the others."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.read = set(_ELSEWHERE)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)

    def replaced(self, **changes: Any) -> "Fields":
        """Return the fields of a copy of the config with these changes."""
        return Fields(dataclasses.replace(self.config, **changes))

    def check(self) -> None:
        """Raise ValueError for a field that no target has read and whose value is not torchao's default."""
        for field in dataclasses.fields(self.config):
            got = getattr(self.config, field.name)
            if field.name not in self.read and got != field.default:
                raise ValueError(
                    f"{field.name} must be {field.default} here, got {got}: this option has no meaning for the layer that the other options "
                    "ask for, or none that is known here. Leave it out"
                )


def group(size: Any) -> int:
    """Return the size of a group, a positive integer; raise ValueError for another."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"group_size must be a positive integer, got {size}")
    return size


def require(argument: str, got: Any, *allowed: Any, instead: str = "") -> Any:
    """`got`, when it is one of `allowed`; a ValueError that says what to do otherwise."""
    if got not in allowed:
        wanted = " or ".join(str(a) for a in allowed)
        raise ValueError(f"{argument} must be {wanted} here, got {got}{'; ' + instead if instead else ''}")
    return got
