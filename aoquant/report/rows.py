"""Rows of a report: one for a layer, and one for each parameter of stacked experts that is prepared or packed.

The experts' rows share the output of their module, as all of its parameters take part in it.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aoquant.experts.families import is_transposed, stacks_of
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts
from aoquant.formats import Operand
from aoquant.formats.tiles import HEALTHY
from aoquant.linear.kinds import is_packed, matrix_of
from aoquant.linear.prepared import QATLayer
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.sizes import stored_bytes
from aoquant.report.compare import Pair, why
from aoquant.report.measure import planned_bytes, recipe_of, shares, sqnr, weight_of, weight_value


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
    shape: tuple[int, ...] = ()
    format: str = ""
    activation: str = ""
    batch_invariant: bool | None = None
    bits_per_weight: float | None = None
    weight_sqnr_db: float | None = None
    output_sqnr_db: float | None = None
    backend: str = ""
    saturated_share: float | None = None
    floored_share: float | None = None
    bytes: int | None = None
    warning: str = ""
    calls: tuple[int, int] = (0, 0)
    input_gradient_sqnr_db: float | None = None
    weight_gradient_sqnr_db: float | None = None
    quantisation_db: float | None = None


def rows_of(pair: Pair) -> list[tuple[Any, Row]]:
    """Return (weight in model b, its row) for a layer, or for every stacked parameter that is quantised in a or b."""
    stacks = stacks_of(pair.b)
    if not stacks:
        return [(weight_of(pair.b), _row_of_layer(pair))]
    recipes = {name: [r for m in (pair.a, pair.b) if (r := _recipe_of_stack(m, name)) is not None] for name in stacks}
    return [(getattr(pair.b, name), _row_of_stack(pair, name, recipes[name])) for name in stacks if recipes[name]]


def _row(pair: Pair, fqn: str, shape: tuple[int, ...], recipes: list[LinearRecipe], size: int, **found: Any) -> Row:
    """Return a row with what layers and stacks have in common. found: further fields."""
    weight_db, problems = found["weight_sqnr_db"], found.pop("problems")
    if any(v is not None and math.isnan(v) for v in (weight_db, pair.output_sqnr)):
        problems.append("NaN or Inf")
    first = f"not run: {pair.problem}" if pair.problem else pair.uneven
    common: dict[str, Any] = {
        "format": " → ".join(dict.fromkeys(r.fprop_weight.narrow.name for r in recipes)),
        "activation": " → ".join(dict.fromkeys(r.input_name for r in recipes)),
        "batch_invariant": all(r.batch_invariant for r in recipes) if recipes else None,
        "bits_per_weight": 8 * size / math.prod(shape),
        "output_sqnr_db": pair.output_sqnr,
        "backend": pair.backend,
        "bytes": size,
        "warning": "; ".join(filter(None, (first, *problems))),
        "calls": (pair.calls[0], pair.calls[1]),
    }
    return Row(fqn, shape, **common | found)


def _row_of_layer(pair: Pair) -> Row:
    sides = (pair.a, pair.b)
    weights: list[Any] = [matrix_of(m).detach() for m in sides]
    recipes = [r for r in map(recipe_of, sides) if r is not None]
    packed = next((w for w in reversed(weights) if is_packed(w)), None)
    qat = next((m for m in sides if isinstance(m, QATLayer)), None)
    hp = next((w for w in weights if not is_packed(w)), None) if qat is None else qat.matrix().detach()
    found: dict[str, Any] = {"weight_sqnr_db": None}
    problems: list[str] = []
    try:
        a, b = map(weight_value, sides)
        found["weight_sqnr_db"] = sqnr(a, b)
        found["quantisation_db"] = None if qat is None or hp is None else sqnr(hp, b)
    except Exception as error:
        problems.append(f"weights not compared: {why(error)}")
    if recipes:
        format = recipes[-1].fprop_weight
        held = None if qat is None else qat.held_scales("weight")
        codes = packed.encoded if isinstance(packed, PackedTensor) else None
        saturated, floored = shares(format, hp, codes, held)
        found |= {"saturated_share": saturated, "floored_share": floored}
        problems += _unhealthy(format, weights[0].shape[1], saturated, floored)
    else:
        found["format"] = " → ".join(dict.fromkeys(type(w).__name__ for w in weights if is_packed(w)))
    for side, module in zip("ab", sides, strict=True):
        if isinstance(module, QATLayer) and not module.fake_quant:
            problems.append(f"fake quantisation is off in model_{side}")
    if isinstance(pair.b, nn.Embedding):
        found["activation"] = ""
    size = planned_bytes(format, weights[0]) if packed is None else stored_bytes(packed)
    return _row(pair, pair.fqn, tuple(weights[0].shape), recipes, size, problems=problems, **found)


def _row_of_stack(pair: Pair, name: str, recipes: list[LinearRecipe]) -> Row:
    weight, values = getattr(pair.b, name).detach(), _values_of_stack(pair.b, name)
    prepared = next((m for m in (pair.a, pair.b) if isinstance(m, QATExperts) and name in m.stacks), None)
    if isinstance(weight, PackedExperts):
        size = stored_bytes(weight)
    else:
        one = weight[0].t() if is_transposed(pair.b) else weight[0]
        size = len(weight) * planned_bytes(recipes[-1].fprop_weight, one)
    return _row(
        pair,
        f"{pair.fqn}.{name}" if pair.fqn else name,
        tuple(weight.shape),
        recipes,
        size,
        problems=[],
        weight_sqnr_db=sqnr(_values_of_stack(pair.a, name), values),
        quantisation_db=None if prepared is None else sqnr(getattr(prepared, name).detach(), values),
    )


def _recipe_of_stack(module: nn.Module, name: str) -> LinearRecipe | None:
    if isinstance(module, QATExperts) and name in module.stacks:
        return module.stacks[name].recipe
    weight = getattr(module, name).data
    return weight.recipe if isinstance(weight, PackedExperts) else None


def _values_of_stack(module: nn.Module, name: str) -> Tensor:
    """Return the values that the experts of a parameter multiply by, in its shape."""
    weight = getattr(module, name).detach()
    if isinstance(weight, PackedExperts):
        return weight.dequantize()
    if isinstance(module, QATExperts) and name in module.stacks and module.fake_quant:
        return module.quantised_weight(name)
    return weight


def _unhealthy(operand: Operand, k: int, saturated: float | None, floored: float | None) -> list[str]:
    """Return what is wrong with the shares. One value a block may clip: symmetric integers choose their scale from a
    group's absmax and then, half of the time, clip exactly that value.
    """
    problems = []
    if saturated is not None and saturated > HEALTHY + 1 / (operand.format.block or k):
        problems.append(f"{saturated:.1%} of the values saturate")
    if floored is not None and floored > HEALTHY:
        problems.append(f"{floored:.1%} of the blocks have the smallest scale there is")
    return problems
