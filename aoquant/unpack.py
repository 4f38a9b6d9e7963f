"""A packed model as a prepared one: QAT that goes on from published codes.

The float weights are the packed ones' values, and the layers hold the packed scales (static, or learned), so the first
forward multiplies the very codes that were packed. Rounding a value to bfloat16 can put it nearer to another code when
it is encoded again (int8 has more codes than bfloat16 has steps); such a weight is moved to the nearest float that has
its code. Layers where none has are an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

from aoquant.config import QATConfig
from aoquant.formats import Scales
from aoquant.layers import held
from aoquant.layers.packed import adopt
from aoquant.layers.qat import QATLinear
from aoquant.quantize import config_of, quantize_
from aoquant.tensor import PackedTensor

_STEPS = 4  # floats that a weight may move


@torch.no_grad()
def unpack_(model: nn.Module, *, scales: str = "static", **options: Any) -> None:
    """Prepare a converted model for training again, in place, from its packed codes.

    scales: "static" keeps the packed scales, "learned" trains them (integers). options: further arguments of
        `QATConfig`.

    Raises:
        ValueError: no linear layer is packed; a layer's format cannot hold its scales; or a layer's values do not give
            its codes again. The model is unchanged then.
    """
    if scales not in ("static", "learned"):
        raise ValueError(
            f"unpack_: scales is static or learned, got {scales!r}: scales made anew would give other codes"
        )
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and isinstance(m.weight, PackedTensor)}
    if not layers:
        raise ValueError("nothing to unpack: no linear layer holds a PackedTensor")
    packed: dict[str, Any] = {name: m.weight for name, m in layers.items()}
    configs = {name: QATConfig(config_of(m), step="prepare", scales=scales, **options) for name, m in layers.items()}
    floats: dict[int, nn.Parameter] = {}
    for module in layers.values():
        weight = module.weight
        floats.setdefault(id(weight), nn.Parameter(weight.dequantize()))
        module.weight = floats[id(weight)]
    try:
        quantize_(model, FqnToConfig(configs))
        problems = [name for name in layers if not _restored(model.get_submodule(name), packed[name])]
        if problems:
            raise ValueError(
                f"{len(problems)} layer(s), such as {problems[0]} ({packed[problems[0]].format}), have values whose codes are others when "
                "they are encoded again: load the model in float32, or train it from its float weights"
            )
    except BaseException:
        for name in layers:
            layer: Any = model.get_submodule(name)
            if isinstance(layer, QATLinear):
                layer.unprepare()
            layer.weight = packed[name]
            adopt(layer)
        raise


def _restored(layer: nn.Module, p: PackedTensor) -> bool:
    """Give a layer the packed scales, and weights that have the packed codes; whether they do."""
    assert isinstance(layer, QATLinear)
    e, format = p.encoded, p.weight_format
    measured = layer.held_scales("weight")
    assert measured is not None
    outer = None if e.outer is None else e.outer[:1]
    scales = Scales(
        *(None if m is None else t for m, t in zip(measured.tensors, (e.scale, e.zero, outer), strict=True))
    )
    held.write(layer, "weight", scales)
    wanted = format.decode(e, torch.float32)
    weight = layer.weight.data
    for _ in range(_STEPS):
        got = format.decode(layer.encode_weight(), torch.float32)
        if torch.equal(got, wanted):
            return True
        weight.copy_(torch.where(got == wanted, weight, _towards(weight, wanted - got)))
    return torch.equal(format.decode(layer.encode_weight(), torch.float32), wanted)


def _towards(weight: Tensor, direction: Tensor) -> Tensor:
    """The next float in a direction."""
    return torch.nextafter(weight, torch.copysign(torch.full_like(direction, torch.inf), direction).to(weight.dtype))
