"""Held scales: static and learned scales as a layer's own buffers and parameters.

A dynamic scale lives as long as one forward. `aoquant.calibrate` measures a static one once, and the optimizer moves a
learned one. Both are part of what was trained, so they live where weights live: in the state_dict, on the layer's
device, in what a resumed run loads. Convert takes the very same numbers.

Names are `input_scale`, `input_zero`, `weight_scale`, `weight_zero` and so on: the fields of `formats.Scales`.
Floating-point ones are float32 whatever the layer's dtype, and stay so when the layer is cast: a scale that rounds
afterwards is another scale. A learned scale is a parameter; zero points, being integers, outer scales and the matrices
of a fitted transform are always buffers: `input_transform`, T with bf16 entries, and `weight_transform`, T^-T in
float32, (K / size, size, size) both.
"""

from typing import Any

import torch
from torch import Tensor, nn

from aoquant.formats import FLOAT_DTYPES, Scales


def register(layer: nn.Module, side: str, scales: Scales, *, learned: bool) -> None:
    """Give `layer` held scales for side "input" or "weight"."""
    for part, value in zip(Scales._fields, scales, strict=True):
        if value is None:
            continue
        value = value.detach().float() if value.dtype in FLOAT_DTYPES else value.detach()
        name = f"{side}_{part}"
        if learned and part == "scale":
            layer.register_parameter(name, nn.Parameter(value.clone()))
        else:
            layer.register_buffer(name, value.clone())


def names(layer: nn.Module) -> list[str]:
    """Names of the layer's held scales."""
    possible = (f"{side}_{part}" for side in ("input", "weight") for part in Scales._fields)
    return [n for n in possible if n in layer._buffers or n in layer._parameters]


def read(layer: nn.Module, side: str) -> Scales:
    """The layer's held scales for one side.

    Raises:
        ValueError: they have been rounded, as FSDP's mixed precision does with every parameter that it has.
    """
    scales = Scales(*(getattr(layer, f"{side}_{part}", None) for part in Scales._fields))
    for part, value in (("scale", scales.scale), ("transform", scales.transform)):
        if value is not None and value.dtype in FLOAT_DTYPES and value.dtype != torch.float32:
            raise ValueError(
                f"its {side}_{part} is held in float32 and was cast to {str(value.dtype).removeprefix('torch.')}, which is another {part}: "
                "keep learned scales out of fully_shard with ignored_params=, and buffers out of FSDP's mixed precision (docs/distributed.md)"
            )
    return scales


def matrices(scales: Scales) -> Scales:
    """`scales` with two dimensions, as formats know them."""
    scale, zero, outer = (t if t is None else t.reshape(-1, t.shape[-1]) for t in scales.tensors)
    return Scales(
        scale, zero, outer, scales.transform
    )  # Dynamo of torch 2.11 cannot put into a graph what _replace makes


@torch.no_grad()
def write(layer: nn.Module, side: str, scales: Scales, dims: int = 2) -> None:
    """Replace the values, in place, so that optimizers keep their parameters; dims: of a (1, 1) scale, from now on."""
    for part, value in zip(Scales._fields, scales, strict=True):
        if value is not None:
            mine: Tensor = getattr(layer, f"{side}_{part}")
            mine.data = mine.data.view((1,) * (dims - 2) + value.shape)
            mine.copy_(value.view(mine.shape))


def forget(layer: nn.Module) -> None:
    """Remove the held scales."""
    for name in names(layer):
        delattr(layer, name)


def present(layer: nn.Module) -> bool:
    """Return whether every held scale has a value: before calibration it is NaN, or on the meta device."""
    tensors = [getattr(layer, name) for name in names(layer)]
    return all(not t.is_meta and bool(t.float().isfinite().all()) for t in tensors)


def keep_dtype(layer: nn.Module, before: dict[str, Tensor]) -> None:
    """Undo what a cast of the layer did to its held scales; a move stays."""
    for name, value in before.items():
        now: Tensor = getattr(layer, name)
        if now.dtype != value.dtype:
            now.data = value.to(now.device)
            if now.grad is not None:
                now.grad = now.grad.to(value.dtype)


def take_shape(layer: nn.Module, prefix: str, state_dict: dict[str, Any], static_weight: bool) -> None:
    """Give per-tensor scales the number of dimensions that a state_dict has them in, and scales of blocks to a layer
    whose weight has static scales, but none of blocks: `unpack_` leaves both.
    """
    blocks = state_dict.get(f"{prefix}weight_scale")
    if blocks is not None and static_weight and not hasattr(layer, "weight_scale"):
        weight: Any = layer.weight
        layer.register_buffer("weight_scale", torch.empty_like(blocks, device=weight.device))
    for name in names(layer):
        mine, given = getattr(layer, name), state_dict.get(prefix + name)
        if given is not None and given.numel() == mine.numel() == 1:
            mine.data = mine.data.view(given.shape)
