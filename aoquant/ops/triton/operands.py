"""x and x^T in one pass over x: the operands of the GEMMs that read them, and the codes of them that are kept.

dgrad reads dy (M, N) rounded in blocks along N, wgrad reads dy^T rounded in blocks along M. Where nothing keeps the
codes, a GEMM needs the values alone, and both lie where x lies: a matrix unit takes an operand (C, R) as well from the
memory of (R, C). So nothing is turned, and every read and write follows x's rows. Of a layer's input, forward
multiplies the values along K and backward reads the codes along M, so there the columns' codes are written, turned.

A program has strips of x, T columns of R rows, one block of the columns' format high. Neighbouring lanes share the
blocks along a row, so that scales cost a few exchanges within a warp. Where the columns are transformed, drawn or
packed, a lane holds all R rows of its columns, and a butterfly is an addition of two of its registers.

An outer scale is the absmax of the side. Without a transform both sides have one, which `amax.py` finds; with one,
`_largest` finds both in one pass over x.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aoquant.formats import Encoded, Operand, Random
from aoquant.formats.blockscaled import E4M3_FLOOR, NVFP4_TOP, PTS_FLOOR
from aoquant.formats.elements import ELEMENTS, FLOAT8, FLOAT32_MAX
from aoquant.formats.scales import reciprocal
from aoquant.formats.stochastic import E4M3_MAX, SR_MAX
from aoquant.transforms import RoundedHadamard

from ..quantized import Quantized, Side
from .amax_kernels import PARTIALS, absmax_partials
from .element_codes import (
    E2M1_UNIT,
    bits_float,
    e2m1_nearest,
    e8m0_byte,
    e8m0_inverse,
    e8m0_value,
    float8_index,
    float8_nearest,
    float_bits,
    least,
    most,
    pack4,
    te_factor,
    te_scale,
)
from .launch import LAUNCHES, Launch
from .stochastic_kernels import e2m1_drawn, philox_key, safe_scale
from .strips import blocks, butterflied, column_words, highest, mixed, quartered, row_words, strip

PROGRAMS = 2048
VALUES = 128  # of a lane: blocks of its columns, 16 or 32 high
FEWER_VALUES = 64  # where 128 would spill: for e2m1, or where codes are written beside values
DRAWN_VALUES = 32  # beside Philox's words

E2M1_WARPS, DRAWN_WARPS = 12, 16  # of a multiprocessor, which has 65536 registers: e2m1 takes longer to compute
MULTIPROCESSORS = 132  # of an H100 or H200: all programs at once
LARGEST_WARPS = 4


@triton.jit
def _largest(
    x_ptr, rows_ptr, columns_ptr, m, n, strips,
    SIGNS: tl.constexpr, PLACE: tl.constexpr, TALL: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Each program's largest magnitude, as bits: of x, if there is a rows_ptr, and of its transformed columns."""
    of_x, of_y = tl.zeros([T, 1], tl.float32), tl.zeros([T, 1], tl.float32)
    for i in range(tl.program_id(0), strips, tl.num_programs(0)):
        x, _, _ = strip(x_ptr, i, m, n, n, PLACE, TALL, T, R)
        if rows_ptr is not None:
            of_x = most(of_x, highest(x))
        of_y = most(of_y, highest(butterflied(x, SIGNS, T)))
    if rows_ptr is not None:
        tl.store(rows_ptr + tl.program_id(0), tl.max(tl.ravel(float_bits(of_x) & 0x7FFFFFFF), axis=0))
    of_y = quartered(of_y, x_ptr.dtype.element_ty)
    tl.store(columns_ptr + tl.program_id(0), tl.max(tl.ravel(float_bits(of_y) & 0x7FFFFFFF), axis=0))


@triton.jit
def _whole(partial_ptr, outer_ptr, alpha_ptr, KIND: tl.constexpr, LARGEST: tl.constexpr, POST: tl.constexpr,
           PTS_RECIPROCAL: tl.constexpr, SMALLEST_PTS: tl.constexpr, N_PARTIALS: tl.constexpr):  # fmt: skip
    """(outer scale of a side, what follows from it for all of its blocks); the first program writes it, and alpha."""
    outer = tl.full([], 1.0, tl.float32)
    follows = outer
    if partial_ptr is not None:
        outer = bits_float(tl.max(tl.load(partial_ptr + tl.arange(0, N_PARTIALS)), axis=0))
        if KIND == "drawn":
            outer = most(outer * PTS_RECIPROCAL, SMALLEST_PTS)
            follows = tl.div_rn(follows, outer)
            alpha = outer
        else:
            follows = te_factor(outer, LARGEST)
            alpha = outer * POST
        if tl.program_id(0) == 0:
            tl.store(alpha_ptr, alpha)
            if outer_ptr is not None:
                tl.store(outer_ptr, outer)
    return outer, follows


@triton.jit
def _rounded(
    x, random, outer, follows, KIND: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, MAX_POW2: tl.constexpr,
    RECIPROCAL: tl.constexpr, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """(values over their block's scale, in float32, or in float8 where they are not WIDE and no e2m1; float32 scales;
    bytes of the scales; whether a block has a factor) of float32 values given by their bits, in blocks along axis 1.

    KIND: "mx", "te" or "drawn", by random words.
    """
    magnitude = x & 0x7FFFFFFF
    amax = float_bits(highest(bits_float(x)))
    if KIND == "mx":
        byte = e8m0_byte(amax, RULE, MAX_POW2, RECIPROCAL, MANTISSA)
        inverse, step, stored = e8m0_inverse(byte, RULE), e8m0_value(byte), byte.to(tl.uint8)
        known = inverse == inverse
        if ELEMENT == "e2m1":
            rounded = e2m1_nearest(bits_float(magnitude) * inverse)
            rounded = bits_float(float_bits(rounded) | (x & -0x80000000))
        else:
            y = least(most(bits_float(x) * inverse, -LIMIT), LIMIT)
            if WIDE:
                rounded = float8_nearest(y, ELEMENT)
            else:
                rounded = y.to(tl.float8e4nv) if ELEMENT == "e4m3" else y.to(tl.float8e5)
    elif KIND == "te":
        scale, inverse = te_scale(amax, follows, RECIPROCAL, LARGEST)
        step, stored = scale.to(tl.float32), scale.to(tl.uint8, bitcast=True)
        known = inverse == inverse  # else the block is +0, or NaN by its scale
        inverse, sign = tl.where(known, inverse, 0.0), tl.where(known, -0x80000000, 0)
        rounded = e2m1_nearest(bits_float(magnitude) * inverse)
        rounded = bits_float(float_bits(rounded) | (x & sign))
    else:
        scale, inverse = safe_scale(amax, outer, follows, RECIPROCAL, LEAST)
        step, stored, known = scale.to(tl.float32), scale.to(tl.uint8, bitcast=True), inverse == inverse
        steps, p = e2m1_drawn(bits_float(magnitude) * inverse, random)
        rounded = bits_float(float_bits(steps.to(tl.float32) * bits_float(p)) | (x & -0x80000000))
        step = step * 0.5
    return rounded, step, stored, known


@triton.jit
def _index(rounded, known):
    """int32 codes of float32 e2m1 values; 0 in blocks that are not known."""
    bits = float_bits(rounded)
    index = float_bits(bits_float(bits & 0x7FFFFFFF) * (1.0 / E2M1_UNIT)) >> 22
    return (index | ((bits >> 28) & 8)) & tl.where(known, 15, 0)


@triton.jit
def _operands(
    x_ptr, state_ptr, row_partial_ptr, rows_ptr, row_codes_ptr, row_scale_ptr, row_outer_ptr, row_alpha_ptr,
    column_partial_ptr, columns_ptr, column_codes_ptr, column_scale_ptr, column_outer_ptr, column_alpha_ptr,
    m, n, m_padded, n_padded, row_side, column_side,
    ROW_KIND: tl.constexpr, ROW_ELEMENT: tl.constexpr, ROW_RULE: tl.constexpr, ROW_MAX_POW2: tl.constexpr,
    ROW_RECIPROCAL: tl.constexpr, ROW_MANTISSA: tl.constexpr, ROW_LIMIT: tl.constexpr, B: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_ELEMENT: tl.constexpr, COLUMN_RULE: tl.constexpr, COLUMN_MAX_POW2: tl.constexpr,
    COLUMN_RECIPROCAL: tl.constexpr, COLUMN_MANTISSA: tl.constexpr, COLUMN_LIMIT: tl.constexpr, SIGNS: tl.constexpr,
    LARGEST: tl.constexpr, POST: tl.constexpr, PTS_RECIPROCAL: tl.constexpr, SMALLEST_PTS: tl.constexpr,
    LEAST: tl.constexpr, N_PARTIALS: tl.constexpr, TALL: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    PLACE: tl.constexpr,
):  # fmt: skip
    """x (m, n) -> rows (m, n_padded) and columns (m_padded, n), zero behind x; codes and scales of x, and of x^T (n,
    m_padded). KIND "": not that side. SIGNS: of the columns' transform, or None. *_side: of `Random`, where KIND is
    "drawn".
    """
    row_outer, row_follows = _whole(
        row_partial_ptr, row_outer_ptr, row_alpha_ptr, ROW_KIND, LARGEST, POST, PTS_RECIPROCAL, SMALLEST_PTS, N_PARTIALS
    )
    column_outer, column_follows = _whole(
        column_partial_ptr, column_outer_ptr, column_alpha_ptr, COLUMN_KIND, LARGEST, POST, PTS_RECIPROCAL,
        SMALLEST_PTS, N_PARTIALS,
    )  # fmt: skip
    row_key = philox_key(state_ptr, row_side) if ROW_KIND == "drawn" else None
    column_key = philox_key(state_ptr, column_side) if COLUMN_KIND == "drawn" else None
    wide = tl.cdiv(n_padded, T)
    strips = wide * tl.cdiv(m_padded, R)
    for i in range(tl.program_id(0), strips, tl.num_programs(0)):
        at = strips - 1 - i  # what a pass before read last is what the cache still holds
        x, row, column = strip(x_ptr, at, m, n, n_padded, PLACE, TALL, T, R)
        down, along = (at // wide).to(PLACE), (at % wide).to(PLACE)
        first = tl.cast(row, PLACE)
        if COLUMN_KIND != "":
            y = x
            if SIGNS is not None:
                y = mixed(x, x_ptr.dtype.element_ty, SIGNS, T)
            drawn = None
            if COLUMN_KIND == "drawn":
                drawn = column_words(column_key, at, m_padded, n_padded, PLACE, TALL, T, R)
            rounded, step, stored, known = _rounded(
                float_bits(y), drawn, column_outer, column_follows, COLUMN_KIND, COLUMN_ELEMENT, COLUMN_RULE,
                COLUMN_MAX_POW2, COLUMN_RECIPROCAL, COLUMN_MANTISSA, COLUMN_LIMIT, LARGEST, LEAST, False,
            )  # fmt: skip
            if columns_ptr is not None:
                value = (rounded.to(tl.float32) * step).to(columns_ptr.dtype.element_ty)
                tl.store(columns_ptr + first * n + column, value, mask=(row < m_padded) & (column < n))
            if column_codes_ptr is not None:
                place = column.to(PLACE) * (m_padded // R) + down
                tl.store(column_scale_ptr + place, stored, mask=column < n)
                if COLUMN_ELEMENT == "e2m1":
                    byte = pack4(_index(rounded, known), T, R).to(tl.uint8)
                    tl.store(column_codes_ptr + place * (R // 2) + tl.arange(0, R // 2)[None, :], byte, mask=column < n)
                else:
                    code = rounded.to(tl.uint8, bitcast=True)
                    tl.store(column_codes_ptr + place * R + tl.arange(0, R)[None, :], code, mask=column < n)
        if ROW_KIND != "":
            if TALL:  # read again, from the cache: held until here, x would spill
                x, row, column = blocks(x_ptr, at, m, n, n_padded, PLACE, B, T, R)
                first = tl.cast(row, PLACE)
            else:
                x = tl.reshape(x, (T // B, B, R))
            drawn = None
            if ROW_KIND == "drawn":
                drawn = row_words(row_key, at, n_padded, PLACE, B, T, R)
            rounded, step, stored, known = _rounded(
                float_bits(x), drawn, row_outer, row_follows, ROW_KIND, ROW_ELEMENT,
                ROW_RULE, ROW_MAX_POW2, ROW_RECIPROCAL, ROW_MANTISSA, ROW_LIMIT, LARGEST, LEAST,
                row_codes_ptr is not None,
            )  # fmt: skip
            if rows_ptr is not None:
                value = (rounded.to(tl.float32) * step).to(rows_ptr.dtype.element_ty)
                if not TALL:
                    value = tl.reshape(value, (T, R))
                tl.store(rows_ptr + first * n_padded + column, value, mask=(row < m) & (column < n_padded))
            if row_codes_ptr is not None:
                block = along * (T // B) + tl.arange(0, T // B)[:, None]
                low_row = down * R + tl.arange(0, R)[None, :]
                there = (low_row < m) & (block < n_padded // B)
                tl.store(row_scale_ptr + low_row * (n_padded // B) + block, tl.reshape(stored, (T // B, R)), mask=there)
                if ROW_ELEMENT == "e2m1":
                    code = tl.reshape(_index(rounded, known), (T // 2, 2, R))
                    low, high = tl.split(tl.permute(code, (0, 2, 1)))
                    byte = along * (T // 2) + tl.arange(0, T // 2)[:, None]
                    there = (low_row < m) & (byte < n_padded // 2)
                    both = (low | (high << 4)).to(tl.uint8)
                    tl.store(row_codes_ptr + low_row * (n_padded // 2) + byte, both, mask=there)
                else:
                    code = tl.where(known, float8_index(rounded, ROW_ELEMENT), 0x7F)
                    code = code.to(tl.uint8)
                    if not TALL:
                        code = tl.reshape(code, (T, R))
                    there = (row < m) & (column < n_padded)
                    tl.store(row_codes_ptr + first * n_padded + column, code, mask=there)


def _kind(operand: Operand | None) -> str:
    """Return how a side is rounded."""
    if operand is None:
        return ""
    return "drawn" if operand.format.draws else "mx" if operand.format.family.startswith("mx") else "te"


def _side(name: str, operand: Operand | None) -> dict[str, Any]:
    """The arguments of one side."""
    format: Any = None if operand is None else operand.format
    kind, element = _kind(operand), "" if format is None else format.element
    rule = format.rule if kind == "mx" else ""
    of = ELEMENTS[element or "e2m1"]
    return {
        f"{name}_KIND": kind, f"{name}_ELEMENT": element, f"{name}_RULE": rule, f"{name}_MAX_POW2": of.max_pow2,
        f"{name}_RECIPROCAL": reciprocal(SR_MAX if kind == "drawn" else of.largest), f"{name}_MANTISSA": of.mantissa,
        f"{name}_LIMIT": of.largest,
    }  # fmt: skip


def _place(m: int, n: int) -> Any:
    """The integer that counts the values of a matrix, and those of strips that reach beyond its edges."""
    return tl.int32 if (m + 32) * (n + 2048) < 1 << 31 else tl.int64


def _block(operand: Operand | None) -> int:
    return 16 if operand is None else operand.format.block or 16


@lru_cache(LAUNCHES)
def _launch(
    rows: Operand | None,
    columns: Operand | None,
    m: int,
    n: int,
    m_padded: int,
    n_padded: int,
    row_side: int,
    column_side: int,
    keep: bool,
) -> Launch:
    high, sides = _block(columns), _side("ROW", rows) | _side("COLUMN", columns)
    drawn = "drawn" in (_kind(rows), _kind(columns))
    tall = keep or drawn or _mask(columns) is not None
    programs, values, options = (
        PROGRAMS,
        FEWER_VALUES if keep else VALUES,
        dict[str, Any](num_warps=1, enable_fp_fusion=False),
    )
    if "e2m1" in (sides["ROW_ELEMENT"], sides["COLUMN_ELEMENT"]):
        warps = DRAWN_WARPS if drawn else E2M1_WARPS
        programs, values = warps * MULTIPROCESSORS, DRAWN_VALUES if drawn else FEWER_VALUES
        options["maxnreg"] = min(65536 // 32 // warps // 8 * 8, 255)
    t = 32 * values // high
    programs = min(triton.cdiv(n_padded, t) * triton.cdiv(m_padded, high), programs)
    return Launch(
        _operands, (programs,), m=m, n=n, m_padded=m_padded, n_padded=n_padded, row_side=row_side, column_side=column_side,
        **sides, B=_block(rows), SIGNS=_mask(columns), LARGEST=FLOAT32_MAX, POST=reciprocal(NVFP4_TOP),
        PTS_RECIPROCAL=reciprocal(SR_MAX * E4M3_MAX), SMALLEST_PTS=8 * PTS_FLOOR, LEAST=E4M3_FLOOR, N_PARTIALS=PARTIALS,
        TALL=t // 32 if tall else 0, T=t, R=high, PLACE=_place(m_padded, n_padded), **options,
    )  # fmt: skip


def _mask(operand: Operand | None) -> int | None:
    """The signs of a side's transform."""
    t = None if operand is None else operand.transform
    return t.signs if isinstance(t, RoundedHadamard) else None


@lru_cache(LAUNCHES)
def _finder(m: int, n: int, signs: int) -> Launch:
    t = 32 * LARGEST_WARPS * 4
    return Launch(
        _largest, (PARTIALS,), m=m, n=n, strips=triton.cdiv(n, t) * triton.cdiv(m, 16), SIGNS=signs, PLACE=_place(m, n), TALL=4, T=t, R=16,
        enable_fp_fusion=False, num_warps=LARGEST_WARPS,
    )  # fmt: skip


def _partials(x_MN: Tensor, rows: bool, columns: bool, mask: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Partial maxima of both sides, where they have outer scales. mask: of the columns' transform."""
    if not columns or mask is None:
        found = absmax_partials(x_MN) if rows or columns else None
        return found if rows else None, found if columns else None
    of_y = torch.empty(PARTIALS, dtype=torch.int32, device=x_MN.device)
    of_x = torch.empty_like(of_y) if rows else None
    _finder(*x_MN.shape, mask)(x_MN, of_x, of_y)
    return of_x, of_y


class _Output(NamedTuple):
    """Where the kernel writes one side, in the order of its arguments."""

    values: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    outer: Tensor | None = None
    alpha: Tensor | None = None

    @classmethod
    def of(
        cls,
        operand: Operand | None,
        x: Tensor,
        values: tuple[int, int] | None,
        dtype: torch.dtype,
        coded: tuple[int, int] | None,
    ) -> _Output:
        """For `operand`: values of this shape in `dtype`, codes and scales of a matrix of that one; None: not those."""
        if operand is None:
            return cls()
        outer, alpha, codes, scale = None, None, None, None
        if _kind(operand) != "mx":
            alpha = torch.empty(1, 1, dtype=torch.float32, device=x.device)
        if coded is not None:
            r, c = coded
            outer = None if alpha is None else torch.empty_like(alpha)
            codes = torch.empty(r, c * operand.bits // 8, dtype=torch.uint8, device=x.device)
            scale = torch.empty(r, c // _block(operand), dtype=torch.uint8, device=x.device)
        made = None if values is None else torch.empty(values, dtype=dtype, device=x.device)
        return cls(made, codes, scale, outer, alpha)

    def encoded(self, operand: Operand, k: int) -> Encoded:
        """The codes of K values a row."""
        f: Any = operand.format
        assert self.codes is not None and self.scale is not None
        codes = self.codes if f.bits == 4 else self.codes.view(FLOAT8[f.element])
        return Encoded(codes, self.scale.view(f.block_scale), None, self.outer, k)


def operands(
    x_MN: Tensor,
    rows: Operand | None,
    columns: Operand | None,
    m_padded: int,
    n_padded: int,
    dtype: torch.dtype,
    row_random: Random | None = None,
    column_random: Random | None = None,
) -> Quantized:
    """The operands in `dtype` of a contiguous x, rounded as `rows` along N, and of x^T, as `columns` along M; None: not
    that one.

    m_padded, n_padded: the lengths of the contracted axes, with zeros. row_random, column_random: where the numbers
        come from, for a side that draws.
    """
    m, n = x_MN.shape
    of_x = _Output.of(rows, x_MN, (m, n_padded), dtype, None)
    of_y = _Output.of(columns, x_MN, (m_padded, n), dtype, None)
    random = row_random or column_random
    state = None if random is None else random.state
    sides = 0 if row_random is None else row_random.side, 0 if column_random is None else column_random.side
    largest_x, largest_y = _partials(x_MN, of_x.alpha is not None, of_y.alpha is not None, _mask(columns))
    launch = _launch(rows, columns, m, n, m_padded, n_padded, *sides, False)
    launch(x_MN, state, largest_x, *of_x, largest_y, *of_y)
    return Quantized(
        None if of_x.values is None else Side(None, of_x.values, of_x.alpha),
        None if of_y.values is None else Side(None, of_y.values.t(), of_y.alpha),
    )


def both_coded(x_MK: Tensor, rows: Operand, columns: Operand, m_padded: int) -> Quantized:
    """Codes and the operand, in x's dtype, of a contiguous x, and codes of x^T, its M padded with zeros."""
    m, k = x_MK.shape
    of_x = _Output.of(rows, x_MK, (m, k), x_MK.dtype, (m, k))
    of_y = _Output.of(columns, x_MK, None, x_MK.dtype, (k, m_padded))
    largest_x, largest_y = _partials(x_MK, of_x.alpha is not None, of_y.alpha is not None, _mask(columns))
    launch = _launch(rows, columns, m, k, m_padded, k, 0, 0, True)
    launch(x_MK, None, largest_x, *of_x, largest_y, *of_y)
    assert of_x.values is not None
    made = Side(of_x.encoded(rows, k), of_x.values, of_x.alpha)
    return Quantized(made, Side(of_y.encoded(columns, m_padded)))
