"""Whether what a recipe trains could be exported, before it is trained: two small siblings are packed as convert would
pack them, and export's own checks are asked. No rule is written twice.
"""

import dataclasses
import math

import torch

from aoquant.export.fused_checks import INSTEAD, apart
from aoquant.export.targets import Unfit, layout_of
from aoquant.formats import Operand, Scales
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
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


def _siblings(recipe: LinearRecipe) -> dict[str, PackedTensor]:
    """Two converted layers that read one input."""
    operand, k = recipe.fprop_weight, math.lcm(recipe.fprop_weight.period, 256)
    if recipe.fprop_input is not None:
        k = math.lcm(k, recipe.fprop_input.period)
    values = torch.arange(128 * k, dtype=torch.float32, device="cpu").sin().view(128, k)
    weights = {name: (values * size).bfloat16() for name, size in _SIZES.items()}
    matrix = None
    if recipe.fitted:
        assert recipe.transform is not None
        size = recipe.transform.size
        matrix = torch.eye(size, device="cpu").expand(k // size, size, size).contiguous()
    held = Scales(transform=matrix) if recipe.fitted else None
    if shares(recipe):
        held = operand.measure(weights["k_proj"])  # the larger one
    made = {}
    for name, weight in weights.items():
        deployed = dataclasses.replace(
            recipe.deployed, fprop_input=_deployed_input(recipe, _SIZES[name]), input_scales="dynamic"
        )
        made[name] = PackedTensor.from_encoded(operand.encode(weight, held), deployed, weight.dtype, matrix)
    return made


def _deployed_input(recipe: LinearRecipe, size: float) -> Operand | None:
    """The input's operand after convert: calibrated scales of one input are equal, and learned ones are not."""
    x = recipe.fprop_input
    if x is None or recipe.input_scales not in ("static", "learned"):
        return x
    scale = 2.0**-8 * (size if recipe.input_scales == "learned" else 1.0)
    numbers = (scale, 0) if getattr(x.format, "constants", 1) == 2 else (scale,)
    return x.fix(*numbers)
