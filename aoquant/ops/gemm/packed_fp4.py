"""GEMMs of two packed FP4 matrices: which formats can be multiplied code by code, and our own kernel for them.

Any two FP4 formats can, whatever their scale rules and dialects: codes are e2m1, block scales are e8m0 of 32 values or
e4m3 of 16, and all other factors are the format's `alpha`. GridFlip's signed scales and tiles of 16 rows have other
layouts, and cannot.
"""

from torch import Tensor

from aoquant.formats import Encoded, Format

from .. import codec
from ..call import Call
from ..router import Backend, Request


def why_not_packed(f: Format | None) -> str | None:
    """Return why a format's codes and scales are no FP4 operand; None when they are."""
    if f is not None and f.family in ("mxfp4", "nvfp4") and f.tile_rows == 1 and f.name != "mxfp4-sr":
        return None
    return f"multiplies packed FP4 with a scale per row and block, got {f.name if f else 'high precision'}"


def parts(e: Encoded) -> tuple[Tensor, Tensor]:
    """Codes and block scales."""
    return e.codes, e.scales


def _why_not(r: Request) -> str | None:
    if r.contract != "aoquant":
        return f"computes aoquant, not {r.contract}"
    if reason := why_not_packed(r.x_format) or why_not_packed(r.w_format):
        return reason
    return codec.lacks_triton(r.device)


def _run(c: Call) -> Tensor:
    from ..triton import launch, packed_fp4_kernels

    with launch.on(c.x.codes):
        y_MN = packed_fp4_kernels.multiply(parts(c.x), parts(c.w), c.k, c.alpha_x, c.alpha_w, c.bias, c.dtype)
    return c.shaped(y_MN)


# below "tensor-cores", which is faster wherever a bf16 operand of the weight has room
BACKENDS = (Backend("triton", 4, _why_not, _run, reads_codes=True),)
