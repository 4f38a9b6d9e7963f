"""A converted copy that follows a model in training: rollouts of reinforcement learning with the trained policy, bit
for bit.

The copy's layers are encoded anew from the prepared layers, into the tensors that they have: no tensor is made or
replaced, so compiled code and CUDA graphs of the copy stay valid, and memory beyond both models is one layer's codes,
or one expert's. The codes come from the encoding that convert would use, under the scales that the prepared layer
holds.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant._messages import check_model, some
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded
from aoquant.kv import hook
from aoquant.linear.prepared import QATLayer, QATLinear
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor


@torch.no_grad()
def refresh_(packed: nn.Module, prepared: nn.Module) -> int:
    """Give `packed`, a converted copy of `prepared`, the codes, scales and floats that `prepared` has now.

    Returns how many packed weights were encoded: a tied one counts once, and so does a stack of experts.

    Log-probabilities of the two are then equal on one device. Both may be on different devices.

    Raises:
        ValueError: the two do not belong together: layers or floats that one of them lacks, shapes, dtypes, formats, or
            constant activation scales, which are part of the copy's compiled code. Nothing is changed then.
    """
    check_model(packed, "packed")
    check_model(prepared, "prepared")
    layers = {name: m for name, m in prepared.named_modules() if isinstance(m, QATLayer)}
    experts = {name: m for name, m in prepared.named_modules() if isinstance(m, QATExperts)}
    caches = [{fqn: m.kv_quant.config for fqn, m in hook.quantised(model).items()} for model in (packed, prepared)]
    if not layers and not experts and not caches[1]:
        raise ValueError("refresh_: the second model has no prepared layer; give (converted copy, model in training)")
    if caches[0] != caches[1]:
        raise ValueError("refresh_: the two models quantise their KV caches otherwise: convert a copy of this model")
    targets: dict[str, PackedTensor] = {}
    for name, layer in layers.items():
        recipe, activation = layer.prepared.recipe, deployed_recipe(layer).input_name
        targets[_at(name, "weight")] = _target(name, "weight", layer.matrix(), recipe, activation, packed)
    for name, module in experts.items():
        for stack, prepared_stack in module.stacks.items():
            recipe, weight = prepared_stack.recipe, getattr(module, stack)
            targets[_at(name, stack)] = _target(name, stack, weight, recipe, recipe.input_name, packed)
    _check_all(packed, targets)
    floats = _floats(packed, prepared, targets)
    done: set[int] = set()
    for name, target in targets.items():
        if id(target) in done:  # tied weights are one
            continue
        done.add(id(target))
        owner, _, parameter = name.rpartition(".")
        if owner in layers:
            _write(target, *encoded_now(layers[owner], target.dtype))
        else:
            for expert in range(len(experts[owner].get_parameter(parameter))):
                _write(target.expert(expert), experts[owner].encode_expert(parameter, expert, target.dtype))
    for mine, theirs in floats:
        mine.copy_(theirs)
    return len(done)


def _check_all(packed: nn.Module, targets: dict[str, PackedTensor]) -> None:
    """Raise ValueError for packed weights that no prepared layer would renew."""
    renewed = {id(target) for target in targets.values()}
    weights = packed.named_parameters(remove_duplicate=False)
    if left := [name for name, p in weights if isinstance(p, PackedTensor) and id(p) not in renewed]:
        names = [name.removesuffix(".weight") for name in left]
        raise ValueError(
            f"refresh_: {len(names)} converted layer(s) have no prepared one and would stay as they are: {some(names, 5)}: "
            "convert a copy of this model"
        )


def _at(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _target(
    owner: str, parameter: str, weight: Any, recipe: LinearRecipe, activation: str, packed: nn.Module
) -> PackedTensor:
    """The packed weight that belongs to a prepared one: of the recipe's format, and of the shape of `weight`.

    activation: how a converted layer quantises its input.
    """
    name = owner if parameter == "weight" else _at(owner, parameter)
    try:
        module = packed.get_submodule(owner)
    except AttributeError:
        raise ValueError(f"refresh_: the converted model has no layer {name}: convert a copy of this model") from None
    found = getattr(module, parameter, None)
    if not isinstance(found, PackedTensor):
        raise ValueError(
            f"refresh_: {name} is prepared, and in the first model its weight is {type(found).__name__}, no codes: "
            "give (converted copy, model in training)"
        )
    if isinstance(weight, DTensor):
        raise ValueError(f"refresh_: {name} is sharded over ranks: gather it first")
    wanted = (recipe.fprop_weight.narrow.name, recipe.contract, *_kind(weight))
    got = (found.format, found.contract, *_kind(found))
    if wanted != got:
        raise ValueError(
            f"refresh_: {name} is prepared as {wanted}, and the converted model has {got}: convert a copy of this model"
        )
    if activation != found.activation:
        raise ValueError(
            f"refresh_: {name} quantises its input as {activation}, and the converted model as {found.activation or 'high precision'}, which "
            "its compiled code knows as a constant: convert a copy anew after calibrating, and freeze input scales while rollouts run"
        )
    return found


def deployed_recipe(layer: QATLayer) -> LinearRecipe:
    """The recipe of the converted layer: calibrated activation scales are part of its activation's name."""
    recipe = layer.prepared.recipe
    if not isinstance(layer, QATLinear) or recipe.fprop_input is None or recipe.fitted:
        return recipe.deployed
    if (scales := layer.deployed_input_scales()) is None:
        return recipe.deployed
    numbers = [float(t.item()) for t in scales.tensors if t is not None]
    return dataclasses.replace(recipe.deployed, fprop_input=recipe.fprop_input.fix(*numbers), input_scales="dynamic")


def _kind(t: Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype: codes made of float32 are not those of the same weight in bfloat16."""
    return tuple(t.shape), str(t.dtype).removeprefix("torch.")


def _floats(packed: nn.Module, prepared: nn.Module, targets: dict[str, PackedTensor]) -> list[tuple[Tensor, Tensor]]:
    """(to, from) for everything that is not quantised."""
    mine = dict(packed.named_parameters(remove_duplicate=False)) | dict(packed.named_buffers(remove_duplicate=False))
    given = {n for n, _ in prepared.named_parameters(remove_duplicate=False)}
    given |= {n for n, _ in prepared.named_buffers(remove_duplicate=False)}
    if lost := [n for n, t in mine.items() if n not in given and not isinstance(t, PackedTensor)]:
        raise ValueError(
            f"refresh_: the model in training has no {some(lost, 5)}, and the converted one would keep its own: convert a copy of this model"
        )
    pairs = []
    for name, theirs in (*prepared.named_parameters(), *prepared.named_buffers()):
        owner, _, own = name.rpartition(".")
        if name in targets or is_state(prepared.get_submodule(owner), own):
            continue
        if name not in mine or _kind(mine[name]) != _kind(theirs):
            shape, dtype = _kind(theirs)
            raise ValueError(
                f"refresh_: the converted model has no {name} of shape {shape} and {dtype}: convert a copy of this model"
            )
        if not isinstance(mine[name], PackedTensor):
            pairs.append((mine[name], theirs.detach()))
    return pairs


def is_state(owner: nn.Module, own: str) -> bool:
    """Return whether a tensor of a module belongs to training alone: held scales and the states of random numbers."""
    if isinstance(owner, QATExperts):
        return own in owner.states()
    return isinstance(owner, QATLayer) and own not in ("weight", "bias")


def encoded_now(layer: QATLayer, dtype: torch.dtype) -> tuple[Encoded, Tensor | None]:
    """A layer's weight as convert encodes it, in `dtype`, and the matrix of a fitted transform."""
    format, scales = layer.prepared.recipe.fprop_weight, layer.held_scales("weight")
    weight = layer.matrix().detach().to(dtype)
    e = ops.codec.encode(format, weight) if scales is None and format.portable else format.encode(weight, scales)
    return e, None if scales is None or scales.transform is None else layer.get_buffer("input_transform")


def _write(target: PackedTensor, e: Encoded, matrix: Tensor | None = None) -> None:
    """Put codes and scales into the tensors that `target` has."""
    new = (e.codes, e.scale, e.zero, e.outer, matrix)
    old = (target.qdata, target.scale, target.zero_point, target.per_tensor_scale, target.act_pre_scale)
    for mine, theirs in zip(old, new, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            mine.copy_(theirs.expand_as(mine) if theirs.shape != mine.shape else theirs)
