"""The reference backend: every contract in plain PyTorch. The oracle for other backends, and the backend that runs if
no other can.

Operands are values of the compute dtype, so a float32 matmul of them sums the products that a tensor core sums; the
order of the additions alone is free. On the CPU and on the GPU these functions compute the same contract, to the last
bit of each addition.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from aoquant.formats import Encoded, Float8, Format, as_operand, tiles
from aoquant.formats.elements import fma

from .. import codec
from ..call import Call
from ..router import Backend, CodecRequest, Multiply, Request, runner
from . import ggml_gemm, torch_int4

Decode = Callable[..., Tensor]  # with the signature of `tiles.decode`


def scaled_mm(c: Call) -> Tensor:
    """y = x W^T under c.contract, shaped (*lead, N) in c.dtype, of values that formats themselves decode."""
    c.decode = tiles.decode
    return CONTRACTS[c.contract](c)


def accumulate(c: Call) -> Tensor:
    """(M, N) float32 sum of products of operands."""
    x, w = c.x_format, c.w_format
    if x is not None and x.sums_blocks and w.sums_blocks and x.block == w.block:
        return _accumulate_blocks(c.x, x, c.w, w, w.block)
    x_MK = c.x_matrix(torch.float32)
    if c.w_values is not None or len(tiles.blocks(c.w_rows.shape[0], 4 * c.k)) == 1:
        return x_MK @ c.w_matrix(torch.float32).t()
    return _summed(x_MK, c.w_format, c.w, c.dtype, c.decode)


def _summed(x_MK: Tensor, format: Format, w: Encoded, dtype: torch.dtype, decode: Decode) -> Tensor:
    """(M, N) float32 sums for a float32 x, some rows of W at a time: all of its values would be twice the float W."""
    n = w.codes.shape[0]
    blocks = tiles.blocks(n, 4 * w.k)
    if len(blocks) == 1:
        return x_MK @ decode(format, w, dtype, operand=True, out=torch.float32).t()
    acc_MN = x_MK.new_empty(len(x_MK), n)
    for rows in blocks:
        w_NK = decode(format, tiles.rows_of(format, w, rows), dtype, operand=True, out=torch.float32)
        torch.mm(x_MK, w_NK.t(), out=acc_MN[:, rows])
    return acc_MN


def _accumulate_blocks(x: Encoded, x_format: Float8, w: Encoded, w_format: Float8, block: int) -> Tensor:
    """(M, N): each block's products summed, times both scales, added in K's order."""
    x_GMB, w_GNB = (e.codes.float().unflatten(1, (-1, block)).transpose(0, 1) for e in (x, w))
    sx_GM, sw_GN = x_format.spread(x.scales, len(x.codes)).t(), w_format.spread(w.scales, len(w.codes)).t()
    acc_MN = x_GMB.new_zeros(len(x.codes), len(w.codes))
    for x_MB, w_NB, sx_M, sw_N in zip(x_GMB, w_GNB, sx_GM, sw_GN, strict=True):
        acc_MN += (x_MB @ w_NB.t()) * sx_M.unsqueeze(1) * sw_N
    return acc_MN


def _single_rounding(c: Call) -> Tensor:
    y_MN = rescaled(accumulate(c), c.alpha_x, c.alpha_w, c.bias, c.dtype)
    return y_MN if len(c.lead) == 1 else c.shaped(y_MN)


def rescaled(
    acc_MN: Tensor, alpha_x: Tensor | None, alpha_w: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The epilogue of "aoquant": float32 accumulators times alpha_x, times alpha_w, plus bias, and one rounding."""
    if alpha_x is not None:
        acc_MN = acc_MN * alpha_x
    if alpha_w is not None:
        acc_MN = acc_MN * alpha_w.t()
    return (acc_MN if bias is None else acc_MN + bias.float()).to(dtype)


def fp8_epilogue(c: Call, acc_MN: Tensor) -> Tensor:
    """The scales on the float32 accumulator, one rounding, the bias and its rounding; MSLK's fp8 GEMM fuses a float32
    bias.
    """
    if c.contract.startswith("fp8_mslk") and c.bias is not None and c.bias.dtype == torch.float32:
        assert c.alpha_x is not None and c.alpha_w is not None
        return c.shaped(fma(acc_MN * c.alpha_x, c.alpha_w.t(), c.bias).to(c.dtype))
    return c.plus_bias(rescaled(acc_MN, c.alpha_x, c.alpha_w, None, c.dtype))


def _dequantize_flat(c: Call) -> Tensor:
    x_MK = _decoded_x(c).reshape(-1, c.k)
    return c.shaped(F.linear(x_MK, c.w_matrix(operand=False), _cast(c.bias, c.dtype)))


def _int8_rescale(c: Call) -> Tensor:
    x_MK = c.x_hp.reshape(-1, c.k)
    if c.w_format.block:
        y_MN = torch.mm(x_MK, c.w_matrix(operand=False).t())
    else:
        y_MN = torch.mm(x_MK, c.w_format.integers(c.w).t().to(c.dtype)) * c.w.scales.to(c.dtype).flatten()
    return c.shaped(_plus(y_MN, c.bias))


def _int8_dynamic(c: Call) -> Tensor:
    # float64 holds every int32 sum exactly, so this is the integer product whatever K is
    x_MK, w_NK = c.integers()
    return int8_epilogue(c, (x_MK.double() @ w_NK.double().t()).to(torch.int32))


def int8_epilogue(c: Call, acc_MN: Tensor) -> Tensor:
    """torchao's order: int32 * alpha_x rounded, minus the zero point's share, times alpha_w in float32, plus bias,
    rounded.
    """
    y_MN = (acc_MN.float() * c.x.scales).to(c.dtype)
    if c.x.zero is not None:
        row_sums = c.w_format.integers(c.w).sum(-1).float()
        y_MN = y_MN - ((c.x.zero.float() * c.x.scales) * row_sums).to(c.dtype)
    return c.shaped(_plus(y_MN * c.w.scales.flatten(), c.bias).to(c.dtype))


def nvfp4_epilogue(c: Call, rounded_MN: Tensor) -> Tensor:
    """torchao's order: the rounded sum times the rounded product of the outer scales, plus bias."""
    assert c.alpha_x is not None and c.alpha_w is not None
    y_MN = rounded_MN * (c.alpha_x * c.alpha_w.t()).to(c.dtype)
    return c.shaped(_plus(y_MN, _cast(c.bias, c.dtype)))


def _decoded_x(c: Call) -> Tensor:
    if c.x_operand is None:
        return c.x_hp
    x = c.x_matrix(operand=False).reshape(*c.lead, c.k)
    # F.linear rounds twice, product and bias, when a 3-D input is not contiguous, so the layout is part of the contract
    return (
        torch.empty_strided(x.shape, c.strides, dtype=x.dtype, device=x.device).copy_(x) if c.strides is not None else x
    )


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else (y + bias).to(y.dtype)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _always(request: Request) -> None:
    """No request is refused."""


def _bound(decode: Decode) -> Callable[[Request, Encoded], Multiply | None]:
    """Return what binds a W that `decode` decodes to the contract "aoquant"."""

    def bind(r: Request, w: Encoded) -> Multiply | None:
        f = r.w_format
        if r.contract != "aoquant" or (r.x_format is not None and r.x_format.sums_blocks):
            return None

        def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
            return rescaled(_summed(x_MK.float(), f, w, r.dtype, decode), alpha_x, f.alpha(w), bias, r.dtype)

        return product

    return bind


def _decodes_alike(r: Request) -> str | None:
    formats = [(f, n) for f, n in ((r.x_format, r.m), (r.w_format, r.n)) if f is not None]
    requests = (CodecRequest("decode", as_operand(f.narrow), r.device, r.dtype, n, r.k) for f, n in formats)
    if all(runner(request).name == "reference" for request in requests):
        return "decodes by kernels, and has none for these formats"
    return None


CONTRACTS: dict[str, Callable[[Call], Tensor]] = {
    "aoquant": _single_rounding,
    "bias_after": lambda c: c.plus_bias(accumulate(c).to(c.dtype)),
    "fp8_bias_after": lambda c: fp8_epilogue(c, accumulate(c)),
    "tinygemm_cuda": torch_int4.cuda_reference,
    "tinygemm_cpu": torch_int4.cpu_reference,
    "dequantize": lambda c: F.linear(_decoded_x(c), c.w_matrix(operand=False), _cast(c.bias, c.dtype)),
    "dequantize_flat": _dequantize_flat,
    "matmul_bias": lambda c: _plus(torch.matmul(_decoded_x(c), c.w_matrix(operand=False).t()), c.bias),
    "int8_rescale": _int8_rescale,
    "int8_dynamic": _int8_dynamic,
    "fp8_scaled_mm": _single_rounding,
    "fp8_scaled_mm_precise": _single_rounding,
    "fp8_mslk": lambda c: fp8_epilogue(c, accumulate(c)),
    "fp8_mslk_precise": lambda c: fp8_epilogue(c, accumulate(c)),
    "fp8_blocks": lambda c: c.plus_bias(accumulate(c).to(c.dtype)),
    "nvfp4_rescale": lambda c: nvfp4_epilogue(c, accumulate(c).to(c.dtype)),
    "ggml": ggml_gemm.scaled_mm,
}
BACKENDS = (
    Backend("decoded", 1, _decodes_alike, lambda c: CONTRACTS[c.contract](c), bind=_bound(codec.decode)),
    Backend("reference", 0, _always, scaled_mm, bind=_bound(tiles.decode)),
)
