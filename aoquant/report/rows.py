"""Rows: everything that a report says about one layer.

The shares say how often the format had to give in: values that its largest code clips, and blocks whose scale sits on
the smallest value that it can take. Both are small in a healthy model. One value a block is allowed to clip without a
warning: symmetric integers choose their scale from a group's absmax and then, half of the time, clip exactly that
value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from aoquant.formats import Operand
from aoquant.layers.kinds import is_packed, matrix_of
from aoquant.layers.qat import QATLayer
from aoquant.ops.tiles import HEALTHY
from aoquant.planning.sizes import stored_bytes
from aoquant.report.compare import Pair, why
from aoquant.report.measure import (
    planned_bytes,
    recipe_of,
    shares,
    sqnr,
    weight_value,
)
from aoquant.tensor import PackedTensor


@dataclass(frozen=True)
class Row:
    """One layer of two models, a → b. None: not measured, see warning.

    shape: (N, K). format, activation: names, or the class of a torchao tensor; "" is high precision. bits_per_weight,
    bytes: of the quantised weight as it is stored, or as convert will store it. *_sqnr_db: of b against a. backend:
    what ran the GEMMs. batch_invariant: whether a token's codes are the same in any batch; None for torchao's tensors.
    saturated_share: of the weight's values. floored_share: of its blocks. calls: of the layer's forward in a and in b,
    each running by itself. *_gradient_sqnr_db: of a prepared layer's dx and dW against float's. quantisation_db: SQNR
    of b's weight against the float weight that a prepared side holds.
    """

    fqn: str
    shape: tuple[int, ...]
    format: str
    activation: str
    batch_invariant: bool | None
    bits_per_weight: float | None
    weight_sqnr_db: float | None
    output_sqnr_db: float | None
    backend: str
    saturated_share: float | None
    floored_share: float | None
    bytes: int | None
    warning: str
    calls: tuple[int, int] = (0, 0)
    input_gradient_sqnr_db: float | None = None
    weight_gradient_sqnr_db: float | None = None
    quantisation_db: float | None = None


def row_of(pair: Pair) -> Row:
    """The finished row of a pair."""
    sides = (pair.a, pair.b)
    weights: list[Any] = [matrix_of(m).detach() for m in sides]
    n, k = weights[0].shape
    recipes = dict.fromkeys(r for r in map(recipe_of, sides) if r is not None)
    packed = next((w for w in reversed(weights) if is_packed(w)), None)
    qat = next((m for m in sides if isinstance(m, QATLayer)), None)
    hp = next((w for w in weights if not is_packed(w)), None) if qat is None else qat.matrix().detach()
    names = [r.fprop_weight.narrow.name for r in recipes] or [type(w).__name__ for w in weights if is_packed(w)]

    problems = [f"not run: {pair.problem}"] if pair.problem else [pair.uneven] if pair.uneven else []
    weight_db = saturated = floored = quantisation_db = None
    try:
        a, b = map(weight_value, sides)
        weight_db = sqnr(a, b)
        quantisation_db = None if qat is None or hp is None else sqnr(hp, b)
    except Exception as error:
        problems.append(f"weights not compared: {why(error)}")
    if recipes:
        format = next(reversed(recipes)).fprop_weight
        held = None if qat is None else qat.held_scales("weight")
        saturated, floored = shares(format, hp, packed.encoded if isinstance(packed, PackedTensor) else None, held)
        problems += _unhealthy(format, k, saturated, floored)
    for side, module in zip("ab", sides, strict=True):
        if isinstance(module, QATLayer) and not module.fake_quant:
            problems.append(f"fake quantisation is off in model_{side}")
    if any(v is not None and math.isnan(v) for v in (weight_db, pair.output_sqnr)):
        problems.append("NaN or Inf")

    size = planned_bytes(format, weights[0]) if packed is None else stored_bytes(packed)
    return Row(
        pair.fqn,
        (n, k),
        " → ".join(dict.fromkeys(names)),
        "" if isinstance(pair.b, nn.Embedding) else " → ".join(dict.fromkeys(r.input_name for r in recipes)),
        all(r.batch_invariant for r in recipes) if recipes else None,
        8 * size / (n * k),
        weight_db,
        pair.output_sqnr,
        pair.backend,
        saturated,
        floored,
        size,
        "; ".join(problems),
        (pair.calls[0], pair.calls[1]),
        quantisation_db=quantisation_db,
    )


def _unhealthy(operand: Operand, k: int, saturated: float | None, floored: float | None) -> list[str]:
    problems = []
    if saturated is not None and saturated > HEALTHY + 1 / (operand.format.block or k):
        problems.append(f"{saturated:.1%} of the values saturate")
    if floored is not None and floored > HEALTHY:
        problems.append(f"{floored:.1%} of the blocks have the smallest scale there is")
    return problems
