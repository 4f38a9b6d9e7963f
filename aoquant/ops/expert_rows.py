"""Few rows of each expert times packed 4-bit experts, codes multiplied as they lie: one launch over all that are hit.

On Hopper csrc does it (csrc/decode_experts.cuh): a row's sums depend on that row, its expert, N and K alone. Elsewhere,
and for an aoquant without its CUDA library, Triton does (triton/grouped_rows.py).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format

from . import native
from .gemm import few_rows
from .router import Request


def multiply(format: Format, w: Encoded, x_SK: Tensor, ends: Tensor, alpha_x: Tensor | None) -> Tensor:
    """y (S, N) in x's dtype, bfloat16. w: experts' rows under each other, E * N; x_SK: sorted by expert; ends: (E,)
    int32; alpha_x: (S, 1) float32, or None.
    """
    from .triton import grouped_rows, launch

    n, how, alpha_w = w.codes.shape[0] // ends.numel(), few_rows.kind(format), format.alpha(w)
    assert how is not None and w.scale is not None
    alpha_w = None if alpha_w is None else alpha_w.contiguous()
    if _by_csrc(format, w.scale.dtype if how == "int4" else None, n, w.k, x_SK.dtype, x_SK.device):
        codes, scale = few_rows.aligned(w.codes), few_rows.aligned(w.scale)
        zero = None if w.zero is None else few_rows.aligned(w.zero)
        plan = few_rows.plan_of(format, w, x_SK.dtype)
        multiplied = native.operator("experts_mm")
        y: Tensor = multiplied(few_rows.aligned(x_SK), ends.contiguous(), codes, scale, zero, alpha_x, alpha_w, plan)
        return y
    with launch.on(x_SK):
        programs = 2 * torch.cuda.get_device_properties(x_SK.device).multi_processor_count
        return grouped_rows.decode_mm(format, how, few_rows.shifts(format), w, x_SK, ends, alpha_x, alpha_w, programs)


@cache
def _by_csrc(
    format: Format, scales: torch.dtype | None, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """scales: int4's."""
    return few_rows.multiplies_experts(Request("aoquant", None, format, device, dtype, 1, n, k, scales))
