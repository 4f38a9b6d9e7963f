"""Check that the parts of a packed tensor fit its format: a file may say anything of them, and kernels trust them.

A kernel computes addresses from K, N and the format alone, so codes or scales of another shape would be read past their
end. The expected shapes are those that the format plans for a weight of the same size.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from aoquant.formats import FLOAT_DTYPES
from aoquant.linear.recipe import LinearRecipe
from aoquant.ops.repeat import PLAIN


def check_parts(label: str, packed: Any, recipe: LinearRecipe) -> None:
    """Raise ValueError unless codes, scales, zeros and the fitted transform of a packed tensor fit its format, K and N.

    label: what the message calls the tensor. packed: with E in front of each part, for stacked experts.
    """
    codes, k, dtype = packed.qdata, packed.k, packed.dtype
    if isinstance(codes, Tensor) and type(codes) not in PLAIN:
        return  # of a compiler's trace, or a DTensor: made of a tensor that was checked
    if not isinstance(codes, Tensor) or codes.dim() != packed.dim() or dtype not in FLOAT_DTYPES:
        raise ValueError(f"{label}: codes are a tensor (N, bytes) and dtype a float one, got {codes!r:.80}, {dtype}")
    if type(k) is not int or k < 1:
        raise ValueError(f"{label}: K must be a whole number above 0, got {k!r:.80}")
    *lead, n, _ = codes.shape
    found = {name: getattr(packed, name) for name in ("qdata", "scale", "zero_point", "per_tensor_scale")}
    for (name, part), wanted in zip(found.items(), _planned(recipe, n, k, dtype), strict=True):
        if (part is None) != (wanted is None) or not (part is None or isinstance(part, Tensor)):
            raise ValueError(f"{label}: {name} is {'missing' if part is None else 'not a part of its format'}")
        if part is None or wanted is None:
            continue
        rows, columns = wanted.shape
        # a scale of the whole tensor may be stored for each row, and one for each row as the one of the tensor
        many = {rows} if name == "qdata" or columns > 1 or rows not in (1, n) else {1, n}
        if (*part.shape[:-2],) != (*lead,) or part.dim() < 2 or part.shape[-1] != columns or part.shape[-2] not in many:
            raise ValueError(
                f"{label}: {name} is {tuple(part.shape)}, and N = {n}, K = {k} need {(*lead, *wanted.shape)}"
            )
        if part.dtype != wanted.dtype and not {part.dtype, wanted.dtype} <= {*FLOAT_DTYPES}:
            raise ValueError(f"{label}: {name} is {part.dtype}, and its format stores {wanted.dtype}")
    _check_matrix(label, packed.act_pre_scale, recipe, k)


def _check_matrix(label: str, matrix: Any, recipe: LinearRecipe, k: int) -> None:
    """Raise ValueError unless there are (K / size, size, size) matrices just where the transform is fitted."""
    size = recipe.transform.size if recipe.transform is not None and recipe.transform.fitted else 0
    wanted = (k // size, size, size) if size else None
    got = tuple(matrix.shape) if isinstance(matrix, Tensor) else matrix
    if got != wanted:
        raise ValueError(f"{label}: act_pre_scale is {got}, and K = {k} needs {wanted}")


@cache
def _planned(recipe: LinearRecipe, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """The parts of a weight (N, K), as `Encoded` has them, without values."""
    operand = recipe.fprop_weight
    if reason := operand.why_not(k, dtype):
        raise ValueError(reason)
    return operand.planned(torch.empty(n, k, dtype=dtype, device="meta")).by_row.tensors
