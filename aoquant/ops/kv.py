"""Ops of KV caches: write bytes, read them, both at once, and attend to a cache of bytes.

On a CUDA device Triton writes the formats that vLLM writes by Triton, with its instructions (`triton/kv_write.py`), and
one query token attends to the bytes themselves (`triton/kv_attend.py`). Everything else is `KVFormat`'s torch code.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES, KVFormat, get_kv_format

from .codec.triton import lacks_triton
from .codec.triton_kernels import imported
from .define import op

WRITES = ("fp8", "fp8-e5m2", "fp8-token-head", "int8-token-head", "int4-token-head")
LONGEST = 1024  # values of a row that the writer holds in registers


def writes(format: KVFormat, x: Tensor, scale: Tensor | None) -> bool:
    """Return whether Triton writes rows of x (batch, heads, tokens, head_dim)."""
    return (
        format.name in WRITES
        and x.dtype in FLOAT_DTYPES
        and x.dim() == 4
        and x.shape[3] <= LONGEST
        and (scale is None or scale.numel() in (1, x.shape[1]))
        and lacks_triton(x.device) is None
    )


@op(lambda a: a.x.new_empty((*a.x.shape[:-1], a.bytes), dtype=torch.uint8))
def kv_pack(x: Tensor, scale: Tensor | None, name: str, role: str, bytes: int) -> Tensor:
    """Return `KVFormat.pack` of x (..., head_dim): uint8 (..., bytes)."""
    format = get_kv_format(name, role)
    if not writes(format, x, scale):
        return format.pack(x, scale)
    out = torch.empty((*x.shape[:-1], bytes), dtype=torch.uint8, device=x.device)
    imported("kv_write").write(x, format, scale, out)
    return out


@op(lambda a: a.x.new_empty(a.x.shape))
def kv_values(x: Tensor, scale: Tensor | None, name: str, role: str) -> Tensor:
    """Return what attention reads of the bytes of x (..., head_dim), in x's dtype."""
    format = get_kv_format(name, role)
    if not writes(format, x, scale):
        return format.unpack(format.pack(x, scale), scale, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    imported("kv_write").write(x, format, scale, out)
    return out


def pack(x: Tensor, format: KVFormat, scale: Tensor | None) -> Tensor:
    """Return the bytes of keys or values (..., head_dim), with their scales behind the codes."""
    format.check(x.shape[-1], scale)
    return kv_pack(x, scale, format.name, format.role, format.row_bytes(x.shape[-1]) + format.scale_bytes)


def values(x: Tensor, format: KVFormat, scale: Tensor | None) -> Tensor:
    """Return keys or values (..., head_dim) as attention reads them of their bytes."""
    format.check(x.shape[-1], scale)
    return kv_values(x, scale, format.name, format.role)


def pack_into(out: Tensor, position: int, x: Tensor, format: KVFormat, scale: Tensor | None) -> None:
    """Write x (batch, heads, tokens, head_dim) to tokens `position`.. of out, uint8 (batch, heads, capacity, bytes)."""
    if writes(format, x, scale) and out.is_contiguous():
        imported("kv_write").write(x, format, scale, out, position)
    else:
        out[:, :, position : position + x.shape[2]] = pack(x, format, scale)


@cache
def why_not_attend(k: KVFormat, v: KVFormat, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel attends to bytes of these formats; None when one does."""
    if lacks := lacks_triton(device):
        return lacks
    if other := next((f.name for f in (k, v) if f.name not in WRITES), None):
        return f"has no kernel that reads {other}"
    if dtype != torch.bfloat16 or head_dim not in (64, 128, 256):
        return f"reads bfloat16 queries of 64, 128 or 256 values, got {head_dim} of {dtype}"
    return None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, k: KVFormat, v: KVFormat,
    k_scale: Tensor | None, v_scale: Tensor | None, mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Return the attention of one query token, (batch, 1, heads, head_dim): see `triton/kv_attend.py`."""
    run: Any = imported("kv_attend").attend
    return run(query, keys, values, k, v, k_scale, v_scale, mask, scale)
