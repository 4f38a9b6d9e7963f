"""A converted copy that follows a model in training: rollouts of reinforcement learning with the trained policy, bit
for bit.

The copy's layers are encoded anew from the prepared layers, into the tensors that they have: no tensor is made or
replaced, so compiled code and CUDA graphs of the copy stay valid, and memory beyond both models is one layer's codes.
The codes come from the encoding that convert would use, under the scales that the prepared layer holds.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant.formats import Encoded
from aoquant.layers.experts import QATExperts
from aoquant.layers.linear import LinearRecipe
from aoquant.layers.qat import QATLayer, QATLinear
from aoquant.tensor import PackedTensor


@torch.no_grad()
def refresh_(packed: nn.Module, prepared: nn.Module) -> int:
    """Give `packed`, a converted copy of `prepared`, the codes, scales and floats that `prepared` has now; returns the
    layers encoded.

    Log-probabilities of the two are then equal on one device. Both may be on different devices.

    Raises:
        ValueError: the two do not belong together: names, shapes, formats, or constant activation scales, which are
            part of the copy's compiled code. Nothing is changed then.
    """
    layers = prepared_layers(prepared)
    targets = {name: _target(name, layer, packed) for name, layer in layers.items()}
    floats = _floats(packed, prepared, targets)
    done: set[int] = set()
    for name, layer in layers.items():
        target = targets[name]
        if id(target) not in done:  # tied weights are one
            done.add(id(target))
            _encode(layer, target)
    for mine, theirs in floats:
        mine.copy_(theirs)
    return len(layers)


def prepared_layers(prepared: nn.Module) -> dict[str, QATLayer]:
    """The prepared layers of a model in training, by name.

    Raises:
        ValueError: there are none, or some cannot be encoded anew: stacked experts, and weights that are sharded.
    """
    if experts := [name for name, m in prepared.named_modules() if isinstance(m, QATExperts)]:
        raise ValueError(f"{experts[0]}: stacked experts are not refreshed in place: convert a copy of the model again")
    layers = {name: m for name, m in prepared.named_modules() if isinstance(m, QATLayer)}
    if not layers:
        raise ValueError("refresh_: the second model has no prepared layer; give (converted copy, model in training)")
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor):
            raise ValueError(f"refresh_: {name} is sharded over ranks: gather it first")
    return layers


def _target(name: str, layer: QATLayer, packed: nn.Module) -> PackedTensor:
    """The packed weight that belongs to a prepared layer."""
    try:
        module = packed.get_submodule(name)
    except AttributeError:
        raise ValueError(f"refresh_: the converted model has no layer {name}: convert a copy of this model") from None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, PackedTensor):
        raise ValueError(
            f"refresh_: {name} is prepared, and in the converted model its weight is {type(weight).__name__}: convert a copy"
        )
    recipe = layer.prepared.recipe
    wanted = (recipe.fprop_weight.name, recipe.contract, tuple(layer.matrix().shape))
    got = (weight.format, weight.contract, tuple(weight.shape))
    if wanted != got:
        raise ValueError(
            f"refresh_: {name} is prepared as {wanted}, and the converted model has {got}: convert a copy of this model"
        )
    activation = deployed_recipe(layer).input_name
    if activation != weight.activation:
        raise ValueError(
            f"refresh_: {name} quantises its input as {activation}, and the converted model as {weight.activation or 'high precision'}, which "
            "its compiled code knows as a constant: convert a copy anew after calibrating, and freeze input scales while rollouts run"
        )
    return weight


def deployed_recipe(layer: QATLayer) -> LinearRecipe:
    """The recipe of the converted layer: calibrated activation scales are part of its activation's name."""
    recipe = layer.prepared.recipe
    if not isinstance(layer, QATLinear) or recipe.fprop_input is None or recipe.fitted:
        return recipe.deployed
    if (scales := layer.deployed_input_scales()) is None:
        return recipe.deployed
    numbers = [float(t.item()) for t in scales.tensors if t is not None]
    return dataclasses.replace(recipe.deployed, fprop_input=recipe.fprop_input.fix(*numbers), input_scales="dynamic")


def _floats(packed: nn.Module, prepared: nn.Module, targets: dict[str, PackedTensor]) -> list[tuple[Tensor, Tensor]]:
    """(to, from) for everything that is not quantised."""
    own = {f"{name}.weight" for name in targets}
    mine = dict(packed.named_parameters(remove_duplicate=False)) | dict(packed.named_buffers())
    pairs = []
    for name, theirs in (*prepared.named_parameters(), *prepared.named_buffers()):
        module, _, parameter = name.rpartition(".")
        if name in own or (
            module in targets and parameter != "bias"
        ):  # held scales and random states stay with training
            continue
        if name not in mine or mine[name].shape != theirs.shape:
            raise ValueError(
                f"refresh_: the converted model has no {name} of shape {tuple(theirs.shape)}: convert a copy of this model"
            )
        if not isinstance(mine[name], PackedTensor):
            pairs.append((mine[name], theirs.detach()))
    return pairs


def encoded_now(layer: QATLayer, dtype: torch.dtype) -> tuple[Encoded, Tensor | None]:
    """A layer's weight as convert encodes it, in `dtype`, and the matrix of a fitted transform."""
    format, scales = layer.prepared.recipe.fprop_weight, layer.held_scales("weight")
    weight = layer.matrix().detach().to(dtype)
    e = ops.codec.encode(format, weight) if scales is None and format.portable else format.encode(weight, scales)
    return e, None if scales is None or scales.transform is None else layer.get_buffer("input_transform")


def _encode(layer: QATLayer, target: PackedTensor) -> None:
    """Encode a layer's weight into the tensors of `target`."""
    e, matrix = encoded_now(layer, target.dtype)
    new = (e.codes, e.scale, e.zero, e.outer, matrix)
    old = (target.qdata, target.scale, target.zero_point, target.per_tensor_scale, target.act_pre_scale)
    for mine, theirs in zip(old, new, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            mine.copy_(theirs.expand_as(mine) if theirs.shape != mine.shape else theirs)
