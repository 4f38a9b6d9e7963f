"""What torch.utils.flop_counter.FlopCounterMode counts of this package's GEMMs: 2 M N K of each, as of aten's.

The mode copies PyTorch's registry when it is made, so the formulas have to be there before: the first quantised layer
registers them. Importing aoquant does not, because it would import the counter.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import grouped
from .backward import gradients
from .product import matmul

Shapes = Sequence[Sequence[int]]  # of the tensors that an op is given, dy or x first


def _forward(given: Shapes, numbers: Sequence[int], words: str, out_shape: Any) -> int:
    """y (..., N) of x (..., K), whose packed codes say K beside them; `matmul` has further results."""
    y = out_shape if isinstance(out_shape[0], int) else out_shape[0]
    return 2 * math.prod(y) * (numbers[0] if words.startswith("(Encoded|") else given[0][-1])


def _dgrad(given: Shapes, *rest: Any, out_shape: Sequence[int]) -> int:
    """dx (M, K) of dy (M, N)."""
    return 2 * math.prod(out_shape) * given[0][1]


def _wgrad(given: Shapes, *rest: Any, out_shape: Sequence[int]) -> int:
    """dW (N, K), or (E, N, K) of which a row of dy meets one expert's, of dy (M, N)."""
    return 2 * math.prod(out_shape[-2:]) * given[0][0]


def _gradients(given: Shapes, *rest: Any, out_shape: Sequence[Sequence[int] | None]) -> int:
    """dx (M, K) and dW (N, K), or one of them."""
    shapes = zip((_dgrad, _wgrad), out_shape, strict=True)
    return sum(formula(given, out_shape=shape) for formula, shape in shapes if shape is not None)


_FORMULAS: dict[Callable[..., int], tuple[Any, ...]] = {
    _forward: (matmul, grouped.grouped_mm),
    _dgrad: (grouped.grouped_dgrad,),
    _wgrad: (grouped.grouped_wgrad,),
    _gradients: (gradients,),
}  # that are not registered yet: each goes once
_registering = threading.Lock()


def register() -> None:
    """Have modes that are made from now on count these GEMMs."""
    from torch.utils.flop_counter import register_flop_formula

    with _registering:
        while _FORMULAS:
            formula, ops = _FORMULAS.popitem()
            register_flop_formula([op.overload.overloadpacket for op in ops])(formula)
