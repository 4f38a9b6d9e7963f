"""Round columns of a weight one after another under given scales, and move each error to the columns behind it.

The inner loop of GPTQ. The loop below is the reference; on a GPU one Triton kernel runs a whole block of columns.
"""

import torch
from torch import Tensor

from aoquant.formats.levels import Levels

from .codec.triton import has_triton

BLOCK = 128  # columns; what they move to columns beyond is one GEMM


def round_columns(left_EKN: Tensor, upper_EKK: Tensor, order_EK: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Return values (float32) and codes (uint8) of E weights, both (E, K, N).

    left_EKN: columns of the weights in the order of rounding, float32; overwritten. upper_EKK: U of `gptq.factor`,
        float32. order_EK: the number of each column. levels: of E * N rows.
    """
    values_EKN, codes_EKN = torch.empty_like(left_EKN), torch.empty_like(left_EKN, dtype=torch.uint8)
    for start in range(0, left_EKN.shape[1], BLOCK):
        at, rest = slice(start, start + BLOCK), slice(start + BLOCK, None)
        made = round_block(left_EKN[:, at], upper_EKK[:, at, at], order_EK[:, at], levels)
        values_EKN[:, at], codes_EKN[:, at], errors_EBN = made
        left_EKN[:, rest].baddbmm_(upper_EKK[:, at, rest].mT, errors_EBN, alpha=-1.0)
    return values_EKN, codes_EKN


def round_block(block_EBN: Tensor, upper_EBB: Tensor, columns_EB: Tensor, levels: Levels) -> tuple[Tensor, ...]:
    """Return (values, codes, errors) of a block of columns, (E, B, N) each. An error is divided by U's diagonal."""
    if has_triton(block_EBN.device):
        from .triton.column_kernels import round_block as kernel

        return kernel(block_EBN, upper_EBB, columns_EB, levels.values_GRL, levels.codes_GRL, levels.block)
    values, errors = torch.empty_like(block_EBN), torch.empty_like(block_EBN)
    codes = torch.empty_like(block_EBN, dtype=torch.uint8)
    n = block_EBN.shape[-1]
    for e, (block_BN, u_BB, columns) in enumerate(zip(block_EBN, upper_EBB, columns_EB.tolist(), strict=True)):
        over, rows = u_BB.diagonal().tolist(), slice(e * n, (e + 1) * n)
        for i, column in enumerate(columns):
            values[e, i], codes[e, i] = levels.nearest(block_BN[i], column, rows)
            error = torch.sub(block_BN[i], values[e, i], out=errors[e, i]).div_(over[i])
            # two roundings, as on a GPU: addr_ rounds once or twice, by the CPU
            block_BN[i + 1 :] -= u_BB[i, i + 1 :, None] * error
    return values, codes, errors
