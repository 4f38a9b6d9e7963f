"""Ask export's own checks whether a recipe or a planned model could be exported, before training or conversion.

Stand-ins take the place of weights: small ones are packed as convert would pack them. No rule is written twice.
"""

import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from aoquant.export.fused_checks import INSTEAD, apart
from aoquant.export.source import Source, of_plan
from aoquant.export.targets import Unfit, layout_of
from aoquant.export.weights import Weight
from aoquant.formats import Operand, Scales
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor, parts_of
from aoquant.planning.changes import Change
from aoquant.planning.fused import shares

_SIZES = {"q_proj": 1.0, "k_proj": 3.0}  # of the siblings' weights, whose own outer scales differ then


@torch.no_grad()
def refusal(recipe: LinearRecipe, *, experts: bool = False) -> str | None:
    """Return why each of vLLM's layouts would refuse layers that train `recipe`, with what to train instead; None where
    one takes them. experts: advice is for experts.
    """
    layers = _siblings(recipe)
    first = None
    for layout in ("compressed-tensors", "modelopt"):
        store = layout_of(layout).store
        try:
            found = apart({name: store(p) for name, p in layers.items()}, {})
            if not found:
                return None
            kind = found[0][0]
            reason = f"q, k, v and gate, up would each have their own {kind}, and it fuses them under one. Instead: {INSTEAD[kind]}"
        except Unfit as error:
            reason = f"{error.reason}. Instead: {error.beside_experts if experts else error.instead}"
        first = first or reason
    return first


def planned(model: PreTrainedModel, changes: Iterable[Change], folder: Path) -> Source:
    """Return the source that a float model on meta becomes by `changes`, so that export can check it before.

    Codes stay on meta. Scales have their shapes and the values of a stand-in: siblings have equal scales, and a layer
    is refused for its format, its place in the model and its shape alone. folder: of the float model.
    """
    names = {id(p): list[str]() for p in model.parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        names[id(p)].append(name)
    weights = {name: _weight(name, change) for change in changes for name in names[id(change.weight)]}
    return of_plan(model, weights, folder)


def _weight(name: str, change: Change) -> Weight:
    if change.layer is None:
        shape = change.weight.shape[1:]
        return Weight(name, "PackedExperts", lambda codes: change.weight, lambda expert, codes: _shaped(change, shape))
    return Weight(name, change.target.tensor, lambda codes: _shaped(change, change.matrix().shape))


def _shaped(change: Change, shape: torch.Size) -> PackedTensor:
    """Return a weight (N, K) with codes on meta, each part filled with one number of the stand-in's."""
    recipe = change.target.recipe
    sample = _stand_in(recipe, change.dtype)
    encoded = recipe.fprop_weight.planned(torch.empty(shape, dtype=change.dtype, device="meta"))
    packed = PackedTensor.from_encoded(encoded, sample.recipe, change.dtype)
    parts = zip(parts_of(packed)[1:], parts_of(sample)[1:], strict=True)
    return packed._with([packed.qdata, *(_filled(like, t) for like, t in parts)])


def _filled(like: Tensor | None, values: Tensor | None) -> Tensor | None:
    return None if like is None or values is None else values.flatten()[:1].expand(like.shape)


@cache
@torch.no_grad()
def _stand_in(recipe: LinearRecipe, dtype: torch.dtype) -> PackedTensor:
    return _packed(recipe, _values(recipe).to(dtype), None, 1.0)


def _siblings(recipe: LinearRecipe) -> dict[str, PackedTensor]:
    """Two converted layers that read one input."""
    weights = {name: (_values(recipe) * size).bfloat16() for name, size in _SIZES.items()}
    held = recipe.fprop_weight.measure(weights["k_proj"]) if shares(recipe) else None  # the larger one
    return {name: _packed(recipe, weight, held, _SIZES[name]) for name, weight in weights.items()}


def _values(recipe: LinearRecipe) -> Tensor:
    k = math.lcm(recipe.fprop_weight.period, 256)
    if recipe.fprop_input is not None:
        k = math.lcm(k, recipe.fprop_input.period)
    return torch.arange(128 * k, dtype=torch.float32, device="cpu").sin().view(128, k)


def _packed(recipe: LinearRecipe, weight: Tensor, held: Scales | None, size: float) -> PackedTensor:
    """Pack a small weight as convert would. held: scales that it shares. size: of the weight, for its input's scale."""
    matrix = None
    if recipe.fitted:
        assert recipe.transform is not None
        block = recipe.transform.size
        matrix = torch.eye(block, device="cpu").expand(weight.shape[1] // block, block, block).contiguous()
        held = held or Scales(transform=matrix)
    deployed = dataclasses.replace(recipe.deployed, fprop_input=_deployed_input(recipe, size), input_scales="dynamic")
    return PackedTensor.from_encoded(recipe.fprop_weight.encode(weight, held), deployed, weight.dtype, matrix)


def _deployed_input(recipe: LinearRecipe, size: float) -> Operand | None:
    """The input's operand after convert: calibrated scales of one input are equal, and learned ones are not."""
    x = recipe.fprop_input
    if x is None or recipe.input_scales not in ("static", "learned"):
        return x
    scale = 2.0**-8 * (size if recipe.input_scales == "learned" else 1.0)
    numbers = (scale, 0) if getattr(x.format, "constants", 1) == 2 else (scale,)
    return x.fix(*numbers)
