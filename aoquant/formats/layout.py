"""Layouts: how codes and scales lie in memory. Storage, not numerics: every function has an exact inverse.

Codes of 4 bits go two to a byte, low nibble = even k (MSLK, torchao and NVIDIA agree on it). Codes of 1, 2, 3, 5, 6 and 7 bits
go eight at a time into bit planes, so that no width wastes a bit; a ragged end is padded with zeros. Block scales for Blackwell
tensor cores are swizzled in tiles of 128 x 4 (cuBLAS, "1-D block scaling factors layout").
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (R, K), each < 2^bits -> uint8 (R, bytes)."""
    if bits == 8:
        return codes
    if bits == 4:
        codes = _pad(codes, 2)
        return codes[:, ::2] | (codes[:, 1::2] << 4)
    padded = _pad(codes, 8)
    eight = padded.view(padded.shape[0], padded.shape[1] // 8, 8)
    planes = [_gather_bits((eight >> b) & 1) for b in range(bits)]
    return torch.stack(planes, -1).flatten(1)


def unpack(packed: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of `pack`: uint8 (R, bytes) -> uint8 codes (R, k)."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :k]
    planes = packed.view(packed.shape[0], packed.shape[1] // bits, bits)
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    codes = torch.zeros(*planes.shape[:2], 8, device=packed.device, dtype=torch.uint8)
    for b in range(bits):
        codes |= ((planes[..., b : b + 1] >> shifts) & 1) << b
    return codes.flatten(1)[:, :k]


def lookup(packed: Tensor, table: Tensor, k: int) -> Tensor:
    """table[unpack(packed, 4, k)]: uint8 (R, bytes) and 16 float32 values -> float32 (R, k), a byte at a time."""
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)  # (256, 2): what low and high nibble mean
    values = pairs.view(torch.int64).flatten().index_select(0, packed.flatten().int()).view(torch.float32)
    return values.view(packed.shape[0], 2 * packed.shape[1])[:, :k]


def swizzle_128x4(scales: Tensor) -> Tensor:
    """(R, G) 1-byte scales -> flat, tiles of 128 x 4 row-block major, zero padded: byte (r, c) -> (r%32)*16 + (r//32)*4 + c."""
    rows, cols = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # (R/128, 4, 32, G/4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def unswizzle_128x4(flat: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `swizzle_128x4`: flat -> (rows, cols)."""
    tiles = flat.view(torch.uint8).reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 2)
    return padded[:rows, :cols].contiguous().view(flat.dtype)


def _pad(codes: Tensor, multiple: int) -> Tensor:
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def _gather_bits(bits_RG8: Tensor) -> Tensor:
    """(R, K/8, 8) zeros and ones -> (R, K/8) bytes, first value in the lowest bit."""
    weights = torch.arange(8, device=bits_RG8.device, dtype=torch.uint8)
    return (bits_RG8 << weights).sum(-1, dtype=torch.int32).to(torch.uint8)
