"""The emulated GEMM on tensor cores: operands that are exact in bf16, float32 accumulators, and the contract's
epilogue.

e2m1, e4m3 and integer codes times their block scales are exact in bf16, so a bf16 tensor core sums the very products
that an FP4 or FP8 one sums. The contract rounds the accumulator: without outer scales and bias cuBLAS's own
rounding is that rounding, and nothing is left to do; with them, a Triton GEMM does it in its epilogue
(`triton/matmul.py`). Where y has too few tiles to fill the chip, cuBLAS splits K, and might sum bf16 partial results;
there it hands over float32, and one small kernel scales, adds the bias and rounds.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, tiles

from .. import codec, native
from ..call import Call
from ..codec.triton_kernels import imported
from ..router import Backend, Multiply, Request
from .few_rows import decodes, plan_of
from .reference import nvfp4_epilogue, rescaled

_CONTRACTS = ("aoquant", "nvfp4_rescale")
_FULL = 128 * 256 * 128  # outputs that fill a large GPU with 128 x 256 tiles
Blocks = Sequence[tuple[slice, Callable[[], Tensor]]]  # rows of W, and what makes their values


def _why_not(r: Request) -> str | None:
    if r.contract not in _CONTRACTS:
        return f"computes {' and '.join(_CONTRACTS)}, not {r.contract}"
    if r.device.type != "cuda":
        return "needs a CUDA device"
    if r.x_format is not None and r.x_format.sums_blocks and r.x_format.block == r.w_format.block:
        return f"sums whole rows, not the blocks of {r.x_format.name}"
    if r.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 or float16, got {r.dtype}"
    return None


def _run(c: Call) -> Tensor:
    if c.contract == "nvfp4_rescale":
        x_MK, w_NK = c.x_matrix(), c.w_matrix()
        large = x_MK.shape[0] * w_NK.shape[0] >= _FULL
        return nvfp4_epilogue(c, accumulate(x_MK, w_NK, large).to(c.dtype))
    x_MK, f = c.x_matrix(), c.w_format
    if isinstance(c.given_w, Encoded) and c.w_values is None:
        blocks = _blocks(f, c.w, x_MK.dtype, lambda part: partial(codec.decode, f, part, x_MK.dtype, operand=True))
        return c.shaped(_multiplied(x_MK, c.w.codes.shape[0], blocks, c.alpha_x, f.alpha(c.w), c.bias))
    w_NK = c.w_matrix()  # whole: it is a parameter that is whole itself, or its values are there
    n, row = w_NK.shape[0], w_NK.shape[1] * w_NK.element_size()
    parts = [(rows, partial(w_NK.__getitem__, rows)) for rows in tiles.blocks(n, row)]
    return c.shaped(_multiplied(x_MK, n, parts, c.alpha_x, c.alpha_w, c.bias))


def _multiply(x_MK: Tensor, alpha_x: Tensor | None, w_NK: Tensor, alpha_w: Tensor | None) -> Tensor:
    """y (M, N) of two operands that are there."""
    return _block(x_MK, w_NK, w_NK.shape[0], alpha_x, alpha_w, None)


def _bind(r: Request, w: Encoded) -> Multiply | None:
    """x (M, K) -> y (M, N), decoding W in each call, by csrc where it can: its launch costs the host less."""
    if r.contract != "aoquant":
        return None
    f, n = r.w_format, w.codes.shape[0]

    def decoder(part: Encoded) -> Callable[[], Tensor]:
        if not by_csrc(r, part):
            return partial(codec.decode, f, part, r.dtype, operand=True)
        return partial(native.operator("decode_values"), part.codes, part.scale, part.zero, plan_of(f, part, r.dtype))

    blocks = _blocks(f, w, r.dtype, decoder)
    return lambda x_MK, alpha_x, bias: _multiplied(x_MK, n, blocks, alpha_x, f.alpha(w), bias)


def by_csrc(r: Request, w: Encoded) -> bool:
    """Return whether csrc decodes W for calls without gradients."""
    return decodes(r) and all(t is None or native.is_aligned(t) for t in (w.codes, w.scale, w.zero))


def _blocks(f: Format, w: Encoded, dtype: torch.dtype, decoder: Callable[[Encoded], Callable[[], Tensor]]) -> Blocks:
    """W's blocks of rows: `decoder(the block's codes)` makes its values, when it is called."""
    n = w.codes.shape[0]
    rows = tiles.blocks(n, w.k * dtype.itemsize)
    return [(part, decoder(w if len(rows) == 1 else tiles.rows_of(f, w, part))) for part in rows]


def _multiplied(
    x_MK: Tensor, n: int, blocks: Blocks, alpha_x: Tensor | None, alpha_w: Tensor | None, bias: Tensor | None
) -> Tensor:
    """y (M, N) of W in blocks of at most 64 MB, so that no more of its values are there; a whole W has the same."""
    if len(blocks) == 1:
        return _block(x_MK, blocks[0][1](), n, alpha_x, alpha_w, bias)
    y_MN = x_MK.new_empty(x_MK.shape[0], n)
    for rows, values in blocks:  # the values of one block are gone before those of the next are made
        _block(x_MK, values(), n, alpha_x, _part(alpha_w, rows, n), _part(bias, rows, n), y_MN[:, rows])
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
    triton = codec.has_triton(x_MK.device)
    if triton and large and imported("matmul").why_not(x_MK, w_NK) is None:
        return imported("matmul").matmul(x_MK, w_NK, alpha_x, alpha_w, bias, y_MN)
    rescale = imported("epilogue").rescale if triton else rescaled
    made = rescale(accumulate(x_MK, w_NK, False), alpha_x, alpha_w, bias, x_MK.dtype)
    return made if y_MN is None else y_MN.copy_(made)


def _part(t: Tensor | None, rows: slice, n: int) -> Tensor | None:
    """Return what belongs to some rows of W, of something that each row has, or that all have alike."""
    return t if t is None or t.shape[0] != n else t[rows]


def accumulate(x_MK: Tensor, w_NK: Tensor, rounded: bool) -> Tensor:
    """(M, N) sums of products: float32, or rounded once to the operands' dtype by the GEMM itself."""
    return torch.mm(x_MK, w_NK.t()) if rounded else torch.mm(x_MK, w_NK.t(), out_dtype=torch.float32)


BACKENDS = (Backend("tensor-cores", 5, _why_not, _run, multiply=_multiply, bind=_bind),)
