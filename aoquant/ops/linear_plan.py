"""How csrc's operators are told of a packed layer: in one integer, because each argument costs the caller's time.

bits      field
0 to 3    how W's codes become operands, a number of CUDA_FORMATS
4 to 7    how x is encoded, a number of ROW_FORMATS; 0: it is not
8 to 12   log2 of the values that share a scale
13 to 15  log2 of the rows of W that share a row of scales
16        whether GridFlip's shift alternates between blocks
17        whether W has zeros
18        whether W has an alpha
19        whether x is float16, not bfloat16
20 to 51  GridFlip's shift, as float32

csrc/linear_plan.cuh takes it apart. Compiled code holds the number alone, so what it asks are functions of the number.
"""

import struct

import torch

CUDA_FORMATS = {"int4": 0, "e4m3": 1, "e8m0": 2, "gridflip": 3, "fp8": 4}  # `Format` of csrc/decode_call.cuh
# `RowFormat` of csrc/row_blocks.cuh
ROW_FORMATS = {"nvfp4-row": 1, "fp8-row": 2, "mxfp4": 3, "fouroversix-row": 4}


def packed(
    codes: str,
    rows: str | None,
    group: int,
    tile: int,
    shift: float,
    alternating: bool,
    has_zero: bool,
    has_alpha: bool,
    dtype: torch.dtype,
) -> int:
    """Return the number of a layer and of how its x is encoded.

    codes: a key of CUDA_FORMATS. rows: of ROW_FORMATS, or None. group, tile: powers of two. shift: GridFlip's, or 0.
    """
    (bits,) = struct.unpack("I", struct.pack("f", shift))
    return (
        CUDA_FORMATS[codes]
        | (0 if rows is None else ROW_FORMATS[rows]) << 4
        | (group.bit_length() - 1) << 8
        | (tile.bit_length() - 1) << 13
        | alternating << 16
        | has_zero << 17
        | has_alpha << 18
        | (dtype == torch.float16) << 19
        | int(bits) << 20
    )


def is_fp8(plan: int) -> bool:
    """Return whether W's codes are fp8, whose scales are the operator's alpha_w."""
    return plan & 15 == CUDA_FORMATS["fp8"]


def encodes(plan: int) -> int:
    """Return how x is encoded: a number of ROW_FORMATS, or 0."""
    return plan >> 4 & 15


def has_zero(plan: int) -> bool:
    """Return whether the operator is given zeros."""
    return bool(plan >> 17 & 1)


def has_alpha(plan: int) -> bool:
    """Return whether it is given alpha_w."""
    return bool(plan >> 18 & 1)


def dtype_of(plan: int) -> torch.dtype:
    """The type of x."""
    return torch.float16 if plan >> 19 & 1 else torch.bfloat16
