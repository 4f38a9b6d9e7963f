"""GEMMs with a packed W on a CPU, decoded on the way: the contract "aoquant" by the kernels of `csrc/cpu/`.

A token of `generate` reads every weight once. The reference writes float32 values of all of W for it, in a dozen
passes; these kernels decode a code in a register.

    cpu-decode      up to FEW rows of x: codes decoded in registers, or a few rows of W in a cache. The order of
                    additions is that of `csrc/cpu/level.cpp`, for every number of rows, threads and kind of CPU
    cpu-blocks      more rows: some rows of W decoded at a time, and multiplied by PyTorch's float32 GEMM, in its order
    cpu-integers    int8 by int8: sums in int32, rounded to float32 once, so no order shows
    torch-integers  the same sums by PyTorch: `torch._int_mm` where the CPU has instructions for it, float32 GEMMs of so
                    few products that they are exact where it has not

A prepared layer asks for the same (M, N, K) as the converted one and has the same kernels, so it has the same bits.
"""

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format, tiles

from .. import codec, native_cpu
from ..call import of_product
from ..router import Multiply, Request
from .reference import rescaled

FEW = 64
MANY_INTEGERS = 8  # rows from which torch._int_mm is faster, if the CPU has instructions for it
LONGEST = 1 << 16  # K of integer sums
EXACT = 1 << 10  # products of int8 whose sum float32 holds: 2^10 * 2^14


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
        groups = f" and groups of {r.w_format.block}" if r.w_format.block else ""
        return f"needs K and groups to be multiples of 32, got K = {r.k}{groups}"
    return None


def _why_not_blocks(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    how = native_cpu.kind(r.w_format)
    if how is None:
        return f"decodes int4 and int8 weights, not {r.w_format.name}"
    scales = r.w_format.scale_dtype(r.scale_dtype or r.dtype)
    if how == "int4" and scales != r.dtype:
        return f"makes int4's operands in one type, got scales in {scales} and activations in {r.dtype}"
    return _why_not_shape(r) or native_cpu.why_not()


def _why_not_decode(r: Request) -> str | None:
    if (reason := _why_not_blocks(r)) is not None:
        return reason
    return f"takes up to {FEW} rows of x" if r.m > FEW else None


def _why_not_sums(r: Request) -> str | None:
    if (reason := _why_not(r)) is not None:
        return reason
    if native_cpu.kind(r.w_format) != "int8" or r.x_format is None or native_cpu.kind(r.x_format) != "int8":
        given = r.x_format.name if r.x_format else "activations in high precision"
        return f"multiplies int8 by int8, got {r.w_format.name} and {given}"
    if r.k > LONGEST:
        return f"sums up to {LONGEST} products in int32, got K = {r.k}"
    return _why_not_shape(r)


def _why_not_integers(r: Request) -> str | None:
    return _why_not_sums(r) or native_cpu.why_not()


def _why_not_torch(r: Request) -> str | None:
    if (reason := _why_not_sums(r)) is not None or native_cpu.why_not() is not None:
        return reason
    if not native_cpu.torch_multiplies_integers():
        return "is slower than cpu-integers on this CPU"
    return f"is slower than cpu-integers below {MANY_INTEGERS} rows of x" if r.m < MANY_INTEGERS else None


def _product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K) -> y (M, N)."""
    told = native_cpu.told(f, w, dtype)
    if told is None:
        return _by_blocks(f, w, dtype)
    multiply = native_cpu.operator("decode_mm")

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        return multiply(
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

    return product


def _by_blocks(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K) -> y (M, N), with W's float32 values some rows at a time: as many as stay in a cache."""
    n, rows = w.codes.shape[0], max(16, tiles.TILE // w.k // 16 * 16)

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        x32 = x_MK.float()
        acc_MN = x32.new_empty(x_MK.shape[0], n)
        for start in range(0, n, rows):
            some = slice(start, min(start + rows, n))
            part = codec.decode(f, tiles.rows_of(f, w, some), dtype, operand=True, out=torch.float32)
            torch.mm(x32, part.t(), out=acc_MN[:, some])
        return rescaled(acc_MN, alpha_x, f.alpha(w), bias, dtype)

    return product


def _taken(bias: Tensor | None) -> Tensor | None:
    """The bias in the form that the kernels read."""
    if bias is None or (bias.dtype in (torch.bfloat16, torch.float32) and bias.is_contiguous()):
        return bias
    return bias.float().contiguous()


def _integer_product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K), integers of any type -> y (M, N)."""
    codes, multiply = w.codes.contiguous(), native_cpu.operator("integer_mm")

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        x_MK = x_MK.to(torch.int8).contiguous()
        return multiply(x_MK, codes, alpha_x, f.alpha(w), _taken(bias), dtype == torch.bfloat16)

    return product


def _torch_product(f: Format, w: Encoded, dtype: torch.dtype) -> Multiply:
    """x (M, K), integers of any type -> y (M, N)."""

    def product(x_MK: Tensor, alpha_x: Tensor | None, bias: Tensor | None) -> Tensor:
        if native_cpu.torch_multiplies_integers():
            sums_MN = torch._int_mm(x_MK.to(torch.int8).contiguous(), w.codes.contiguous().t())
        else:
            sums_MN = _sums(x_MK, w.codes)
        return rescaled(sums_MN.float(), alpha_x, f.alpha(w), bias, dtype)

    return product


def _sums(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x w^T in int32 (M, N), exact: float32 GEMMs of EXACT products a sum."""
    sums_MN = x_MK.new_zeros(x_MK.shape[0], w_NK.shape[0], dtype=torch.int32)
    for x, w in zip(x_MK.split(EXACT, 1), w_NK.split(EXACT, 1), strict=True):
        sums_MN += torch.mm(x.float(), w.float().t()).to(torch.int32)
    return sums_MN


BACKENDS = (
    of_product("torch-integers", 10, _why_not_torch, _torch_product, of_codes=True),
    of_product("cpu-integers", 9, _why_not_integers, _integer_product, of_codes=True),
    of_product("cpu-decode", 8, _why_not_decode, _product),
    of_product("cpu-blocks", 7, _why_not_blocks, _by_blocks),
)
