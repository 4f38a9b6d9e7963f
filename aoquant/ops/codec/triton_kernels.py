"""Which formats have Triton kernels, in which roles, and what these cannot do: one record for each file of
`ops/triton`.

A kernel serves exact classes of formats. A subclass has other numbers, so it needs a record of its own. Triton is not
imported here, so that a machine without it can say why a kernel does not run. To add a kernel: its launchers (`encode`,
`decode`) in a file of `ops/triton`, and its record here.

    encode(format, x_RK, ask, mix) -> Side; of `ask`: codes, values, operand and measured
    decode(format, e, dtype, operand) -> values
    saturated(format, x_RK, mix) -> mask, where `clips`
    draw(operand, x_RK, ask) -> Side with codes, where `draws`; of `ask`: values, random and measured
    sides(format, x_RK, padded) -> Quantized, where `sides`

mix is the operand whose Hadamard transform comes first in the same pass, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from aoquant.formats import (
    MX,
    NVFP4,
    Affine,
    Float8,
    Float8Mslk,
    Format,
    FourOverSix,
    Ggml,
    GridFlip,
    Int4,
    MXFP4Dialect,
    MXSquare,
    NVFP4Dialect,
    NVFP4PowerOfTwo,
    NVFP4Search,
    Operand,
    TEFloat8,
)
from aoquant.formats.stochastic import MSEden, MXStochastic, NVFP4Stochastic
from aoquant.formats.vllm import Int8Vllm, Int8VllmReciprocal
from aoquant.transforms import RoundedHadamard

from ..router import CodecRequest

LONGEST_ROW = 16384  # values of an integer row that its kernel holds in registers


@dataclass(frozen=True)
class Kernels:
    """The kernels of one file for some classes of formats.

    module: its name in `ops/triton`.
    formats: exactly these classes.
    decodes_only: whether the formats are decoded, but not encoded.
    has: whether the kernels know the options of an instance.
    why_not: a reason against a request for a format that they have, or None.
    mixes: whether they are encoded behind a Hadamard transform in the same pass.
    measures: whether their encoder starts with a pass that finds an outer scale, and takes it as `measured` instead.
    holds: whether an instance is encoded under an outer scale from elsewhere, as under a measured one.
    clips: whether there is a kernel for their clipped values.
    draws: the formats are encoded under random numbers, and never decoded here.
    encoder: name of another file that encodes an instance, or "".
    sides: whether it writes codes of x and of x^T in one pass over x, for an instance.
    strips: whether `operands.py` makes an instance's operands of x and of x^T.
    stacked: whether `stacked.py` makes an instance's values of a stack of experts that is stored transposed.
    """

    module: str
    formats: tuple[type[Format], ...]
    decodes_only: bool = False
    has: Callable[[Any], bool] = lambda format: True
    why_not: Callable[[CodecRequest], str | None] = lambda request: None
    mixes: bool = False
    measures: bool = False
    holds: Callable[[Any], bool] = lambda format: False
    clips: bool = False
    draws: bool = False
    encoder: Callable[[Any], str] = lambda format: ""
    sides: Callable[[Any], bool] = lambda format: False
    strips: Callable[[Any], bool] = lambda format: False
    stacked: Callable[[Any], bool] = lambda format: False

    @property
    def file(self) -> ModuleType:
        """The file itself, imported when a CUDA device first asks for it."""
        return imported(self.module)

    def encoders(self, format: Format) -> ModuleType:
        """The file whose `encode` encodes `format`."""
        return imported(self.encoder(format) or self.module)


@cache
def imported(module: str) -> ModuleType:
    """A file of `ops/triton`: an import statement in a function costs as much as what follows it there."""
    return import_module(f"aoquant.ops.triton.{module}")


def _why_not_float8(r: CodecRequest) -> str | None:
    # Codes that a thread stores byte by byte come out wrong after fp8-tensor's conversions: in one such kernel Triton
    # 3.6's PTX reads right, so the assembler is suspected, not proved (H200, 2026-11-21); stores of 16 bytes are right.
    return f"reads rows of float8 by 16, got K = {r.k}" if r.k % 16 else None


def _why_not_integers(r: CodecRequest) -> str | None:
    f: Any = r.operand.format
    row = r.k if f.block is None and f.per == "row" else 0
    together = {8: 1, 4: 2}.get(f.bits, 8)  # codes that are packed into whole bytes
    if r.codes and (r.k % together or (f.block or together) % together):
        return f"packs {f.bits} bits of {together} codes at once, got K = {r.k} in blocks of {f.block or r.k}"
    if r.role != "decode" and (f.block or row) > LONGEST_ROW:
        return f"holds blocks of up to {LONGEST_ROW} values, got {f.block or r.k}"
    return None


def _why_not_grids(r: CodecRequest) -> str | None:
    f: Any = r.operand.format
    if r.role != "decode" and (f.tile > 1 or f.metric != "mse"):
        return f"encodes blocks of 16 by their squared error, not {f.name}"
    return None


def _why_not_random(r: CodecRequest) -> str | None:
    if r.k % r.operand.period:
        return f"rotates and scales {r.operand.period} values at once, got K = {r.k}"
    return None


def _has_affine(f: Affine) -> bool:
    return f.mapping in ("symmetric", "asymmetric") and not f.fixed and not f.stored and not f.wide and f.width > 1


def _has_float8(f: Float8) -> bool:
    square = f.per != "block" or (f.cols == 128 and f.rows in (1, 128))
    return square and not f.fixed and not f.wide and not f.pow2 and f.low is None and f.high is None


KERNELS = (
    Kernels("blockscaled_kernels", (MX,), mixes=True, strips=lambda f: True, stacked=lambda f: True),
    Kernels(
        "blockscaled_kernels",
        (NVFP4,),
        mixes=True,
        measures=True,
        holds=lambda f: f.per_tensor,
        encoder=lambda f: "nvfp4_rows" if f.outer == "row" else "",
        stacked=lambda f: f.per_tensor,
    ),
    Kernels("blockscaled_kernels", (NVFP4PowerOfTwo,), mixes=True, measures=True, holds=lambda f: True),
    Kernels("blockscaled_kernels", (NVFP4Search,), decodes_only=True),
    Kernels("dialect_kernels", (MXFP4Dialect,), mixes=True, clips=True),
    Kernels(
        "dialect_kernels",
        (NVFP4Dialect,),
        has=lambda f: f.tile == 1 or (f.dialect == "te" and not f.fixed),
        encoder=lambda f: "tile_kernels" if f.tile > 1 else "",
        strips=lambda f: f.dialect == "te" and f.tile == 1 and not f.fixed,
    ),
    Kernels("tile_kernels", (MXSquare,)),
    Kernels("grids", (FourOverSix, GridFlip), why_not=_why_not_grids),
    Kernels("integer_kernels", (Int4,), why_not=_why_not_integers, stacked=lambda f: True),
    Kernels("integer_kernels", (Affine,), has=_has_affine, why_not=_why_not_integers),
    Kernels("integer_kernels", (Int8Vllm, Int8VllmReciprocal), why_not=_why_not_integers),
    Kernels("ggml_kernels", (Ggml,)),
    Kernels(
        "float8_kernels",
        (Float8,),
        has=_has_float8,
        why_not=_why_not_float8,
        stacked=lambda f: f.per == "row" and not f.wide and not f.pow2 and f.low is f.high is None,
    ),
    Kernels("float8_kernels", (Float8Mslk,), why_not=_why_not_float8),
    Kernels(
        "float8_kernels",
        (TEFloat8,),
        has=lambda f: not f.fixed,
        why_not=_why_not_float8,
        sides=lambda f: f.per == "tensor",
    ),
    Kernels("stochastic_kernels", (MXStochastic, MSEden), why_not=_why_not_random, draws=True),
    Kernels("stochastic_kernels", (NVFP4Stochastic,), why_not=_why_not_random, draws=True, strips=lambda f: True),
)


def in_strips(rows: Operand | None, columns: Operand | None) -> bool:
    """Return whether `operands.py` makes these, of x and of x^T; None: not that one."""
    of_x = rows is None or (_strip_format(rows.format) and rows.transform is None)
    return of_x and (columns is None or (_strip_format(columns.format) and _strip_transform(columns)))


def _strip_format(f: Format) -> bool:
    kernels = kernels_of(f)
    return kernels is not None and kernels.strips(f)


def _strip_transform(o: Operand) -> bool:
    """A transform fills a strip, as a block of the format does."""
    return o.transform is None or (isinstance(o.transform, RoundedHadamard) and o.format.block == o.transform.size)


OF = {cls: kernels for kernels in KERNELS for cls in kernels.formats}


def kernels_of(format: Format) -> Kernels | None:
    """The kernels of exactly this class of formats."""
    return OF.get(type(format))


def takes_stacks(format: Format) -> bool:
    """Return whether a kernel makes the values of a stack of experts, under an outer scale for each where the format
    has one.
    """
    kernels = kernels_of(format)
    return kernels is not None and kernels.stacked(format)


def why_not(r: CodecRequest) -> str | None:
    """Return why no kernel encodes, decodes or quantises the request's format, its transform apart; None when
    one does.
    """
    format, kernels = r.operand.format, kernels_of(r.operand.format)
    if kernels is not None and kernels.draws:
        return kernels.why_not(r) if r.role == "quantize" else f"has no kernel to {r.role} {r.operand.name}"
    if kernels is None or (kernels.decodes_only and r.role != "decode") or not kernels.has(format):
        return f"has no kernel for {r.operand.name}"
    if format.block and r.k % format.block:  # a block would straddle two rows; the reference says why it cannot be
        return f"encodes blocks of {format.block}, got K = {r.k}"
    return kernels.why_not(r)
