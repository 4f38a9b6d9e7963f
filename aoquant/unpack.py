"""A packed model as a prepared one: QAT that goes on from published codes.

The float weights are the packed ones' values, and the layers hold the packed scales (static, or learned), so the first
forward multiplies the very codes that were packed. Rounding a value to bfloat16 can put it nearer to another code when
it is encoded again (int8 has more codes than bfloat16 has steps); such a weight is moved to the nearest float that has
its code. Layers where none has are an error.

Stacked experts hold static scales, each expert its own, unless scales made anew give the same values, as MXFP4's do:
then they hold none, and are what `quantize_` prepares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

from aoquant._arguments import check_model
from aoquant.config import QATConfig
from aoquant.formats import Encoded, Format, Operand, Scales
from aoquant.layers import held, replaced
from aoquant.layers.experts import QATExperts, stacks_of
from aoquant.layers.packed import adopt
from aoquant.layers.packed_experts import PackedExperts
from aoquant.layers.qat import Prepared, QATLinear
from aoquant.planning.plan import prepare_target
from aoquant.quantize import config_of, packed_config, quantize_
from aoquant.tensor import PackedTensor

_STEPS = 4  # floats that a weight may move


@dataclass(frozen=True)
class _Stack:
    """A packed parameter of experts."""

    fqn: str
    module: Any
    name: str
    packed: Any  # an nn.Parameter of PackedExperts


@torch.no_grad()
def unpack_(model: nn.Module, *, scales: str = "static", **options: Any) -> None:
    """Prepare a converted model for training again, in place, from its packed codes.

    scales: "static" keeps the packed scales, "learned" trains them (integers; not of stacked experts). options: further
        arguments of `QATConfig`.

    Raises:
        ValueError: no linear layer and no expert is packed; a format cannot hold its scales; or values do not give
            their codes again. The model is unchanged then.
    """
    if scales not in ("static", "learned"):
        raise ValueError(
            f"unpack_: scales is static or learned, got {scales!r}: scales made anew would give other codes"
        )
    check_model(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and isinstance(m.weight, PackedTensor)}
    stacks = _stacks(model)
    if not layers and not stacks:
        raise ValueError(
            "nothing to unpack: no linear layer holds a PackedTensor, and no experts are packed. It takes a converted model; prepared layers "
            "train as they are"
        )
    if stacks and scales == "learned":
        raise ValueError(f"{stacks[0].fqn}: stacked experts hold no learned scales: use scales='static'")
    packed: dict[str, Any] = {name: m.weight for name, m in layers.items()}
    configs = {name: QATConfig(config_of(m), step="prepare", scales=scales, **options) for name, m in layers.items()}
    floats: dict[int, nn.Parameter] = {}
    for module in layers.values():
        weight = module.weight
        floats.setdefault(id(weight), nn.Parameter(weight.dequantize()))
        module.weight = floats[id(weight)]
    try:
        if configs:
            quantize_(model, FqnToConfig(configs))
        problems = [name for name in layers if not _restored(model.get_submodule(name), packed[name])]
        formats = {name: w.format for name, w in packed.items()}
        for stack in stacks:
            formats[stack.fqn] = stack.packed.format
            problems += [] if _prepared(stack, options) else [stack.fqn]
        if problems:
            raise ValueError(
                f"{len(problems)} layer(s), such as {problems[0]} ({formats[problems[0]]}), have values whose codes are others when "
                "they are encoded again: load the model in float32, or train it from its float weights"
            )
    except BaseException:
        for name in layers:
            layer: Any = model.get_submodule(name)
            if isinstance(layer, QATLinear):
                layer.unprepare()
            layer.weight = packed[name]
            adopt(layer)
        for stack in stacks:
            if isinstance(stack.module, QATExperts) and stack.name in stack.module.stacks:
                stack.module.unprepare_stack(stack.name)
            setattr(stack.module, stack.name, stack.packed)
        raise
    replaced.record(model)


def _stacks(model: nn.Module) -> list[_Stack]:
    """Every packed parameter of experts."""
    return [
        _Stack(f"{fqn}.{name}" if fqn else name, module, name, getattr(module, name))
        for fqn, module in model.named_modules()
        for name in stacks_of(module)
        if isinstance(getattr(module, name), PackedExperts)
    ]


def _prepared(stack: _Stack, options: dict[str, Any]) -> bool:
    """Prepare experts so that they have the packed values; whether they do."""
    packed = [stack.packed.expert(e) for e in range(len(stack.packed))]
    anew = all(_same_anew(p) for p in packed)
    scales = None
    try:
        how = "dynamic" if anew else "static"
        config = QATConfig(packed_config(stack.packed), step="prepare", scales=how, **options)
        recipe = prepare_target(config).recipe
        if not anew:
            each = [_scales_of(p, recipe.fprop_weight) for p in packed]
            scales = Scales(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)))
    except ValueError as error:
        raise ValueError(f"{stack.fqn}: {error}") from None
    setattr(stack.module, stack.name, nn.Parameter(stack.packed.dequantize().contiguous()))
    experts = QATExperts.prepare_stack(stack.module, stack.name, Prepared(recipe, config, stack.fqn), scales)
    weight = getattr(experts, stack.name)
    for e, one in enumerate(weight.data):
        w_NK = one.t() if experts.is_transposed else one
        if not _moved(w_NK, packed[e], partial(experts.encode_expert, stack.name, e, weight.dtype)):
            return False
    return True


def _same_anew(p: PackedTensor) -> bool:
    """Whether a packed weight's values have the same values under scales that are made from them."""
    format, values = p.weight_format, p.dequantize()
    return torch.equal(format.decode(format.encode(values), torch.float32), format.decode(p.encoded, torch.float32))


def _restored(layer: nn.Module, p: PackedTensor) -> bool:
    """Give a layer the packed scales, and weights that have the packed codes; whether they do."""
    assert isinstance(layer, QATLinear)
    measured = layer.held_scales("weight")
    assert measured is not None
    held.write(layer, "weight", _kept(p.encoded, measured))
    return _moved(layer.weight.data, p, layer.encode_weight)


def _scales_of(p: PackedTensor, operand: Operand) -> Scales:
    """The scales of a packed weight, as a prepared one would hold them."""
    return _kept(p.encoded, operand.measure(p.dequantize()))


def _kept(e: Encoded, measured: Scales) -> Scales:
    """The packed scales, where the format holds some. measured: of the weight."""
    outer = None if e.outer is None else e.outer[:1]
    return Scales(*(None if m is None else t for m, t in zip(measured.tensors, (e.scale, e.zero, outer), strict=True)))


def _moved(weight: Tensor, p: PackedTensor, encode: Callable[[], Encoded]) -> bool:
    """Move values of a weight (N, K), in place, until they have the packed codes; whether they do. encode: what the
    weight's codes are now.
    """
    format: Format | Operand = p.weight_format
    wanted = format.decode(p.encoded, torch.float32)
    for _ in range(_STEPS):
        got = format.decode(encode(), torch.float32)
        if torch.equal(got, wanted):
            return True
        weight.copy_(torch.where(got == wanted, weight, _towards(weight, wanted - got)))
    return torch.equal(format.decode(encode(), torch.float32), wanted)


def _towards(weight: Tensor, direction: Tensor) -> Tensor:
    """The next float in a direction."""
    return torch.nextafter(weight, torch.copysign(torch.full_like(direction, torch.inf), direction).to(weight.dtype))
