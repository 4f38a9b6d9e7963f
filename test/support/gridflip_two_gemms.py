"""GridFlip on FP4 tensor cores: an exact identity that leaves them plain NVFP4 operands.

A tensor core takes e2m1 codes and unsigned scales, and knows no second grid. A flagged block (s~ < 0) decodes q to
-(q + c) |s|, so with the codes' signs turned there and the scales' taken off, the shift is all that is missing, and it
is the same for a whole block:

    X W^T = t * (X plain^T + Xbar C^T)      C = -c |s| in flagged blocks, else 0; Xbar[m, b] = the sum of X over block b

The first product is what the tensor core computes, the second has K / 16 columns and runs beside it: C is exact in bf16
when c is a power of two, Xbar must not be rounded to FP4. `GridFlip.split` makes both parts. No operand is rounded on
the way, where a bf16 operand of GridFlip rounds its largest codes under some scales (see `formats/gridflip.py`), so
this sums what `decode` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aoquant.formats import GridFlip
from aoquant.ops.call import Call
from aoquant.ops.gemm.reference import rescaled


def accumulate(c: Call) -> Tensor:
    """(M, N) float32 accumulators of a GEMM with GridFlip weights."""
    assert isinstance(c.w_format, GridFlip)
    plain, shift_NG = c.w_format.split(c.w)
    x_MK = c.x_matrix(torch.float32)
    xbar_MG = x_MK.unflatten(1, (-1, c.w_format.block)).sum(-1)
    return x_MK @ c.w_format.plain.operand(plain, torch.float32).t() + xbar_MG @ shift_NG.t()


def scaled_mm(c: Call) -> Tensor:
    """y (*lead, N) under the contract "aoquant"."""
    assert c.contract == "aoquant"
    return c.shaped(rescaled(accumulate(c), c.alpha_x, c.alpha_w, c.bias, c.dtype))
