"""Layouts: how codes and scales lie in memory. Storage, not numerics: every function has an exact inverse.

Codes of 4 bits go two to a byte, low nibble = even k (MSLK, torchao and NVIDIA agree on it). Codes of 1, 2, 3, 5, 6 and
7 bits go eight at a time into bit planes, so that no width wastes a bit; a ragged end is padded with zeros. Block
scales for Blackwell tensor cores are swizzled in tiles of 128 x 4 (cuBLAS, "1-D block scaling factors layout").
"""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (R, K), each < 2^bits -> uint8 (R, bytes)."""
    if bits == 8:
        return codes
    if bits == 4:
        pairs = _pad(codes, 2).view(torch.int16)  # the odd code lies eight bits above the even one, and has to lie four
        return ((pairs >> 4) | pairs).to(torch.uint8)
    eights = _pad(codes, 8).view(torch.int64)
    return torch.stack([_gather_bits((eights >> b) & _ONES) for b in range(bits)], -1).flatten(1)


def unpack(packed: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of `pack`: uint8 (R, bytes) -> uint8 codes (R, k)."""
    if bits == 8:
        return packed
    if bits == 4 and packed.is_cuda:  # no temporaries: conversion has memory for one layer
        codes = packed.new_empty(packed.shape[0], 2 * packed.shape[1])
        codes[:, ::2].copy_(packed).bitwise_and_(15)
        codes[:, 1::2].copy_(packed).bitwise_right_shift_(4)
        return codes[:, :k]
    if bits == 4:
        pairs = packed.contiguous().to(torch.int16)
        return ((pairs << 4) | pairs).bitwise_and_(0x0F0F).view(torch.uint8)[:, :k]
    planes = packed.view(packed.shape[0], packed.shape[1] // bits, bits).to(torch.int64)
    eights = _scatter_bits(planes[..., 0])
    for b in range(1, bits):
        eights |= _scatter_bits(planes[..., b]) << b
    return eights.flatten().view(torch.uint8).view(packed.shape[0], 8 * eights.shape[1])[:, :k]


def lookup(packed: Tensor, table: Tensor, k: int) -> Tensor:
    """table[unpack(packed, 4, k)]: uint8 (R, bytes) and 16 float32 values -> float32 (R, k), a byte at a time."""
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)  # (256, 2): what low and high nibble mean
    values = pairs.view(torch.int64).flatten().index_select(0, packed.flatten().int()).view(torch.float32)
    return values.view(packed.shape[0], 2 * packed.shape[1])[:, :k]


def swizzle_128x4(scales: Tensor) -> Tensor:
    """(R, G) 1-byte scales -> flat, tiles of 128 x 4 row-block major, zero padded: byte (r, c) -> (r%32)*16 + (r//32)*4
    + c.
    """
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
    """Padded with zeros to a multiple of columns; in memory that can be viewed as integers of `multiple` bytes."""
    missing = -codes.shape[1] % multiple
    if missing:
        return torch.nn.functional.pad(codes, (0, missing))
    return codes.clone() if codes.storage_offset() % multiple else codes.contiguous()


_ONES = 0x0101010101010101


def _gather_bits(eights: Tensor) -> Tensor:
    """Eight bytes of 0 or 1, an int64 -> one byte, first value lowest: bits a byte apart close up, by halves."""
    for gap in (7, 14, 28):
        eights = eights | (eights >> gap)
    return eights.to(torch.uint8)


def _scatter_bits(byte: Tensor) -> Tensor:
    """Inverse of `_gather_bits`: int64 0..255 -> int64."""
    for gap, kept in ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, _ONES)):
        byte = (byte | (byte << gap)) & kept
    return byte
