"""Save for backward what a forward names: autograd knows a flat list of tensors."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant.formats import Encoded, Scales

Layout = tuple[type, list[type], list[int | None]]
_REWRITTEN = (
    "its codes were written between this backward and its forward, by an optimizer's step or masters.refresh(): run every backward "
    "before the step"
)


class Frame(NamedTuple):
    """Hold what backward knows of its forward, beside the saved tensors.

    recipe: its key. needs: which gradients are asked for, as `function.Needs`. layout: of the saved tensors.
    random: not saved, since the calls of a step advance one state, in place.
    codes_of: the layer's name, where w is codes alone. w_columns: whether these have their column side.
    rank, fixed, delayed, parts: as `function.Given`'s.
    """

    recipe: str
    needs: Any
    layout: Layout
    x_shape: torch.Size
    w_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    random: Tensor | None
    rank: int
    fixed: Any
    delayed: Any
    parts: Any
    codes_of: str | None = None
    w_columns: bool = False


def flat(saved: NamedTuple) -> tuple[list[Tensor | None], Layout]:
    """Return (the tensors of a NamedTuple of tensors, `Encoded` and `Scales`; what `restored` needs to rebuild it)."""
    tensors: list[Tensor | None] = []
    kinds, widths = list[type](), list[int | None]()
    for value in saved:
        kinds.append(type(value))
        widths.append(value.k if type(value) is Encoded else None)
        if type(value) is Encoded:
            tensors += value[:4]
        elif type(value) is Scales:
            tensors += value
        else:
            tensors.append(value)
    return tensors, (type(saved), kinds, widths)


def restored(given: Any, layout: Layout) -> Any:
    """Return the NamedTuple that `flat` was given. given: its tensors."""
    tensors, values = iter(given), list[Any]()
    for kind, k in zip(*layout[1:], strict=True):
        if kind is Encoded:
            values.append(Encoded(*islice(tensors, 4), k))  # type: ignore[call-arg]
        elif kind is Scales:
            values.append(Scales(*islice(tensors, 4)))
        else:
            values.append(next(tensors))
    return layout[0](*values)


def saved_tensors(ctx: Any, packed_fqn: str = "") -> Sequence[Tensor | None]:
    """Return what was saved for backward. packed_fqn: the layer's name, where an optimizer's step writes its codes in
    place.
    """
    try:
        tensors: Sequence[Tensor | None] = ctx.saved_tensors
    except RuntimeError as error:
        if not packed_fqn or "inplace" not in str(error):
            raise
        raise ValueError(f"{packed_fqn}: {_REWRITTEN}") from error
    return tensors
