"""Caches of bytes: where new tokens go, and what attention gets.

A dynamic layer of transformers concatenates, which reads and writes the whole cache for each token. Here its memory has
room for more tokens, and a token is written behind the others. A sliding or static layer stores by its own `update`.

Where a kernel attends to bytes, one query token gets `Coded` keys and values. The attention function takes their bytes
(`attend`); any other operation finds them decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from aoquant.formats import KVFormat
from aoquant.ops import kv

ROOM = 256  # tokens that a layer's memory has place for, beyond those that it needs
SDPA = "transformers.integrations.sdpa_attention"


@dataclass(frozen=True)
class New:
    """Keys or values (batch, heads, tokens, head_dim) on their way to a cache, their format and static scale."""

    x: Tensor
    format: KVFormat
    scale: Tensor | None

    def packed(self) -> Tensor:
        """Return the bytes."""
        return kv.pack(self.x, self.format, self.scale)


@dataclass
class Room:
    """Memory of a layer's keys and values, uint8 (batch, heads, capacity, bytes); the first `used` tokens are written.

    Copies of a layer may share it. So a layer whose tokens are not all that is written gets memory of its own.
    """

    keys: Tensor
    values: Tensor
    used: int

    def ends(self, layer: Any, more: int) -> bool:
        """Return whether `more` tokens may be written behind those of `layer`."""
        here = ((layer.keys, self.keys), (layer.values, self.values))
        return (
            self.used + more <= self.keys.shape[2]
            and all(t.data_ptr() == own.data_ptr() and t.shape[2] == self.used for t, own in here)
            and (torch.is_inference_mode_enabled() or not self.keys.is_inference())
        )


class Coded(Tensor):
    """Keys or values (batch, heads, tokens, head_dim) that are still bytes. An operation on them decodes them first."""

    bytes: Tensor
    source: New

    @staticmethod
    def __new__(cls, bytes: Tensor, new: New) -> "Coded":
        shape = (*bytes.shape[:3], new.x.shape[3])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=new.x.dtype, device=bytes.device)
        made.bytes, made.source = bytes, new
        return made

    def __init__(self, bytes: Tensor, new: New) -> None: ...

    def decoded(self) -> Tensor:
        """Return the values."""
        return self.source.format.unpack(self.bytes, self.source.scale, self.source.x.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Coded, Coded.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


def held(cache: Any, layer_idx: int) -> Tensor | None:
    """Return the keys that a cache holds for a layer; None before the first."""
    layers = getattr(cache, "layers", ())
    return getattr(layers[layer_idx], "keys", None) if layer_idx < len(layers) else None


def attends(key: New, value: New) -> bool:
    """Return whether a kernel attends to bytes of these formats, outside of compiled code and without gradients."""
    k, v = key.x, value.x
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and k.dim() == 4
        and k.shape == v.shape
        and kv.why_not_attend(key.format, value.format, k.shape[3], k.dtype, k.device) is None
    )


def store(cache: Any, key: New, value: New, layer_idx: int, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Store new tokens as bytes, and return all that attention should see, decoded or `Coded`."""
    if _appends(cache, layer_idx):
        parts = _append(cache.layers[layer_idx], key, value)
    else:
        parts = cache.update(key.packed(), value.packed(), layer_idx, *args, **kwargs)
    if key.x.shape[-2] == 1 and attends(key, value):
        return Coded(parts[0], key), Coded(parts[1], value)
    k, v = (new.format.unpack(t, new.scale, new.x.dtype) for t, new in zip(parts, (key, value), strict=True))
    return k, v


def _appends(cache: Any, layer_idx: int) -> bool:
    """Return whether the layer is transformers' dynamic layer, holds tokens, and concatenates the next."""
    present = held(cache, layer_idx)
    return (
        present is not None
        and present.numel() > 0
        and not torch.compiler.is_compiling()
        and type(cache).update.__qualname__ == "Cache.update"
        and not getattr(cache, "offloading", False)
        and type(cache.layers[layer_idx]).update.__qualname__ == "DynamicLayer.update"
    )


def _append(layer: Any, key: New, value: New) -> tuple[Tensor, Tensor]:
    """Write new tokens behind a layer's own; return views of all."""
    room, more = getattr(layer, "room", None), key.x.shape[2]
    if room is None or not room.ends(layer, more):
        room = layer.room = Room(_grown(layer.keys, more), _grown(layer.values, more), layer.keys.shape[2])
    kv.pack_into(room.keys, room.used, key.x, key.format, key.scale)
    kv.pack_into(room.values, room.used, value.x, value.format, value.scale)
    room.used += more
    layer.keys, layer.values = room.keys[:, :, : room.used], room.values[:, :, : room.used]
    return layer.keys, layer.values


def _grown(t: Tensor, more: int) -> Tensor:
    """Return memory for `more` tokens and some behind those of t (batch, heads, tokens, bytes), which are copied."""
    batch, heads, tokens, width = t.shape
    grown = t.new_empty(batch, heads, tokens + more + ROOM, width)
    grown[:, :, :tokens] = t
    return grown


def _capacity(t: Tensor) -> int | None:
    """Return the tokens from one head to the next in (batch, heads, tokens, bytes); None unless heads lie evenly."""
    row, heads = t.shape[3], t.shape[1]
    capacity = t.stride(1) // row
    return capacity if t.stride() == (heads * capacity * row, capacity * row, row, 1) else None


def attend(
    function: Any, query: Tensor, key: Coded, value: Coded, mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor | None:
    """Return the attention of one query token, (batch, 1, heads, head_dim); None where the kernel computes another one
    than `function` with these options, transformers' sdpa_attention_forward or another.
    """
    tokens = key.shape[2]
    plain = (
        getattr(function, "__module__", "") == SDPA
        and query.shape[2] == 1
        and query.dtype == key.dtype
        and not options.get("dropout")
        and options.get("position_bias") is None
        and options.get("softcap") is None
    )
    if mask is not None:
        plain = plain and mask.shape[1:] == (1, 1, tokens) and mask.stride(3) == 1
    if not plain or (capacity := _capacity(key.bytes)) is None or _capacity(value.bytes) != capacity:
        return None
    scale = options.get("scaling")
    return kv.attend(
        query, key.bytes, value.bytes, key.source.format, value.source.format, key.source.scale, value.source.scale, mask,
        query.shape[3] ** -0.5 if scale is None else float(scale),
    )  # fmt: skip
