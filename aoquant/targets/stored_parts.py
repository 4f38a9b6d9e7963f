"""Check that the parts of torchao's tensors fit together: their constructors take what a file says.

torchao's kernels compute addresses from shapes and the block size, and its Python finds a misfit in a forward at the
earliest. Each class stores codes of its whole shape, packed or not, and a scale for each block; swizzled scales are
padded to tiles of 128 x 4.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

_PER_BYTE = {"Int4Tensor": 2, "NVFP4Tensor": 2}
_PER_INT32 = ("Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor")
_CODES = {
    "Float8Tensor": (torch.float8_e4m3fn, torch.float8_e5m2),
    "Int8Tensor": (torch.int8,),
    "IntxUnpackedToInt8Tensor": (torch.int8,),
    "Int4Tensor": (torch.int8, torch.uint8),
    "Int4PlainInt32Tensor": (torch.int32,),
    "Int4TilePackedTo4dTensor": (torch.int32,),
    "MXTensor": (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8),
    "NVFP4Tensor": (torch.uint8,),
}


def check_stored(t: Any) -> None:
    """Raise ValueError unless codes, scales and zero points of one of torchao's stored tensors fit its shape and block.

    Other tensors pass.
    """
    kind = type(t).__name__
    if kind not in _CODES:
        return
    codes: Any = t.qdata
    scale: Any = t.scale_and_zero if kind == "Int4TilePackedTo4dTensor" else t.scale
    tensors = isinstance(codes, Tensor) and isinstance(scale, Tensor)
    if not tensors or codes.dtype not in _CODES[kind] or not scale.is_floating_point():
        raise ValueError(f"{kind}: its codes are {_about(codes)} and its scales {_about(scale)}")
    shape = tuple(t.shape)
    block = _block(kind, t.block_size, shape)
    if kind == "Int4TilePackedTo4dTensor":
        _check_tiles(kind, t, shape, block)
        return
    per = 8 if kind in _PER_INT32 else _PER_BYTE.get(kind, 1)
    if kind == "MXTensor" and codes.dtype == torch.uint8:
        per = 2
    blocks = prod(s // b for s, b in zip(shape, block, strict=True))
    if codes.numel() * per != prod(shape):
        raise ValueError(f"{kind}: codes {tuple(codes.shape)} do not fit its shape {shape}")
    if scale.numel() != blocks and not (
        getattr(t, "is_swizzled_scales", False) and scale.numel() == _padded(shape, block[-1])
    ):
        raise ValueError(f"{kind}: scales {tuple(scale.shape)} do not fit {shape} in blocks of {block}")
    zero = getattr(t, "zero_point", None)
    if zero is not None and not (isinstance(zero, Tensor) and zero.numel() == scale.numel()):
        raise ValueError(f"{kind}: zero points {_about(zero)} do not fit its scales {tuple(scale.shape)}")


def _block(kind: str, given: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The block that shares a scale, in each dimension."""
    block = (1,) * (len(shape) - 1) + (given,) if isinstance(given, int) else tuple(given or ())
    sound = len(block) == len(shape) and all(type(b) is int and b >= 1 for b in block)
    if not sound or any(s % b for s, b in zip(shape, block, strict=True)):
        raise ValueError(f"{kind}: blocks of {given!r:.80} do not divide its shape {shape}")
    return block


def _padded(shape: tuple[int, ...], block: int) -> int:
    """Return how many scales (rows, K / block) are in tiles of 128 x 4."""
    *lead, rows, k = shape
    return prod(lead) * (-(-rows // 128) * 128) * (-(-(k // block) // 4) * 4)


def _check_tiles(kind: str, t: Any, shape: tuple[int, ...], block: tuple[int, ...]) -> None:
    """Raise ValueError unless tinygemm's padded codes (..., N / 8, K / tile, 32, lanes) have scales (..., G, N, 2)."""
    codes, scale, group = t.qdata, t.scale_and_zero, block[-1]
    n, k = codes.shape[-4] * 8 if codes.dim() >= 4 else 0, 0
    if n:
        k = codes[..., 0, 0, 0, 0].numel() and codes.numel() * 8 // (codes[..., 0, 0, 0, 0].numel() * n)
    if n < shape[-2] or k < shape[-1] or scale.dim() < 3 or tuple(scale.shape[-3:]) != (k // group, n, 2):
        raise ValueError(
            f"{kind}: codes {tuple(codes.shape)} and scales {tuple(scale.shape)} do not fit {shape} in groups of {group}"
        )


def _about(part: Any) -> str:
    return f"{tuple(part.shape)} {part.dtype}" if isinstance(part, Tensor) else f"{part!r:.80}"
