"""The tensors that forward keeps for backward, by name.

`save_for_backward` knows a flat list of tensors. Here a value's parts go into that list and come back as the value, so
that a field is never found by its position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from aoquant.formats import Encoded, Scales


class Saved(NamedTuple):
    """What forward keeps for backward; a field is None where no gradient needs it.

    x: the input, encoded (M, K) or along its columns (K, M padded), or as it came (*lead, K).
    w: the weight, or its codes.
    x_held, w_held: scales and transforms that the layer holds.
    measured: what forward measured of W (`ops.linear.Product`).
    clipped: a bit for each value of x, 1 where it gets no gradient.
    amax: (2,), of x and W, where scales are delayed.
    """

    x: Tensor | Encoded | None = None
    w: Tensor | Encoded | None = None
    x_held: Scales | None = None
    w_held: Scales | None = None
    measured: Tensor | None = None
    clipped: Tensor | None = None
    amax: Tensor | None = None


def keep(ctx: Any, saved: Saved) -> None:
    """Hand `saved` to autograd."""
    tensors: list[Tensor | None] = []
    kinds, widths = list[type](), list[int | None]()
    for value in saved:
        kinds.append(type(value))
        widths.append(value.k if type(value) is Encoded else None)
        if type(value) is Encoded:
            tensors += value.tensors
        elif type(value) is Scales:
            tensors += value
        else:
            tensors.append(value)  # type: ignore[arg-type]
    ctx.kinds, ctx.widths = kinds, widths
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> Saved:
    """The `Saved` that `keep` was given."""
    tensors, values = iter(ctx.saved_tensors), list[Any]()
    for kind, k in zip(ctx.kinds, ctx.widths, strict=True):
        if kind is Encoded:
            values.append(Encoded(next(tensors), next(tensors), next(tensors), next(tensors), k))
        elif kind is Scales:
            values.append(Scales(next(tensors), next(tensors), next(tensors), next(tensors)))
        else:
            values.append(next(tensors))
    return Saved(*values)
