"""The codec's backend "triton": what stands around the kernels of `ops/triton`, which `triton_kernels.py` lists.

A Hadamard transform is applied in the encoder's own pass where the format's kernels take it (`Kernels.mixes`), else by
a kernel before it.
`formats/` stays the truth: every kernel reproduces `Format.encode`, `operand` and `decode` bit for bit, NaN, Inf, zeros
and subnormals included (`test/gpu/test_triton_exact.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES, Encoded, Format, Operand, Random
from aoquant.transforms import Hadamard

from ..quantized import Ask, Quantized, Side
from ..router import Backend, CodecRequest
from . import reference, triton_kernels
from .triton_kernels import OF, imported, kernels_of


@cache
def lacks_triton(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on `device`."""
    if device.type != "cuda":
        return "its kernels are for CUDA devices"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "its float8 conversions need compute capability 8.9 (Ada, Hopper) or later"
    return None


def has_triton(device: torch.device) -> bool:
    """Return whether our Triton kernels run on `device`."""
    return lacks_triton(device) is None


@cache
def finds_outer(operand: Operand) -> bool:
    """Return whether encoding starts with a pass that finds one outer scale, and can be spared it (`dgrad`'s
    `measured`).
    """
    kernels = kernels_of(operand.format)
    return kernels is not None and kernels.measures and operand.format.per_tensor


def _why_not(r: CodecRequest) -> str | None:
    """Of the roles that make or read codes."""
    if reason := why_not_read(r):
        return reason
    transform, exact = r.operand.transform, r.operand.format.lossless
    if transform is None:
        return triton_kernels.why_not(r)
    if transform.drawn:
        return triton_kernels.why_not(r) if r.operand.format.draws else f"has no kernel to {r.role} {r.operand.name}"
    if r.role != "decode" and (exact or not isinstance(transform, Hadamard)):
        return _why_not_mix(r)
    return triton_kernels.why_not(replace(r, operand=Operand(r.operand.format), dtype=torch.float32))


def _why_not_quantize(r: CodecRequest) -> str | None:
    kernels = kernels_of(r.operand.format)
    if r.held and (kernels is None or not kernels.holds(r.operand.format)):
        return f"has no kernel for {r.operand.name} under scales from elsewhere"
    return _why_not(r)


def why_not_read(r: CodecRequest) -> str | None:
    """Return why nothing of ours runs on the request's device, or reads its matrix; None when something may."""
    if lacks := lacks_triton(r.device):
        return lacks
    if r.dtype not in FLOAT_DTYPES or r.rows == 0 or r.k == 0:
        return f"reads float32, bfloat16 or float16 matrices with values in them, got {r.rows} x {r.k} of {r.dtype}"
    return None


def why_not_transform(r: CodecRequest) -> str | None:
    """Of the role "transform", and of encoders that have no transform of their own."""
    return why_not_read(r) or _why_not_mix(r)


def _why_not_mix(r: CodecRequest) -> str | None:
    transform, period = r.operand.transform, r.operand.period
    if transform is not None and transform.drawn:
        return f"rotates and scales {period} values at once, got K = {r.k}" if r.k % period else None
    if isinstance(transform, Hadamard):
        return None
    return f"has no kernel for {transform.name if transform else 'no transform'}"


def _why_not_saturate(r: CodecRequest) -> str | None:
    kernels = kernels_of(r.operand.format)
    clips = kernels is not None and kernels.clips
    mixes = r.operand.transform is None or isinstance(r.operand.transform, Hadamard)
    return why_not_read(r) or (None if clips and mixes else f"has no kernel for {r.operand.name}")


def _why_not_transpose(r: CodecRequest) -> str | None:
    bits = r.operand.format.bits
    if bits not in (4, 8) or r.k % 2 or not r.rows:
        return f"moves codes of 4 and 8 bits of an even K, got {bits} bits, {r.rows} x {r.k}"
    return lacks_triton(r.device)


def _why_not_sides(r: CodecRequest) -> str | None:
    if reason := why_not_read(r):
        return reason
    columns = r.columns.name if r.columns is not None else "nothing"
    if not r.values:
        kernels = kernels_of(r.operand.format)
        same = r.columns is not None and r.columns.name == r.operand.name and r.operand.transform is None
        if not same or kernels is None or not kernels.sides(r.operand.format):
            return f"has no kernel that writes codes of {r.operand.name} of x and of {columns} of x^T"
        if r.dtype is torch.float32:
            return "writes codes of float32 values to wrong places of x^T, as Triton 3.6 compiles it"
        return triton_kernels.why_not(r)
    strips = triton_kernels.in_strips(r.operand, r.columns)
    if r.codes or r.column_codes:
        draws = r.operand.draws or r.columns is None or r.columns.draws
        if not strips or draws or not (r.codes and r.column_codes):
            return f"has no kernel that makes {r.operand.name} of x and {columns} of x^T at once"
        block = r.operand.format.block
        return f"encodes blocks of {block}, got K = {r.k}" if block is None or r.k % block else None
    return None if strips else f"makes no operands of {r.operand.name} and {columns} in one pass"


def quantize(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Codes, and what they stand for, reading x once, or twice when a scale of the whole is not measured yet. Kernels
    make the scales of blocks themselves, under an outer scale from elsewhere too.
    """
    kernels = kernels_of(operand.format)
    if kernels is not None and kernels.draws:
        if ask.random is None:
            return Side(operand.encode(x_RK))  # which says why not
        drawn: Side = kernels.file.draw(operand, x_RK, ask)
        return drawn if ask.codes else drawn._replace(encoded=None)
    measured = ask.measured
    if ask.held is not None and not ask.held.dynamic:
        if ask.held.scale is not None:
            return reference.quantize(operand, x_RK, ask)
        measured = ask.held.outer
    return in_one_pass(operand, x_RK, ask._replace(measured=measured))


def in_one_pass(operand: Operand, x_RK: Tensor, ask: Ask) -> Side:
    """Make codes, values, and the operand's alpha; of `ask`: codes, values, operand and measured."""
    format, mix = operand.format, None
    if operand.transform is not None:
        kernels = kernels_of(format)
        if kernels is not None and kernels.mixes and isinstance(operand.transform, Hadamard):
            mix = operand
        else:
            x_RK = transform(operand, x_RK, None)
            if format.lossless:
                values = None if ask.values is None else x_RK.to(ask.values)
                return Side(format.encode(x_RK) if ask.codes else None, values)
    return OF[type(format)].encoders(format).encode(format, x_RK, ask, mix)


def decode(
    format: Format, e: Encoded, dtype: torch.dtype, *, operand: bool = False, out: torch.dtype | None = None
) -> Tensor:
    """`tiles.decode`, by a kernel."""
    values = OF[type(format)].file.decode(format, e, dtype, operand)
    return values if out is None else values.to(out)


def transform(
    operand: Operand,
    x_RK: Tensor,
    matrix: Tensor | Random | None,
    back: bool = False,
    clipped: Tensor | None = None,
) -> Tensor:
    """`operand.transformed(x_RK, matrix)`, or back: `operand.pull_back(x_RK, matrix)`, zero where it is `clipped`; in
    one pass.
    """
    if isinstance(matrix, Random):
        return imported("stochastic_kernels").rotate(operand, x_RK, matrix)
    dtype = x_RK.dtype if back or operand.format.lossless else torch.float32
    return imported("hadamard_kernels").mix(x_RK, operand.transform, operand.inverse, dtype, back=back, clipped=clipped)


def saturated(operand: Operand, x_RK: Tensor) -> Tensor:
    """Bit-packed mask of the values that are clipped, of transformed ones behind a transform."""
    return OF[type(operand.format)].file.saturated(operand.format, x_RK, operand)


def transposed(codes: Tensor, k: int, padded: int, bits: int) -> Tensor:
    """Codes moved to where those of the transpose lie."""
    return imported("transposed").transposed(codes, k, padded, bits)


def sides(
    x_RK: Tensor, row: Operand | None, col: Operand | None, padded: tuple[int, int], of_row: Ask, of_col: Ask
) -> Quantized:
    """Both sides of x in one pass over x."""
    if row is not None and of_row.values is None:
        return OF[type(row.format)].file.sides(row.format, x_RK, padded[0])
    if row is not None and of_row.codes:
        return imported("operands").both_coded(x_RK.contiguous(), row, col, padded[0])
    dtype = (of_row if row is not None else of_col).values
    return imported("operands").operands(x_RK.contiguous(), row, col, *padded, dtype, of_row.random, of_col.random)


BACKENDS = tuple(
    Backend("triton", 10, why_not, run, role)
    for role, why_not, run in (
        ("quantize", _why_not_quantize, quantize),
        ("sides", _why_not_sides, sides),
        ("decode", _why_not, decode),
        ("transform", why_not_transform, transform),
        ("saturate", _why_not_saturate, saturated),
        ("transpose", _why_not_transpose, transposed),
    )
)
