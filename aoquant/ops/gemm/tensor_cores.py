"""The emulated GEMM on tensor cores: operands that are exact in bf16, float32 accumulators, and the contract's
epilogue.

e2m1, e4m3 and integer codes times their block scales are exact in bf16, so a bf16 tensor core sums the very products
that an FP4 or FP8 one sums. The contract rounds the accumulator: without outer scales and bias cuBLAS's own
rounding is that rounding, and nothing is left to do; with them, a Triton GEMM does it in its epilogue
(`triton/matmul.py`). Where y has too few tiles to fill the chip, cuBLAS splits K, and might sum bf16 partial results;
there it hands over float32, and one small kernel scales, adds the bias and rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from aoquant.formats import Encoded, Float8, Format

from .. import codec, tiles
from ..call import Call
from ..router import Backend, Multiply, Request
from .reference import nvfp4_epilogue, rescaled

_CONTRACTS = ("aoquant", "nvfp4_rescale")
_FULL = 128 * 256 * 128  # outputs that fill a large GPU with 128 x 256 tiles
_BLOCK = 1 << 26  # bytes of W's values that are there at once
_ROWS = 256  # of W: a block is a multiple of them, and so of every format's tile


def _why_not(r: Request) -> str | None:
    if r.contract not in _CONTRACTS:
        return f"computes {' and '.join(_CONTRACTS)}, not {r.contract}"
    if r.device.type != "cuda":
        return "needs a CUDA device"
    if isinstance(r.x_format, Float8) and r.x_format.block is not None and r.x_format.block == r.w_format.block:
        return f"sums whole rows, not the blocks of {r.x_format.name}"
    if r.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 or float16, got {r.dtype}"
    return None


@cache
def _kernels() -> tuple[Any, Any]:
    """The modules of the GEMM and of the epilogue alone: an import statement in a function costs as much as what
    follows it there.
    """
    from ..triton import epilogue, matmul

    return matmul, epilogue


def _run(c: Call) -> Tensor:
    if c.contract == "nvfp4_rescale":
        x_MK, w_NK = c.x_matrix(), c.w_matrix()
        large = x_MK.shape[0] * w_NK.shape[0] >= _FULL
        return nvfp4_epilogue(c, accumulate(x_MK, w_NK, large).to(c.dtype))
    x_MK = c.x_matrix()
    if isinstance(c.given_w, Encoded) and c.w_values is None:
        return c.shaped(_product(c.w_format, c.w)(x_MK, c.alpha_x, c.bias))
    w_NK = c.w_matrix()  # whole: it is a parameter that is whole itself, or its values are there
    return c.shaped(_multiplied(x_MK, w_NK.shape, w_NK.__getitem__, c.alpha_x, c.alpha_w, c.bias))


def _bind(r: Request, w: Encoded) -> Multiply | None:
    return _product(r.w_format, w) if r.contract == "aoquant" else None


def _product(f: Format, w: Encoded) -> Multiply:
    """x (M, K) -> y (M, N) with W decoded anew in each call, a block of rows at a time."""
    shape = w.codes.shape[0], w.k

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        def values(rows: slice) -> Tensor:
            part = w if rows == slice(0, shape[0]) else tiles.rows_of(f, w, rows)
            return codec.decode(f, part, x_MK.dtype, operand=True)

        return _multiplied(x_MK, shape, values, alpha_x, f.alpha(w), bias)

    return product


def _multiplied(
    x_MK: Tensor,
    shape: Sequence[int],
    values: Callable[[slice], Tensor],
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """y (M, N) of W (N, K) = `shape`, of which `values` gives some rows: blocks of at most 64 MB, so that no more of
    W's values are there at once. A prepared layer, whose W is whole, multiplies the same blocks.
    """
    (m, k), n = x_MK.shape, shape[0]
    blocks = _blocks(n, k * x_MK.element_size())
    if len(blocks) == 1:
        return _block(x_MK, values(blocks[0]), n, alpha_x, alpha_w, bias)
    y_MN = x_MK.new_empty(m, n)
    for rows in blocks:  # the values of one block are gone before those of the next are made
        _block(x_MK, values(rows), n, alpha_x, _part(alpha_w, rows, n), _part(bias, rows, n), y_MN[:, rows])
    return y_MN


def _block(
    x_MK: Tensor,
    w_NK: Tensor,
    whole: int,
    alpha_x: Tensor | None,
    alpha_w: Tensor | None,
    bias: Tensor | None,
    y_MN: Tensor | None = None,
) -> Tensor:
    """y (M, N) of some rows of W, which has `whole`; into y_MN, columns of y, if it is given."""
    large = x_MK.shape[0] * whole >= _FULL
    if large and alpha_x is None and alpha_w is None and bias is None:
        return torch.mm(x_MK, w_NK.t()) if y_MN is None else torch.mm(x_MK, w_NK.t(), out=y_MN)
    multiply, rescale = _kernels() if codec.has_triton(x_MK.device) else (None, None)
    if multiply is None or rescale is None:
        made = rescaled(accumulate(x_MK, w_NK, False), alpha_x, alpha_w, bias, x_MK.dtype)
    elif large and multiply.why_not(x_MK, w_NK) is None:
        return cast(Tensor, multiply.matmul(x_MK, w_NK, alpha_x, alpha_w, bias, y_MN))
    else:
        made = rescale.rescale(accumulate(x_MK, w_NK, False), alpha_x, alpha_w, bias, x_MK.dtype)
    return made if y_MN is None else y_MN.copy_(made)


def _blocks(n: int, row: int) -> list[slice]:
    """Rows of W, `row` bytes each: as few blocks as hold 64 MB at most, of about the same size."""
    count = -(-n * row // _BLOCK)
    rows = -(-n // count // _ROWS) * _ROWS
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def _part(t: Tensor | None, rows: slice, n: int) -> Tensor | None:
    """What belongs to some rows of W, of something that each row has, or that all have alike."""
    return t if t is None or t.shape[0] != n else t[rows]


def accumulate(x_MK: Tensor, w_NK: Tensor, rounded: bool) -> Tensor:
    """(M, N) sums of products: float32, or rounded once to the operands' dtype by the GEMM itself."""
    return torch.mm(x_MK, w_NK.t()) if rounded else torch.mm(x_MK, w_NK.t(), out_dtype=torch.float32)


BACKENDS = (Backend("tensor-cores", 5, _why_not, _run, bind=_bind),)
