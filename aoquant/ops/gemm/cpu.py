"""GEMMs with a packed W on a CPU, decoded on the way: the contract "aoquant" by the kernels of `csrc/cpu/`.

A token of `generate` reads every weight once. The reference writes float32 values of all of W for it, in a dozen
passes; these kernels decode a code in a register. Above FEW rows of x it is cheaper to decode some rows of W into
memory that stays in a cache, and to multiply them by PyTorch's own float32 GEMM.

"cpu-decode" sums in float32. For up to FEW rows its order of additions is that of `csrc/cpu/level.cpp`, the same for
every number of rows, threads and kind of CPU; above, it is MKL's. "cpu-integers" multiplies int8 by int8, sums in int32
and rounds that sum to float32 once, so no order shows. A prepared layer asks for the same (M, N, K) as the converted
one and has the same kernels, so it has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format

from .. import codec, native_cpu, tiles
from ..call import Call
from ..router import Backend, Multiply, Request
from .reference import rescaled

FEW, FEW_INTEGERS = 64, 8
LONGEST = 1 << 16  # K of integer sums


def _why_not(r: Request) -> str | None:
    if r.contract != "aoquant":
        return f"computes aoquant, not {r.contract}"
    if r.device.type != "cpu":
        return "needs a CPU"
    if r.dtype not in (torch.bfloat16, torch.float32):
        return f"multiplies bfloat16 or float32, got {r.dtype}"
    return None


def _why_not_shape(r: Request) -> str | None:
    if r.k % 32 or (r.w_format.block or 32) % 32:
        return f"needs K and groups to be multiples of 32, got K = {r.k} and groups of {r.w_format.block}"
    return None


def _why_not_decode(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    how = native_cpu.kind(r.w_format)
    if how is None:
        return f"decodes int4 and int8 weights, not {r.w_format.name}"
    scales = r.w_format.scale_dtype(r.scale_dtype or r.dtype)
    if how == "int4" and scales != r.dtype:
        return f"makes int4's operands in one type, got scales in {scales} and activations in {r.dtype}"
    return _why_not_shape(r) or native_cpu.why_not()


def _why_not_integers(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if native_cpu.kind(r.w_format) != "int8" or r.x_format is None or native_cpu.kind(r.x_format) != "int8":
        given = r.x_format.name if r.x_format else "activations in high precision"
        return f"multiplies int8 by int8, got {r.w_format.name} and {given}"
    if r.k > LONGEST:
        return f"sums up to {LONGEST} products in int32, got K = {r.k}"
    if (reason := _why_not_shape(r)) is not None:
        return reason
    return None if native_cpu.multiplies_exactly() else native_cpu.why_not()


def _decode(c: Call) -> Tensor:
    return c.shaped(_product(c.w_format, c.w, c.dtype)(c.x_matrix(), c.alpha_x, c.bias))


def _bind_decode(r: Request, w: Encoded) -> Multiply | None:
    return _product(r.w_format, w, r.dtype) if _as_it_lies(w) else None


def _as_it_lies(w: Encoded) -> bool:
    """Whether kernels read W's own bytes. They must not read a copy, which would miss later writes in place."""
    return all(t is None or t.is_contiguous() for t in w.tensors)


def _product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K) -> y (M, N)."""
    told = native_cpu.told(f, w, dtype)
    multiply = native_cpu.operator("decode_mm")

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        if told is None or x_MK.shape[0] > FEW:
            return _by_blocks(f, w, x_MK, alpha_x, bias)
        y_MN: Tensor = multiply(
            x_MK.contiguous(),
            told.codes,
            told.scale,
            told.zero,
            alpha_x,
            f.alpha(w),
            _taken(bias),
            told.kind,
            told.group,
        )
        return y_MN

    return product


def _by_blocks(f: Format, w: Encoded, x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
    """y (M, N) with W's float32 values some rows at a time: as many as stay in a cache."""
    n, x32 = w.codes.shape[0], x_MK.float()
    acc_MN = torch.empty(x_MK.shape[0], n, dtype=torch.float32)
    rows = max(16, tiles.TILE // w.k // 16 * 16)
    for start in range(0, n, rows):
        some = slice(start, min(start + rows, n))
        part = codec.decode(f, tiles.rows_of(f, w, some), x_MK.dtype, operand=True, out=torch.float32)
        torch.mm(x32, part.t(), out=acc_MN[:, some])
    return rescaled(acc_MN, alpha_x, f.alpha(w), bias, x_MK.dtype)


def _taken(bias: Tensor | None) -> Tensor | None:
    """The bias in the form that the kernels read."""
    if bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous()):
        return bias
    return bias.float().contiguous()


def _integers(c: Call) -> Tensor:
    assert c.x is not None
    return c.shaped(_integer_product(c.w_format, c.w, c.dtype)(c.x.codes, c.alpha_x, c.bias))


def _bind_integers(r: Request, w: Encoded) -> Multiply | None:
    return _integer_product(r.w_format, w, r.dtype) if _as_it_lies(w) else None


def _integer_product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K), integers of any type -> y (M, N)."""
    codes, has_library, exact = w.codes.contiguous(), native_cpu.why_not() is None, native_cpu.multiplies_exactly()

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        x_MK = x_MK.to(torch.int8).contiguous()
        if has_library and (x_MK.shape[0] < FEW_INTEGERS or not exact):
            call = native_cpu.operator("integer_mm")
            y_MN: Tensor = call(x_MK, codes, alpha_x, f.alpha(w), _taken(bias), dtype == torch.bfloat16)
            return y_MN
        return rescaled(torch._int_mm(x_MK, codes.t()).float(), alpha_x, f.alpha(w), bias, dtype)

    return product


BACKENDS = (
    Backend("cpu-integers", 9, _why_not_integers, _integers, reads_codes=True, bind=_bind_integers),
    Backend("cpu-decode", 8, _why_not_decode, _decode, reads_codes=True, bind=_bind_decode),
)
