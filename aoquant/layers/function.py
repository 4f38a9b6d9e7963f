"""The one autograd function of a quantised linear layer.

forward:   1. encode the input, or take the codes of a layer that was given the same one; on a GPU both sides of it
              together, where backward will read a column side of the original
           2. multiply; W is encoded on the way
           3. keep for backward what the gradients that are asked for will read (sides.py)
backward:  1. dx = dy W^: W is encoded again   2. dW = dy^T x^ from x's codes   3. db = the sum of dy
           both quantised GEMMs are one op: dy is encoded once where its two sides have the same codes (a square tile,
           or one scale for the tensor), and read once, for both, where a GPU multiplies quantised operands

Rounding passes the gradient straight through; values that their codes clip pass theirs to a learned scale, or to
nothing. Behind a transform both GEMMs multiply in the transformed domain, where the codes are. Clipped values are
masked there, and gradients are pulled back: dx = dx' T, dW = dW' T^-T. The gradient of a learned scale needs x / s,
so a layer whose input scale is learned keeps x.

A side that no GEMM will read (a frozen weight, an input without gradient) is neither kept nor encoded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from aoquant import ops
from aoquant.formats import Encoded, Operand, Scales
from aoquant.formats.delayed import Delayed
from aoquant.formats.random import of_rank
from aoquant.layers.recipe import LinearRecipe, recipe_of
from aoquant.layers.saved import Saved, keep, kept
from aoquant.layers.shared_inputs import SharedInput
from aoquant.layers.sides import Side
from aoquant.ops import backward as gemms
from aoquant.parallel import amax as reduced
from aoquant.parallel.gathered import GatheredWeight
from aoquant.parallel.shards import Shards

if TYPE_CHECKING:
    from aoquant.layers.fixed import FixedWeight  # which multiplies by what this module makes


class Given(NamedTuple):
    """The arguments of a call that need no gradient. Autograd sees tensors only as arguments of `apply`, not in here.

    recipe: its key.
    packed: an encoded weight, in place of w.
    x_held, w_held: scales and transforms that the layer holds, but no learned scale, which is an argument of `apply`.
    random: the state of the layer's random numbers; backward adds one to its step.
    shared: where layers with one input share its codes.
    columns: where they share its column side.
    fixed: keeps the codes of w for further calls.
    delayed: the state of delayed scales, advanced in backward.
    parts: this rank's part of the layer.
    rank: its number among the ranks with other tokens; each of them draws other random numbers.
    """

    recipe: str
    packed: Encoded | None = None
    x_held: Scales | None = None
    w_held: Scales | None = None
    random: Tensor | None = None
    shared: SharedInput | None = None
    columns: SharedInput | None = None
    fixed: FixedWeight | None = None
    delayed: Delayed | None = None
    parts: Shards | None = None
    rank: int = 0


class Needs(NamedTuple):
    """Which arguments of `apply` need a gradient."""

    x: bool
    w: bool
    bias: bool
    x_scale: bool
    w_scale: bool


NO_GRADIENT = Needs(False, False, False, False, False)


class QuantizedLinear(torch.autograd.Function):
    """y (*lead, N) of x (*lead, K) and w (N, K), or a packed weight. Shapes and errors: `linear.quantized_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        bias: Tensor | None,
        x_scale: Tensor | None,
        w_scale: Tensor | None,
        given: Given,
    ) -> Tensor:
        needs = Needs(*ctx.needs_input_grad[:5])
        if x_scale is not None and given.x_held is not None:
            given = given._replace(x_held=given.x_held._replace(scale=x_scale))
        if w_scale is not None and given.w_held is not None:
            given = given._replace(w_held=given.w_held._replace(scale=w_scale))
        y, saved = multiply(x, w, bias, given, needs)
        keep(ctx, saved)
        ctx.recipe, ctx.needs, ctx.x_shape = given.recipe, needs, x.shape
        ctx.parts, ctx.rank = given.parts, given.rank
        ctx.fixed = None if isinstance(w, GatheredWeight) else given.fixed
        ctx.delayed = given.delayed
        ctx.random = given.random  # not saved: the calls of a step advance one state, in place
        ctx.w_dtype = None if w is None else w.dtype
        ctx.w_columns = isinstance(w, GatheredWeight) and w.columns is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        recipe, needs, saved = recipe_of(ctx.recipe), ctx.needs, kept(ctx)
        random = None if ctx.random is None else of_rank(ctx.random, ctx.rank)
        x_as: Any = recipe.fprop_input
        w_as = recipe.fprop_weight
        x: Any = saved.x
        w: Any = saved.w
        x_held: Any = saved.x_held
        w_held: Any = saved.w_held
        grad_MN = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)  # reshape(-1, 0) is ambiguous
        dx: Tensor | None = None
        dw: Tensor | None = None
        db = dx_scale = dw_scale = None
        dgrad, wgrad = needs.x or needs.x_scale, needs.w or needs.w_scale
        along_n, along_m = recipe.weight_side.pair, recipe.input_side.pair
        grad_held = None if ctx.delayed is None else Scales(ctx.delayed.factor[2:].view(1, 1))
        w_kept: Any = _kept_weight(ctx, recipe, saved, grad.dtype) if dgrad else None
        x_kept: Any = recipe.input_side.kept(x, x_held) if wgrad else None
        reads_x = x_kept if along_m is not None or x_kept is None or x_kept.forward is not None else None
        if w_kept is not None or reads_x is not None:
            how = grad_MN, w_kept, along_n, reads_x, along_m, random, grad_held
            if ctx.parts is None:
                dx, dw = ops.gradients(*how)
            else:
                dx, dw = gemms.of_parts(*how, ctx.parts.dgrad, ctx.parts.wgrad)
        if wgrad and reads_x is None:
            dw = grad_MN.t() @ x_kept.matrix  # no op: a compiler may know better

        if dgrad:
            assert dx is not None
            clipped = saved.clipped
            if needs.x_scale:
                dx_scale = ops.scale_grad(dx, x, x_as, x.shape[1], x_held.scale, x_held.zero)
                clipped = ops.saturated(x, x_as, x_as.format.rowwise(x_held, len(x)))
            dx = pulled_back(dx, x_as, x_held, clipped).reshape(ctx.x_shape) if needs.x else None

        if wgrad:
            assert dw is not None
            if needs.w_scale:
                dw_scale = ops.scale_grad(dw, w, w_as, w.numel() // w_held.scale.numel(), w_held.scale, w_held.zero)
            if needs.w:
                clipped = ops.saturated(w, w_as, w_held) if recipe.weight_clips else None
                dw = pulled_back(dw.to(ctx.w_dtype), w_as, w_held, clipped)
            else:
                dw = None

        if needs.bias:
            db = ops.bgrad(grad_MN, ctx.bias_dtype)
        if ctx.random is not None:
            ctx.random[2:].add_(1)  # the step
        if recipe.history and ctx.delayed.history.numel():  # a report takes its history away
            _advance(ctx.delayed, saved.amax, grad_MN, recipe)
        return dx, dw, db, dx_scale, dw_scale, None


def multiply(
    x: Tensor, w: Tensor | None, bias: Tensor | None, given: Given, needs: Needs = NO_GRADIENT
) -> tuple[Tensor, Saved]:
    """(y, the tensors that the gradients in `needs` read); without autograd."""
    recipe = recipe_of(given.recipe)
    x_as, w_as, contract = recipe.fprop_input, recipe.fprop_weight, recipe.contract
    x_held, w_held = given.x_held, given.w_held
    x_MK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    x_rows = None if x_held is None or x_as is None else x_as.format.rowwise(x_held, x_MK.shape[0])

    # 1. The input's codes, and what the GEMM reads of it where both come of one pass; or all that is made of it.
    dgrad, wgrad = needs.x or needs.x_scale, needs.w or needs.w_scale
    x_q: Tensor | Encoded = x
    values = columns = None
    if x_as is not None:
        found = None if given.shared is None else given.shared.get()
        if found is not None:
            x_q = found
        else:
            at_once = wgrad and _reads_input_once(x_MK, recipe, given)
            made = _encoded(x_MK, x_as, x_rows, ops.reads(contract), recipe.input_side if at_once else None)
            assert made.row is not None
            x_q, values, columns = made.row.codes, made.row.values, None if made.col is None else made.col.codes
            if given.shared is not None:
                given.shared.put(x_q, alive=not recipe.input_side.keeps_rows)

    # 2. The product. W is encoded on the way where backward reads its codes, which come back then; and on a GPU, where
    # the GEMM makes W's operand in the same pass. Elsewhere, or under held scales, W is encoded first.
    keeps_w = dgrad and w is not None and recipe.weight_side.keeps_codes(fixed=given.fixed is not None)
    w_q = given.packed if w is None else w
    assert w_q is not None
    if isinstance(w, GatheredWeight):
        w_q = w.rows
    elif w is not None and given.fixed is not None:
        w_q = given.fixed.rows(functools.partial(codes, w, w_as, w_held))
    elif w is not None and not keeps_w and (w_held is not None or not one_pass(w)):
        w_q = codes(w, w_as, w_held)
    lead, strides = list(x.shape[:-1]), None
    if x_as is not None and contract == "dequantize" and not x.is_contiguous():
        strides = list(torch.empty_like(x, device="meta").stride())  # of an elementwise operation's result
    how = bias, x_as, w_as, contract, lead, x.dtype, values, strides
    y, made_w, measured = ops.matmul(x_q, w_q, *how, keeps_w, w_held if keeps_w else None)
    w_q = w_q if made_w is None else made_w
    if not any(needs):
        return y, Saved()

    # 3. For backward. If W changes before it, autograd objects; so what was measured of it still holds there.
    reads_w = dgrad or needs.w_scale or (needs.w and recipe.weight_clips)
    clips = recipe.input_clips and needs.x and not needs.x_scale
    side = recipe.input_side
    encodes_x = wgrad and side.keeps == "values" and side.forward is not None
    kept_w = w_q if keeps_w else given.packed if w is None else w
    if isinstance(w, GatheredWeight):
        kept_w = w.columns or w.rows
    saved = Saved(
        x=x_MK if needs.x_scale else _kept_input(x, x_MK, x_q, columns, recipe, given) if wgrad else None,
        w=kept_w if reads_w else None,
        x_held=x_held if needs.x_scale or encodes_x else _transform_of(x_held) if needs.x and x_held else None,
        w_held=w_held if reads_w else _transform_of(w_held) if needs.w and w_held else None,
        measured=measured if dgrad else None,
        clipped=ops.saturated(x_MK, x_as, x_rows) if clips and x_as is not None else None,
        amax=torch.cat((ops.absmax(x_MK), ops.absmax(w))) if recipe.history and w is not None else None,
    )
    return y, saved


def _kept_weight(ctx: Any, recipe: LinearRecipe, saved: Saved, dtype: torch.dtype) -> ops.Kept:
    """What dgrad reads of the weight, or the column side that is there already."""
    side, w = recipe.weight_side, saved.w
    assert w is not None
    columns: Any = w if ctx.w_columns else _fixed_columns(ctx.fixed, recipe, w, saved.w_held, dtype)
    if columns is not None:
        return side.kept(columns, None, keeps="columns")
    return side.kept(w, saved.w_held, saved.measured)


def _advance(state: Delayed, amax: Tensor | None, grad_MN: Tensor, recipe: LinearRecipe) -> None:
    """A step of delayed scaling, in place: a checkpoint that recomputes forward encodes by the factors that it had."""
    x, w, grad = recipe.fprop_input, recipe.fprop_weight, recipe.dgrad_grad_output
    assert amax is not None and x is not None and grad is not None
    found = reduced.largest(torch.cat((amax, ops.absmax(grad_MN))))
    made = ops.advance(found, *state, x, w, grad, recipe.select)
    state.history.copy_(made.history)
    state.factor.copy_(made.factor)


def _fixed_columns(
    fixed: FixedWeight | None, recipe: LinearRecipe, w: Any, held: Scales | None, dtype: torch.dtype
) -> Encoded | None:
    """The column side of a fixed weight; None where it is drawn anew, or is in high precision."""
    side = recipe.weight_side
    if fixed is None or side.pair is None or side.pair.b_as.draws:
        return None
    return fixed.columns(dtype, functools.partial(side.kept(w, held).columns, side.pair, dtype))


def _reads_input_once(x_MK: Tensor, recipe: LinearRecipe, given: Given) -> bool:
    """Whether x's codes along K, and its column side from the original, are made together, so that x is read once.
    Where a layer before this one left a column side, it is not made again.
    """
    if not recipe.reads_input_once or given.x_held is not None or given.parts is not None or not one_pass(x_MK):
        return False
    return given.columns is None or not given.columns.known


def _kept_input(
    x: Tensor, x_MK: Tensor, x_q: Tensor | Encoded, columns: Encoded | None, recipe: LinearRecipe, given: Given
) -> Tensor | Encoded:
    """The form of x that wgrad reads. x_q: the codes of forward. columns: the column side, where they came with it."""
    side = recipe.input_side
    if side.keeps == "values":
        return x if recipe.fprop_input is None else x_MK
    if side.keeps != "columns":
        return x_q
    found = None if given.columns is None else given.columns.get()
    if found is None:
        found = side.columns(x_MK, x_q, given.parts) if columns is None else columns
        if given.columns is not None:
            given.columns.put(found)
    return found


def _transform_of(held: Scales) -> Scales | None:
    """The fitted transform alone, which pulls gradients back."""
    return None if held.transform is None else Scales(transform=held.transform)


def one_pass(x_RK: Tensor) -> bool:
    """Whether codes and the GEMM's operand are best made together: on a GPU, where each pass over memory costs."""
    return x_RK.is_cuda


def codes(x_RK: Tensor, operand: Operand, held: Scales | None = None) -> Encoded:
    """Encode x along K."""
    made = ops.encode(x_RK, operand, None, held).row
    assert made is not None
    return made.codes


def _encoded(x_MK: Tensor, operand: Operand, held: Scales | None, reads: str, col: Side | None) -> ops.Quantized:
    """Encode x, and make what the GEMM reads where it comes of the same pass, and the column side that `col` keeps."""
    if reads == "codes" or held is not None or not one_pass(x_MK):
        return ops.encode(x_MK, operand, None, held)
    if col is None:
        return ops.encode(x_MK, operand, None, None, reads)
    return ops.encode(x_MK, operand, col.backward, None, reads, col.multiple)


def pulled_back(grad_RK: Tensor, operand: Operand | None, held: Scales | None, clipped: Tensor | None = None) -> Tensor:
    """The gradient of x from the gradient of its values: zero where `clipped`, then pulled back through the transform.

    held: holds the transform's matrices if it is fitted.
    """
    if operand is None or operand.transform is None:
        return grad_RK if clipped is None else ops.masked(grad_RK, clipped)
    return ops.pull_back(grad_RK, operand, None if held is None else held.transform, clipped)


def refuse_transforms() -> None:
    """Raise under a transform of torch.func, or a forward-mode derivative: they would differentiate or batch the
    rounding itself.

    Raises:
        ValueError: one is active.
    """
    if not torch.compiler.is_compiling() and (_are_functorch_transforms_active() or forward_ad._current_level >= 0):
        raise ValueError(
            "torch.func's transforms (grad, vmap, jvp, ...) and forward-mode derivatives do not go through a quantised layer: use backward() or "
            "torch.autograd.grad, and a batch in the place of vmap; or apply them to the float model"
        )


def refuse_second_derivative() -> None:
    """Refuse a backward that is differentiated itself (create_graph=True): rounding has no second derivative.

    Raises:
        ValueError: autograd records this backward.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "a prepared layer cannot be differentiated twice (create_graph=True): take second derivatives of the float model, or switch fake "
            "quantisation off for them with aoquant.set_fake_quant(model, False)"
        )
