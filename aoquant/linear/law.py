"""The law of backward: which two operands may meet in one of its GEMMs, and which casts a `HybridConfig` may ask for.

    dgrad  dx = dy W       grad_output, weight       both along N
    wgrad  dW = dy^T x     grad_output, input        both along the rows of the batch

Both operands stay in high precision, or have one format, or two formats of one family:

    FP8 per tensor    FP8 in blocks of 128    MXFP8    MXFP4    NVFP4 of any dialect

Within a family they may differ in e4m3 and e5m2, in one-dimensional and square tiles, and in the gradient's stochastic
rounding: TransformerEngine's own recipes do. A transform in front of them has to cancel in the product: the same
matrix, with the same signs, on both sides, and its own inverse transposed.

`contract` names the kernel of such a GEMM. FP8 tensor cores multiply codes under one scale a side, but not e5m2 by
e5m2. Their sums keep fewer bits than float32, so they run under a contract of their own. It promotes accumulators, as
TransformerEngine and torchao do in backward. Every other pair is emulated exactly.

`why_not` binds every recipe. `why_not_cast` binds configs that name each cast; presets such as "quartet" draw on both
sides.

`dgrad` and `wgrad` say what each GEMM reads, and so what forward keeps: a recipe's `save` becomes the `keeps` of both
(`ops.BackwardGemm`).

    save     source      keeps, of the weight    keeps, of the input
    "row"    forward     "values"                "rows"
    "col"    forward     "rows"                  "rows", or "columns" if they are smaller
             original    "values"                "columns", or "values" if wgrad is in high precision
    "hp"     either      "values"                "values"

A forward in high precision counts as the original. With "col" a side whose codes are forward's, transposed, is "square"
from either source; an input from "forward" keeps "rows" if wgrad is in high precision or draws a rotation; and a weight
whose clipped values are masked keeps "values".
"""

from aoquant.formats import Operand
from aoquant.formats.operand import DELAYED
from aoquant.ops import BackwardGemm

SOURCES = ("original", "forward")
SAVES = ("row", "col", "hp")
OTHER = {"dgrad": "weight", "wgrad": "input"}  # the operand that is no gradient
FAMILIES = "FP8 per tensor, FP8 in blocks of 128, MXFP8, MXFP4, NVFP4"


def why_not(gemm: str, first: Operand | None, second: Operand | None) -> str | None:
    """Return why the two cannot be the operands of `gemm`, "dgrad" or "wgrad"; None when they can. first: of the
    gradient.
    """
    for operand in (first, second):
        t = operand.transform if operand is not None else None
        if t is not None and (t.sided or t.fitted):
            assert operand is not None
            return f"{t} does not cancel in {gemm}'s product: use rht{t.size}+{operand.format.name}"
    got = got_of(gemm, first, second)
    if (first and first.transform) != (second and second.transform):
        return f"the two operands of {gemm} have one transform with the same signs, or none, {got}"
    if _family(first) != _family(second):
        return (
            f"the two operands of {gemm} have one format, or both stay in high precision, or are of one family "
            f"({FAMILIES}), {got}"
        )
    return None


def got_of(gemm: str, first: Operand | None, second: Operand | None) -> str:
    """Both operands of `gemm` by name, for errors."""
    return f"got grad_output {_name(first)} and {OTHER[gemm]} {_name(second)}"


def contract(first: Operand | None, second: Operand | None) -> str:
    """The contract of a backward GEMM of these operands, one of `ops.CONTRACTS`."""
    formats = [o.format for o in (first, second) if o is not None and o.transform is None]
    elements = [f.element for f in formats if f.family == "fp8 per tensor"]
    multiplied = len(elements) == 2 and elements != ["e5m2", "e5m2"]
    return "fp8_scaled_mm_precise" if multiplied else "aoquant"


def why_not_cast(gemm: str, which: str, cast: Operand | None, source: str) -> str | None:
    """Return why the operand `which` of a backward GEMM cannot be made as `cast` from `source`; None when it can."""
    where = f"{gemm}: {which} {_name(cast)}"
    if source not in SOURCES:
        return f"{where}: the source is one of {', '.join(SOURCES)}, got {source!r}"
    if which == "grad_output":
        return None if source == "original" else f'{where}: a gradient has no forward value: use source="original"'
    if cast is None:
        return None
    if cast.format.draws:
        return f"{where} rounds at random, which is for gradients: use a format that rounds to nearest"
    if cast.draws and source == "original":
        return (
            f'{where}: a rotation that is drawn in backward needs source="forward", since an original is encoded in forward; or a '
            "transform with fixed signs"
        )
    return None


def _name(operand: Operand | None) -> str:
    return operand.name if operand else "high precision"


def _family(operand: Operand | None) -> str | None:
    """The family of an operand: a GEMM's two operands must share it."""
    return None if operand is None else operand.format.family


def dgrad(
    save: str, source: str, forward: Operand, grad: Operand | None, weight: Operand | None, reads_values: bool
) -> BackwardGemm:
    """Return what dgrad reads, and so what forward keeps of the weight. reads_values: backward masks clipped values,
    and reads the weight itself.
    """
    same = _same_codes(forward, weight)
    original = source == "original" or same or forward.format.lossless
    gemm = grad, weight, contract(grad, weight)
    if save == "col" and not reads_values:
        if same:
            return BackwardGemm(*gemm, None, "square")
        if not original:
            return BackwardGemm(*gemm, forward, "rows")
    return BackwardGemm(*gemm, None if original and save != "row" else forward, "values")


def wgrad(save: str, source: str, forward: Operand | None, grad: Operand | None, x: Operand | None) -> BackwardGemm:
    """Return what wgrad reads, and so what forward keeps of the input."""
    gemm = grad, x, contract(grad, x)
    if save == "row":
        return BackwardGemm(*gemm, forward, "rows")
    same = _same_codes(forward, x)
    if source == "original" or same or forward is None or forward.format.lossless:
        if save == "hp" or x is None or x.draws:
            return BackwardGemm(*gemm, None, "values")
        return BackwardGemm(*gemm, None, "square" if same else "columns")
    if save == "hp":
        return BackwardGemm(*gemm, forward, "values")
    smaller = x is not None and not x.draws and x.bits_per_weight(512, 512) < forward.bits_per_weight(512, 512)
    return BackwardGemm(*gemm, forward, "columns" if smaller else "rows")


def _same_codes(forward: Operand | None, backward: Operand | None) -> bool:
    """Return whether backward's codes are forward's, transposed: both of scales that are found, or delayed."""
    if forward is None or backward is None or forward.scales not in ("dynamic", DELAYED):
        return False
    return forward.shares_codes(backward)
