"""`ops.scaled_mm` and its relatives with operands by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aoquant import ops
from aoquant.formats import Encoded, Operand, get_operand


def operand(name: str) -> Operand | None:
    """The operand called `name`; None for ""."""
    return get_operand(name) if name else None


def arguments(
    x: Tensor | Encoded,
    w: Tensor | Encoded,
    bias: Tensor | None,
    x_name: str,
    w_name: str,
    contract: str,
    lead: list[int],
    dtype: torch.dtype,
    values: Tensor | None = None,
    strides: list[int] | None = None,
) -> tuple[Any, ...]:
    """Arguments of `ops.scaled_mm`."""
    return x, w, bias, operand(x_name), get_operand(w_name), contract, lead, dtype, values, strides


def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    """y of `ops.scaled_mm`."""
    return ops.scaled_mm(*arguments(*args, **kwargs)).y


def parts(e: Encoded) -> list[Tensor]:
    """The tensors of an encoded matrix."""
    return [t for t in tree_leaves(tuple(e[:4])) if t is not None]
