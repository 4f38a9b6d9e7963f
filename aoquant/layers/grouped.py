"""A grouped product: rows sorted by expert, times the weight of each expert.

    y[start_e : end_e] = x[start_e : end_e] W_e^T

Prepared and packed experts multiply here and nowhere else, so prepared and converted experts agree bit for bit. There
are two ways, and `why_not_at_once` says which is taken:

`grouped_at_once` takes all experts in one autograd function over the ops of `ops/grouped.py`. Which rows an expert has
stays on the device: no wait for it, one graph for a compiler, CUDA graphs. Each row's product is its own: it depends on
that row, on its expert's weight, and on the range of S that chooses the kernel.

`grouped_linear` is a loop: each expert that has rows is one quantised linear layer, with the forward, backward, checks
and kernels of `linear.quantized_linear`. It needs to know the rows of each expert on the host. An expert without rows
costs nothing and gets no gradient from here.

`grouped_bias` adds a bias of each expert to rows that were multiplied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aoquant import ops
from aoquant.formats import Encoded, Float8, Operand, Scales
from aoquant.layers.checks import (
    cast,
    check_device,
    check_dtype,
    check_width,
    compute_dtype,
    refuse_second_derivative,
    refuse_transforms,
)
from aoquant.layers.function import pulled_back, quantized_linear
from aoquant.layers.recipe import LinearRecipe, recipe_of
from aoquant.ops import grouped, stacks

__all__ = ["Rows", "grouped_at_once", "grouped_bias", "grouped_linear", "why_not_at_once"]


class Rows(NamedTuple):
    """The rows of a grouped product.

    ends: (E,) int32, for each expert the row behind its last. token: (S,) int64, the row of x that each row is, or None
    where x has the rows themselves. place: (T, J) int64, the rows of each token: the inverse of token.
    """

    ends: Tensor
    token: Tensor | None = None
    place: Tensor | None = None


def why_not_at_once(
    recipe: LinearRecipe, w: Tensor | Encoded, transposed: bool, experts: int = 0, *, op_on_cpu: bool = False
) -> str | None:
    """Why the experts' product is a loop; None when it is one. w: (E, N, K), or (E, K, N) when `transposed`; or codes
    (E * N, K) of so many `experts`, of weights in the dtype that products compute in. op_on_cpu: the loop of the op
    itself, which a compiler does not see, will do on a CPU.
    """
    if isinstance(w, Encoded):
        if op_on_cpu and w.codes.device.type == "cpu":
            return _why_no_op(recipe.key, w.codes.shape[0] // experts)
        return _why_not(recipe.key, torch.bfloat16, w.codes.shape[0] // experts, w.k, str(w.codes.device))
    if type(w) not in (Tensor, nn.Parameter):
        return f"takes plain tensors, not {type(w).__name__}"
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    return _why_not(recipe.key, compute_dtype(w), n, k, str(w.device))


@torch.compiler.assume_constant_result
def _why_not(key: str, dtype: torch.dtype, n: int, k: int, device: str) -> str | None:
    """Found once for each: a compiler takes it as a constant."""
    recipe = recipe_of(key)
    return (
        _why_not_recipe(recipe)
        or grouped.why_not(dtype, k, n, torch.device(device))
        or stacks.why_not(recipe.fprop_weight, n)
    )


@torch.compiler.assume_constant_result
def _why_no_op(key: str, n: int) -> str | None:
    """As `_why_not`, wherever the op runs."""
    recipe = recipe_of(key)
    return _why_not_recipe(recipe) or stacks.why_not(recipe.fprop_weight, n)


def _why_not_recipe(recipe: LinearRecipe) -> str | None:
    x, w = recipe.fprop_input, recipe.fprop_weight
    if recipe.contract != "aoquant":
        return f"computes aoquant, not {recipe.contract}"
    if recipe.backward_operands or recipe.save != "row" or recipe.straight_through != "identity" or recipe.holds:
        return "computes a backward in high precision, straight through, of dynamic scales"
    if not recipe.batch_invariant or (x is not None and (x.draws or x.fitted)):
        return f"encodes activations row by row, not as {recipe.input_name}"
    if x is not None and isinstance(x.format, Float8) and x.format.block is not None and x.format.block == w.block:
        return "sums whole rows, not blocks of float8"
    return None


class _Given(NamedTuple):
    """The arguments that need no gradient. recipe: its key."""

    recipe: str
    transposed: bool
    packed: Encoded | None


class GroupedLinear(torch.autograd.Function):
    """y (S, N) of x and w (E, N, K), or (E, K, N), or codes. Shapes: `grouped_at_once`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, ends: Tensor, token: Tensor | None, place: Tensor | None, given: _Given
    ) -> Tensor:
        y, x_q = _multiply(x, w, Rows(ends, token, place), given)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.x_k, ctx.given, ctx.needs = x.shape[1], given, (needs_x, needs_w)
        codes = x_q.tensors if isinstance(x_q, Encoded) else (x_q, None, None, None)
        kept = codes if needs_w else (None, None, None, None)
        ctx.encoded = isinstance(x_q, Encoded)
        ctx.w_dtype = None if w is None else w.dtype
        ctx.save_for_backward(w if needs_x else None, ends, token, place, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        w, ends, token, place, *codes = ctx.saved_tensors
        recipe, transposed = recipe_of(ctx.given.recipe), ctx.given.transposed
        dx = dw = None
        if ctx.needs[0]:
            dx = _dgrad(grad, ends, w, ctx.given)
            dx = dx if place is None else ops.gathered_sum(dx, place)
            dx = dx if recipe.fprop_input is None else pulled_back(dx, recipe.fprop_input, None)
        if ctx.needs[1]:
            x_codes, scale, zero, outer = codes
            x = Encoded(x_codes, scale, zero, outer, ctx.x_k) if ctx.encoded else x_codes
            pulls = recipe.fprop_weight.transform is not None
            dw = ops.grouped_wgrad(grad, ends, x, token, recipe.fprop_input, transposed and not pulls)
            if pulls:
                dw = pulled_back(dw.flatten(0, 1), recipe.fprop_weight, None).view(dw.shape)
                dw = dw.transpose(1, 2) if transposed else dw
            dw = dw.to(ctx.w_dtype)
        return dx, dw, None, None, None, None


def _dgrad(grad_SN: Tensor, ends: Tensor, w: Tensor | None, given: _Given) -> Tensor:
    recipe = recipe_of(given.recipe)
    if w is None:  # packed: its values, of which autograd keeps nothing
        assert given.packed is not None
        values = ops.decode(given.packed, Operand(recipe.fprop_weight.format), grad_SN.dtype)
        stack = values.view(ends.shape[0], -1, given.packed.k)
        return ops.grouped_dgrad(grad_SN, ends, stack, None, False)
    return ops.grouped_dgrad(grad_SN, ends, w, recipe.fprop_weight, given.transposed)


def _multiply(x: Tensor, w: Tensor | None, rows: Rows, given: _Given) -> tuple[Tensor, Tensor | Encoded]:
    """(y, the input as it was multiplied); without autograd."""
    recipe = recipe_of(given.recipe)
    x_q: Tensor | Encoded = x
    values = None
    if recipe.fprop_input is not None:
        made = ops.encode(x, recipe.fprop_input, reads="operand" if x.is_cuda else "").row
        assert made is not None
        x_q, values = made.codes, made.values
    weight = given.packed if w is None else w
    assert weight is not None
    sides = recipe.fprop_input, recipe.fprop_weight, given.transposed
    return ops.grouped_mm(x_q, values, rows.token, rows.ends, weight, *sides, x.dtype), x_q


def grouped_at_once(
    x: Tensor, w: Tensor | Encoded, rows: Rows, recipe: LinearRecipe, transposed: bool = False
) -> Tensor:
    """y (S, N), zero behind the last expert's rows, differentiable in x and a float w.

    x: (S, K) sorted by expert, or (T, K) where `rows` has tokens. w: (E, N, K), or (E, K, N) when `transposed`; or
    codes (E * N, K), whatever `transposed` says. Only where `why_not_at_once` is None.

    Raises:
        ValueError: as `quantized_linear`.
    """
    refuse_transforms()
    packed, weight = (w, w.codes) if isinstance(w, Encoded) else (None, w)
    check_width(x, w.k if isinstance(w, Encoded) else w.shape[1 if transposed else 2])
    check_device(x, weight)
    given_x, x = x, cast(x)
    if packed is None:
        check_dtype(given_x, weight.dtype, recipe.contract)
    given = _Given(recipe.key, transposed and packed is None, packed)
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        y, _ = _multiply(x, None if packed is not None else weight, rows, given)
        return y
    return _applied(x, None if packed is not None else weight, *rows, given)


@torch.compiler.allow_in_graph
def _applied(
    x: Tensor, w: Tensor | None, ends: Tensor, token: Tensor | None, place: Tensor | None, given: _Given
) -> Tensor:
    """`GroupedLinear`, one call to a compiler, as `linear._applied` is."""
    y: Tensor = GroupedLinear.apply(x, w, ends, token, place, given)  # type: ignore[no-untyped-call]
    return y


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
    """(S, N): y plus the bias (E, N) of each row's expert, differentiable in both.

    expert: (S,) int64, sorted. ends: (E,) int32, for each expert the row behind its last; rows behind all of them add
    nothing to a gradient.
    """
    if bias.dtype is not y.dtype:  # autocast leaves biases as they are, and transformers adds them in place
        return (y + bias[expert]).to(y.dtype)
    added: Tensor = GroupedBias.apply(y, bias, expert, ends)  # type: ignore[no-untyped-call]
    return added


def grouped_linear(
    x_SK: Tensor,
    weight_of: Callable[[int], Tensor | Encoded],
    ends: Sequence[int],
    n: int,
    recipe: LinearRecipe,
    random: Tensor | None = None,
    rank: int = 0,
    scales_of: Callable[[int], Scales | None] | None = None,
) -> Tensor:
    """y (S, N) of x (S, K) whose rows are sorted by expert.

    weight_of: an expert's weight (N, K), or its codes; asked for experts that have rows.
    ends: for each expert, the row after its last; the last of them is S.
    n: N.
    random: the state of the experts' random numbers, where backward draws; each expert advances it by one.
    rank: as `quantized_linear` has it.
    scales_of: the scales that an expert's weight holds, where experts go on from packed ones (`aoquant.unpack_`):
        scales made anew would not give their codes.

    Raises:
        ValueError: as `quantized_linear`.
    """
    outputs, start = list[Tensor](), 0
    for expert, end in enumerate(ends):
        if end > start:
            rows, w, held = x_SK[start:end], weight_of(expert), None if scales_of is None else scales_of(expert)
            outputs.append(quantized_linear(rows, w, None, recipe, w_held=held, random=random, rank=rank))
        start = end
    return torch.cat(outputs) if outputs else cast(x_SK).new_empty(0, n)
