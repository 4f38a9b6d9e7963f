"""Rows of x, sorted by expert, times packed 4-bit experts, codes multiplied as they lie: one launch over all that are
hit.

On Hopper csrc does it. For few rows of each expert (csrc/decode_experts.cuh) a row's sums depend on that row, its
expert, N and K alone. For many (csrc/expert_tiles.cuh, csrc/expert_wide.cuh) they are those of
`triton/grouped_kernels.py` over W's values, to the bit, so a prepared layer, whose values are made anyway, may multiply
by that. Elsewhere, and for an aoquant without its CUDA library, Triton multiplies few rows (triton/grouped_rows.py),
and many meet values that are made 64 MB at a time.
"""

from functools import cache

import torch
from torch import Tensor

from aoquant.formats import Encoded, Format

from . import native
from .gemm import few_rows
from .router import Request


def multiply(format: Format, w: Encoded, x_SK: Tensor, ends: Tensor, alpha_x: Tensor | None) -> Tensor:
    """y (S, N) in x's dtype, bfloat16, of few rows of each expert. w: experts' rows under each other, E * N; x_SK:
    sorted by expert; ends: (E,) int32; alpha_x: (S, 1) float32, or None.
    """
    if takes(format, w, x_SK, ends):
        return by_csrc(format, w, x_SK, ends, alpha_x, many=False)
    from .triton import grouped_rows, launch

    with launch.on(x_SK):
        programs, how = 2 * launch.multiprocessors(x_SK.device), few_rows.KINDS[type(format)]
        return grouped_rows.decode_mm(format, how, w, x_SK, ends, alpha_x, format.alpha(w), programs)


def by_csrc(format: Format, w: Encoded, x_SK: Tensor, ends: Tensor, alpha_x: Tensor | None, *, many: bool) -> Tensor:
    """`multiply`, where csrc takes it, for few or many rows of each expert."""
    alpha_w = format.alpha(w)
    return native.operator("experts_mm")(
        native.aligned(x_SK),
        ends.contiguous(),
        native.aligned(w.codes),
        native.aligned(w.scales),
        None if w.zero is None else native.aligned(w.zero),
        alpha_x,
        None if alpha_w is None else alpha_w.contiguous(),
        few_rows.plan_of(format, w, x_SK.dtype),
        many,
    )


def takes(format: Format, w: Encoded, x_SK: Tensor, ends: Tensor) -> bool:
    """Return whether csrc multiplies these experts here."""
    scales = w.scales.dtype if few_rows.kind(format) == "int4" else None
    return _takes(format, scales, w.codes.shape[0] // ends.numel(), w.k, x_SK.dtype, x_SK.device)


@cache
def _takes(
    format: Format, scales: torch.dtype | None, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """scales: int4's."""
    return few_rows.decodes(Request("aoquant", None, format, device, dtype, 1, n, k, scales))
