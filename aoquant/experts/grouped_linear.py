"""A grouped product: rows sorted by expert, times the weight of each expert.

    y[start_e : end_e] = x[start_e : end_e] W_e^T

Prepared and packed experts multiply here and nowhere else, so they agree bit for bit. There are two ways, and
`why_not_at_once` says which is taken. `grouped_at_once` multiplies all experts in one autograd function, the dense
layer's with the offsets of each expert's rows, which stay on the device: no wait for them, one graph for a compiler,
CUDA graphs. A loop takes the other recipes: each expert that has rows is one call of `quantized_linear`, and the host
knows the rows of each.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aoquant import ops
from aoquant.distributed.gathered import GatheredWeight, with_gradient
from aoquant.formats import Encoded, Scales
from aoquant.linear.checks import (
    cast,
    check_device,
    check_dtype,
    check_width,
    compute_dtype,
    refuse_second_derivative,
    refuse_transforms,
)
from aoquant.linear.function import pulled_back, quantized_linear
from aoquant.linear.recipe import RECIPES, LinearRecipe
from aoquant.linear.saved import flat, restored, saved_tensors
from aoquant.ops import grouped as gemms
from aoquant.ops import stacks
from aoquant.ops.repeat import PLAIN


class Rows(NamedTuple):
    """The rows of a grouped product.

    ends: (E,) int32, for each expert the row behind its last. token: (S,) int64, the row of x that each row is, or None
    where x has the rows themselves. place: (T, J) int64, the rows of each token: the inverse of token.
    """

    ends: Tensor
    token: Tensor | None = None
    place: Tensor | None = None


class Given(NamedTuple):
    """The arguments of a call that need no gradient. recipe: its key. packed: codes (E * N, K), in place of w, or w's
    own where w is there as codes alone.
    """

    recipe: str
    transposed: bool
    packed: Encoded | None


class Saved(NamedTuple):
    """Hold what forward keeps for backward; w and x are None where no gradient needs them. w: or its codes, which are
    written anew between steps; those of a packed weight are not.
    """

    w: Tensor | Encoded | None
    x: Tensor | Encoded | None
    ends: Tensor
    token: Tensor | None
    place: Tensor | None


class GroupedLinear(torch.autograd.Function):
    """y (S, N) of x and w (E, N, K), or (E, K, N), or codes. Shapes: `grouped_at_once`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, ends: Tensor, token: Tensor | None, place: Tensor | None, given: Given
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        y, x_q = multiply(x, w, Rows(ends, token, place), given)
        kept_w = w if given.packed is None else given.packed if w is not None else None
        saved = Saved(kept_w if needs_x else None, x_q if needs_w else None, ends, token, place)
        tensors, ctx.layout = flat(saved)
        ctx.save_for_backward(*tensors)
        ctx.packed_fqn = w.fqn if isinstance(w, GatheredWeight) else ""
        ctx.given, ctx.needs, ctx.w_dtype = given, (needs_x, needs_w), None if w is None else w.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        saved = restored(saved_tensors(ctx, ctx.packed_fqn), ctx.layout)
        (needs_x, needs_w), given = ctx.needs, ctx.given
        ends, recipe = saved.ends, RECIPES[given.recipe]
        dx = dw = None
        if needs_x:
            w = given.packed if saved.w is None else saved.w
            dx = ops.grouped_dgrad(grad, ends, w, recipe.fprop_weight, given.transposed)
            dx = dx if saved.place is None else ops.gathered_sum(dx, saved.place)
            dx = pulled_back(dx, recipe.fprop_input, None)
        if needs_w:
            pulls = recipe.fprop_weight.transform is not None
            dw = ops.grouped_wgrad(grad, ends, saved.x, saved.token, recipe.fprop_input, given.transposed and not pulls)
            if pulls:
                dw = pulled_back(dw.flatten(0, 1), recipe.fprop_weight, None).view(dw.shape)
                dw = dw.transpose(1, 2) if given.transposed else dw
            dw = dw.to(ctx.w_dtype)
        return dx, dw, None, None, None, None


def multiply(x: Tensor, w: Tensor | None, rows: Rows, given: Given) -> tuple[Tensor, Tensor | Encoded]:
    """Return y and the input as it was multiplied; without autograd."""
    recipe = RECIPES[given.recipe]
    x_q: Tensor | Encoded = x
    values = None
    if recipe.fprop_input is not None:
        made = ops.encode(x, recipe.fprop_input, reads="operand" if x.is_cuda else "").row
        assert made is not None
        x_q, values = made.codes, made.values
    weight = w if given.packed is None else given.packed
    assert weight is not None
    sides = recipe.fprop_input, recipe.fprop_weight, given.transposed
    return ops.grouped_mm(x_q, values, rows.token, rows.ends, weight, *sides, x.dtype), x_q


def grouped_at_once(
    x: Tensor, w: Tensor | Encoded, rows: Rows, recipe: LinearRecipe, transposed: bool = False
) -> Tensor:
    """Return y (S, N), zero behind the last expert's rows, differentiable in x and a float w.

    x: (S, K) sorted by expert, or (T, K) where `rows` has tokens. w: (E, N, K), or (E, K, N) when `transposed`, float
    or a `GatheredWeight`; or codes (E, N, K), whatever `transposed` says. Only where `why_not_at_once` is None.

    Raises:
        ValueError: as `quantized_linear`.
    """
    refuse_transforms()
    check_width(x, w.k if isinstance(w, Encoded) else w.shape[1 if transposed else 2])
    check_device(x, w.codes if isinstance(w, Encoded) else w)
    given_x, x = x, cast(x)
    weight, packed = None, None
    encoded = w if isinstance(w, Encoded) else w.rows if isinstance(w, GatheredWeight) else None
    if encoded is not None:
        outer = encoded.outer  # of each row, or of each expert
        outer = None if outer is None else outer.expand(*encoded.codes.shape[:2], 1)
        packed = encoded._replace(outer=outer).map(lambda t: t.flatten(0, 1))
    if not isinstance(w, Encoded):
        weight = with_gradient(w)
        check_dtype(given_x, w.dtype, recipe.contract)
    given = Given(recipe.key, transposed and weight is not None, packed)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return multiply(x, weight, rows, given)[0]
    return _applied(x, weight, *rows, given)


@torch.compiler.allow_in_graph
def _applied(
    x: Tensor, w: Tensor | None, ends: Tensor, token: Tensor | None, place: Tensor | None, given: Given
) -> Tensor:
    """`GroupedLinear`, one call to a compiler, as `function._applied` is."""
    return GroupedLinear.apply(x, w, ends, token, place, given)  # type: ignore[no-untyped-call]


def why_not_at_once(recipe: LinearRecipe, w: Tensor | Encoded, transposed: bool = False) -> str | None:
    """Return why the experts' product is a loop; None when it is one function.

    w: (E, N, K), or (E, K, N) when `transposed`; or codes with E in front, of weights in the dtype that products
    compute in.
    """
    if isinstance(w, Encoded):
        # a compiler does not see the loop of the op itself, so on a CPU that will do
        device = "" if torch.compiler.is_compiling() and w.codes.device.type == "cpu" else str(w.codes.device)
        return _why_not(recipe.key, torch.bfloat16, w.codes.shape[1], w.k, device)
    if type(w) not in (*PLAIN, GatheredWeight):
        return f"takes plain tensors, not {type(w).__name__}"
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    return _why_not(recipe.key, compute_dtype(w), n, k, str(w.device))


@torch.compiler.assume_constant_result
def _why_not(key: str, dtype: torch.dtype, n: int, k: int, device: str) -> str | None:
    """Found once for each: a compiler takes it as a constant. device: "" for any."""
    recipe = RECIPES[key]
    return (
        _why_not_recipe(recipe)
        or (gemms.why_not(dtype, k, n, torch.device(device)) if device else None)
        or stacks.why_not(recipe.fprop_weight, n)
    )


def _why_not_recipe(recipe: LinearRecipe) -> str | None:
    x, w = recipe.fprop_input, recipe.fprop_weight
    if recipe.contract != "aoquant":
        return f"computes aoquant, not {recipe.contract}"
    if recipe.backward_operands or recipe.save != "row" or recipe.straight_through != "identity" or recipe.holds:
        return "computes a backward in high precision, straight through, of dynamic scales"
    if not recipe.batch_invariant or (x is not None and (x.draws or x.fitted)):
        return f"encodes activations row by row, not as {recipe.input_name}"
    if x is not None and x.format.sums_blocks and x.format.block == w.block:
        return "sums whole rows, not blocks of float8"
    return None


def grouped_in_a_loop(
    x_SK: Tensor,
    weight_of: Callable[[int], Tensor | Encoded],
    ends: Sequence[int],
    n: int,
    recipe: LinearRecipe,
    random: Tensor | None = None,
    rank: int = 0,
    scales_of: Callable[[int], Scales | None] | None = None,
) -> Tensor:
    """Return y (S, N) of x (S, K), whose rows are sorted by expert, zero behind the last expert's rows.

    weight_of: an expert's weight (N, K), or its codes; asked for experts that have rows, and others get no gradient.
    ends: for each expert, the row behind its last.
    random, rank: as `quantized_linear` has them; each expert advances the state by one.
    scales_of: the scales that an expert's weight holds, where experts go on from packed ones (`aoquant.unpack_`):
        scales made anew would not give their codes.

    Raises:
        ValueError: as `quantized_linear`.
    """
    outputs = list[Tensor]()
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if end > start:
            rows, w, held = x_SK[start:end], weight_of(expert), None if scales_of is None else scales_of(expert)
            outputs.append(quantized_linear(rows, w, None, recipe, w_held=held, random=random, rank=rank))
    if (behind := len(x_SK) - ends[-1]) > 0 or not outputs:
        outputs.append(cast(x_SK).new_zeros(behind, n))
    return torch.cat(outputs)


class GroupedBias(torch.autograd.Function):
    """y (S, N) and the bias (E, N) of each row's expert."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return ops.grouped_bias(y, bias, expert)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        (ends,) = ctx.saved_tensors
        return grad, ops.grouped_bgrad(grad, ends) if ctx.needs_input_grad[1] else None, None, None


@torch.compiler.allow_in_graph
def grouped_bias(y: Tensor, bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Return y (S, N) plus the bias (E, N) of each row's expert, differentiable in both.

    expert: (S,) int64, sorted. ends: (E,) int32, for each expert the row behind its last; rows behind all of them add
    nothing to a gradient.
    """
    if bias.dtype is not y.dtype:  # autocast leaves biases as they are, and transformers adds them in place
        return (y + bias[expert]).to(y.dtype)
    return GroupedBias.apply(y, bias, expert, ends)  # type: ignore[no-untyped-call]
