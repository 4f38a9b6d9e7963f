"""Rows of stacked experts: one for each parameter that is prepared or packed in either model.

Weights are compared parameter by parameter, over all experts. The output is the module's: both parameters take part in
it, so their rows share it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from aoquant.layers.experts import QATExperts, is_transposed, stacks_of
from aoquant.layers.packed_experts import PackedExperts
from aoquant.layers.recipe import LinearRecipe
from aoquant.planning.sizes import stored_bytes
from aoquant.report.compare import Pair
from aoquant.report.measure import planned_bytes, sqnr
from aoquant.report.rows import Row


def experts_rows(pair: Pair) -> list[tuple[Any, Row]]:
    """(the parameter in model b, its row) for every stacked parameter that is quantised in a or b."""
    rows = []
    for name in stacks_of(pair.b):
        recipes = dict.fromkeys(r for m in (pair.a, pair.b) if (r := recipe_of_stack(m, name)) is not None)
        if recipes:
            rows.append((getattr(pair.b, name), _row(pair, name, list(recipes))))
    return rows


def recipe_of_stack(module: nn.Module, name: str) -> LinearRecipe | None:
    """The recipe of a stacked parameter; None for a float one."""
    if isinstance(module, QATExperts) and name in module.stacks:
        return module.stacks[name].recipe
    weight = getattr(module, name).data
    return weight.recipe if isinstance(weight, PackedExperts) else None


def values_of_stack(module: nn.Module, name: str) -> Tensor:
    """The values that the experts of a parameter multiply by, in its shape."""
    weight = getattr(module, name).detach()
    if isinstance(weight, PackedExperts):
        return weight.dequantize()
    if isinstance(module, QATExperts) and name in module.stacks and module.fake_quant:
        return module.quantised_weight(name)
    return weight


def _row(pair: Pair, name: str, recipes: list[LinearRecipe]) -> Row:
    weight = getattr(pair.b, name).detach()
    problems = [f"not run: {pair.problem}"] if pair.problem else [pair.uneven] if pair.uneven else []
    values = values_of_stack(pair.b, name)
    decibels = sqnr(values_of_stack(pair.a, name), values)
    prepared = next((m for m in (pair.a, pair.b) if isinstance(m, QATExperts) and name in m.stacks), None)
    if any(v is not None and math.isnan(v) for v in (decibels, pair.output_sqnr)):
        problems.append("NaN or Inf")
    if isinstance(weight, PackedExperts):
        size = stored_bytes(weight)
    else:
        one = weight[0].t() if is_transposed(pair.b) else weight[0]
        size = len(weight) * planned_bytes(recipes[-1].fprop_weight, one)
    return Row(
        fqn=f"{pair.fqn}.{name}" if pair.fqn else name,
        shape=tuple(weight.shape),
        format=" → ".join(dict.fromkeys(r.fprop_weight.narrow.name for r in recipes)),
        activation=" → ".join(dict.fromkeys(r.input_name for r in recipes)),
        batch_invariant=all(r.batch_invariant for r in recipes),
        bits_per_weight=8 * size / weight.numel(),
        weight_sqnr_db=decibels,
        output_sqnr_db=pair.output_sqnr,
        backend=pair.backend,
        saturated_share=None,
        floored_share=None,
        bytes=size,
        warning="; ".join(problems),
        calls=(pair.calls[0], pair.calls[1]),
        quantisation_db=None if prepared is None else sqnr(getattr(prepared, name).detach(), values),
    )
