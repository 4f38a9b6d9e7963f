"""A quantised linear layer, on one page: y = x W^T + b with both operands encoded, and its gradients.

    quantized_linear    the door: checks a call that is not ordinary, finds what is shared, calls autograd
    QuantizedLinear     the one autograd function
    multiply            its forward, which packed layers call too

forward:   1. encode the input, or take the codes of a layer that was given the same one; on a GPU both sides of it
              together, where backward will read a column side of the original
           2. multiply; W is encoded on the way
           3. keep what the gradients that are asked for will read: `recipe.dgrad` and `recipe.wgrad` say what.
              A learned input scale keeps x instead, and a fixed, gathered or packed weight its codes
backward:  1. dx = dy W^, from W's codes or W encoded again   2. dW = dy^T x^ from x's codes   3. db = the sum of dy
           both quantised GEMMs are one op: dy is encoded once where its two sides have the same codes (a square tile,
           or one scale for the tensor), and read once, for both, where a GPU multiplies quantised operands

Rounding passes the gradient straight through; values that their codes clip pass theirs to a learned scale, or to
nothing. Behind a transform both GEMMs multiply in the transformed domain, where the codes are. Clipped values are
masked there, and gradients are pulled back: dx = dx' T, dW = dW' T^-T. The gradient of a learned scale needs x / s,
so a layer whose input scale is learned keeps x.

A side that no GEMM will read (a frozen weight, an input without gradient) is neither kept nor encoded.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from aoquant import ops
from aoquant.distributed import amax as reduced
from aoquant.distributed import sharded_linear as sharding
from aoquant.distributed.gathered import GatheredWeight, WithMaster
from aoquant.distributed.shards import Shards
from aoquant.formats import FLOAT_DTYPES, Encoded, Operand, Scales
from aoquant.formats.delayed import Delayed
from aoquant.formats.random import of_rank
from aoquant.linear import replay
from aoquant.linear.cache import FixedWeight, InputCodes, codes_of_input
from aoquant.linear.checks import checked, note_run, refuse_second_derivative, unread
from aoquant.linear.recipe import RECIPES, LinearRecipe
from aoquant.linear.saved import Frame, flat, restored, saved_tensors
from aoquant.ops import backward as gemms
from aoquant.ops import repeat

ONE_PASS = ("cuda",)  # where each pass over memory costs, so that codes and the GEMM's operand are made together


class Given(NamedTuple):
    """The arguments of a call that need no gradient. Autograd sees tensors only as arguments of `apply`, not in here.

    recipe: its key. repeats: whether the call may be repeated without its Python (replay.py).
    packed: an encoded weight, in place of w.
    x_held, w_held: scales and transforms that the layer holds, but no learned scale, which is an argument of `apply`.
    random: the state of the layer's random numbers, where backward draws; backward adds one to its step.
    rows, columns: where layers with one input share its codes, and its column side. layer: which of them this is.
    fixed: keeps the codes of w for further calls.
    delayed: the state of delayed scales, advanced in backward.
    parts: this rank's part of the layer, where its backward is quantised.
    rank: its number among the ranks with other tokens; each of them draws other random numbers.
    """

    recipe: str
    packed: Encoded | None = None
    x_held: Scales | None = None
    w_held: Scales | None = None
    random: Tensor | None = None
    rows: InputCodes | None = None
    columns: InputCodes | None = None
    layer: int = 0
    fixed: FixedWeight | None = None
    delayed: Delayed | None = None
    parts: Shards | None = None
    rank: int = 0
    repeats: bool = False


class Needs(NamedTuple):
    """Which arguments of `apply` need a gradient."""

    x: bool
    w: bool
    bias: bool
    x_scale: bool
    w_scale: bool


class Saved(NamedTuple):
    """What forward keeps for backward; a field is None where no gradient needs it.

    x: the input: encoded (M, K), or along its columns (K, M padded); in high precision (M, K), or as it came (*lead, K)
        where fprop does not quantise it.
    w: the weight, or its codes.
    x_held, w_held: scales and transforms that the layer holds.
    measured: what forward measured of W (`ops.product.Product`).
    clipped: a bit for each value of x, 1 where it gets no gradient.
    amax: (2,), of x and W, where scales are delayed; x twice where W is codes alone.
    """

    x: Tensor | Encoded | None = None
    w: Tensor | Encoded | None = None
    x_held: Scales | None = None
    w_held: Scales | None = None
    measured: Tensor | None = None
    clipped: Tensor | None = None
    amax: Tensor | None = None


NO_GRADIENT = Needs(False, False, False, False, False)


def quantized_linear(
    x: Tensor,
    w: Tensor | Encoded,
    bias: Tensor | None,
    recipe: LinearRecipe,
    x_held: Scales | None = None,
    w_held: Scales | None = None,
    random: Tensor | None = None,
    fixed: FixedWeight | None = None,
    delayed: Delayed | None = None,
    parts: Shards | None = None,
    rank: int = 0,
    master: Tensor | None = None,
) -> Tensor:
    """y (..., N) = x (..., K) W^T + bias with a quantised W, differentiable in x, a float W, bias and scales.

    Under autocast x and y take autocast's dtype; the weight is encoded from its stored dtype. DTensors go to
    `sharding.linear`.

    w: (N, K), float and encoded in the call (QAT); or encoded already: a `GatheredWeight` of codes alone in training,
        or an `Encoded` packed weight, which passes the gradient of x and has none.
    x_held, w_held: static or learned scales, factors of delayed ones and fitted transforms; for a shard its whole's.
    random, fixed, delayed, parts, rank: as `Given`'s.
    master: takes the gradient of `w`, where `w` is codes alone.

    Raises:
        ValueError: as `checks.checked`.
    """
    packed, weight = (w, None) if isinstance(w, Encoded) else (None, w)
    given_x, key, tracing = x, recipe.key, torch.compiler.is_compiling()
    changed = not tracing and (
        _is_any_autocast_enabled() or _are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
    plain = type(x) in repeat.PLAIN
    repeats = plain and not (tracing or changed) and x.get_device() >= repeat.FIRST_DEVICE
    repeats = repeats and x_held is None and w_held is None and fixed is None and delayed is None
    plain = plain and type(weight) in repeat.PLAIN
    with_gradients, leaf = torch.is_grad_enabled(), weight if master is None else master
    rows = columns = x_scale = w_scale = None
    asked = False  # whether rows and columns were looked up
    if repeats and plain:  # a call that the library knows has passed the checks below
        assert weight is not None
        if not with_gradients:
            if (y := replay.product(x, weight, bias, key)) is not None:
                return y
        elif leaf is weight and parts is None:
            if weight.requires_grad:
                rows, columns = codes_of_input(x, x.dtype, recipe.shared)
            needed = x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
            y, rows, columns = replay.step(x, weight, bias, needed, random, rows, columns, key, rank)
            asked = True
            if y is not None:
                if unread:
                    note_run(weight)
                return y
    if (
        tracing
        or changed
        or not plain
        or x.dtype is not weight.dtype  # type: ignore[union-attr]
        or x.dtype not in FLOAT_DTYPES
        or x.device != weight.device  # type: ignore[union-attr]
        or x.shape[-1:] != weight.shape[-1:]  # type: ignore[union-attr]
        or recipe.contract != "aoquant"
    ):
        x, stored = checked(x, w, recipe), w.codes if isinstance(w, Encoded) else w
        if sharding.is_sharded(x, stored):
            sides = sharding.HeldOperand(recipe.fprop_input, x_held), sharding.HeldOperand(recipe.fprop_weight, w_held)
            if recipe.backward_operands:
                return _sharded(x, stored, bias, recipe, sides, random, rank)
            return sharding.linear(functools.partial(_on_shard, recipe), x, stored, bias, *sides)
    repeats = repeats and x.numel() > 0
    if not tracing and not with_gradients:
        given = Given(key, packed, x_held, w_held, fixed=fixed)
        if repeats:
            return replay.forward(multiply, x, weight, bias, given, NO_GRADIENT)[0]
        return multiply(x, weight, bias, given)[0]
    repeats = repeats and parts is None  # the backward of a shard is not repeated
    if not (asked or leaf is None or tracing) and x_held is None and parts is None and leaf.requires_grad:
        rows, columns = codes_of_input(given_x, x.dtype, recipe.shared)
    if recipe.holds:  # autograd sees tensors that are arguments, none inside a tuple
        if x_held is not None and recipe.input_scales == "learned":
            x_scale, x_held = x_held.scale, Scales(None, x_held.zero, x_held.outer, x_held.transform)
        if w_held is not None and recipe.weight_scales == "learned":
            w_scale, w_held = w_held.scale, Scales(None, w_held.zero, w_held.outer, w_held.transform)
    layer = 0 if rows is columns is None else id(leaf)  # no number of a layer in a compiler's graph
    given = Given(key, packed, x_held, w_held, random, rows, columns, layer, fixed, delayed, parts, rank, repeats)
    return _applied(x, weight, bias, x_scale, w_scale, given, master)


@torch.compiler.allow_in_graph
def _applied(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    given: Given,
    master: Tensor | None,
) -> Tensor:
    """`QuantizedLinear`, one call to a compiler, which traces the ops inside and skips the Python around them.

    Otherwise Dynamo would guard on everything that this Python reads, before every compiled step.
    """
    if unread:
        note_run(w if master is None else master)
    if master is not None:
        w = WithMaster.apply(master, w)  # type: ignore[no-untyped-call]
    y: Tensor = QuantizedLinear.apply(x, w, bias, x_scale, w_scale, given)  # type: ignore[no-untyped-call]
    return y


class QuantizedLinear(torch.autograd.Function):
    """y (*lead, N) of x (*lead, K) and w (N, K), or a packed weight. Shapes and errors: `quantized_linear`."""

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
        if given.repeats:
            y, tensors, layout, kind = replay.forward(multiply, x, w, bias, given, needs)
        else:
            (y, saved), kind = multiply(x, w, bias, given, needs), None
            tensors, layout = flat(saved)
        ctx.save_for_backward(*tensors)
        codes = w if isinstance(w, GatheredWeight) else None
        dtypes = None if w is None else w.dtype, None if bias is None else bias.dtype
        held = given.fixed if codes is None else None, given.delayed, given.parts
        frame = Frame(given.recipe, needs, layout, x.shape, *dtypes, given.random, given.rank, *held)
        if codes is not None:
            frame = frame._replace(codes_of=codes.fqn, w_columns=codes.columns is not None)
        ctx.frame, ctx.repeats = frame, None if kind is None else kind.note.backward
        if kind is not None and not kind.left_to_library and w is not None:
            backward = functools.partial(_repeated, frame._replace(random=None), ctx.repeats)
            replay.learn(kind, given.random is not None, needs[:3], backward)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        frame = ctx.frame
        made = _repeated(frame, ctx.repeats, grad, saved_tensors(ctx, frame.codes_of or ""), frame.random)
        if frame.random is not None:
            frame.random[2:].add_(1)  # the step
        return (*made, None)


def _repeated(
    frame: Frame, repeats: Any, grad: Tensor, tensors: Sequence[Tensor | None], random: Tensor | None
) -> Sequence[Tensor | None]:
    """Return `_gradients`' results, from `repeats` where it knows the call."""
    if torch.is_grad_enabled():
        refuse_second_derivative()
    frame = frame._replace(random=random)
    if repeats is None or torch.compiler.is_compiling():  # as compiled autograd does
        return _gradients(frame, tensors, grad)
    return repeats(functools.partial(_gradients, frame, tensors, grad), [grad, *tensors, random])


def _gradients(frame: Frame, tensors: Sequence[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, w, bias and both learned scales, None where one is not asked for."""
    recipe, needs, saved = RECIPES[frame.recipe], frame.needs, restored(tensors, frame.layout)
    x, x_held, w, w_held = saved.x, saved.x_held, saved.w, saved.w_held
    x_as: Any = recipe.fprop_input
    random = None if frame.random is None else of_rank(frame.random, frame.rank)
    grad_MN = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)  # reshape(-1, 0) is ambiguous
    dx = dw = db = dx_scale = dw_scale = of_w = of_x = None
    if needs.x or needs.x_scale:
        columns = w if frame.w_columns else None if frame.fixed is None else _fixed_columns(frame, recipe, saved, grad)
        if columns is None:
            of_w = ops.Kept(w, recipe.dgrad, w_held, saved.measured)
        else:
            of_w = ops.Kept(columns, recipe.dgrad._replace(keeps="columns"))
    if needs.w or needs.w_scale:
        if isinstance(x, Tensor) and x.dim() != 2:
            x = x.reshape(-1, x.shape[-1])
        if recipe.wgrad.grad is None and recipe.wgrad.forward is None:
            dw = grad_MN.t() @ x  # no op: a compiler may know better
        else:
            of_x = ops.Kept(x, recipe.wgrad, x_held)
    if of_w is not None or of_x is not None:
        grad_held = None if frame.delayed is None else Scales(frame.delayed.factor[2:].view(1, 1))
        if frame.parts is None:
            made = ops.gradients(grad_MN, of_w, of_x, random, grad_held)
        else:
            made = gemms.of_parts(grad_MN, of_w, of_x, random, grad_held, frame.parts.dgrad, frame.parts.wgrad)
        dx, dw = made.dx, dw if of_x is None else made.dw

    if dx is not None:
        clipped = saved.clipped
        if needs.x_scale:
            dx_scale = ops.scale_grad(dx, x, x_as, x.shape[1], x_held.scale, x_held.zero)
            clipped = ops.saturated(x, x_as, x_as.format.rowwise(x_held, len(x)))
        if needs.x and (recipe.transform is not None or clipped is not None):
            dx = pulled_back(dx, x_as, x_held, clipped)
        dx = dx.reshape(frame.x_shape) if needs.x else None
    if dw is not None:
        w_as = recipe.fprop_weight
        if needs.w_scale:
            dw_scale = ops.scale_grad(dw, w, w_as, w.numel() // w_held.scale.numel(), w_held.scale, w_held.zero)
        dw = dw.to(frame.w_dtype) if needs.w else None
        if dw is not None and (recipe.transform is not None or recipe.weight_clips):
            clipped = ops.saturated(w, w_as, w_held) if recipe.weight_clips else None
            dw = pulled_back(dw, w_as, w_held, clipped)
    if needs.bias:
        assert frame.bias_dtype is not None
        db = ops.bgrad(grad_MN, frame.bias_dtype)
    if recipe.history and frame.delayed.history.numel():  # a report takes its history away
        found = reduced.largest(torch.cat((saved.amax, ops.absmax(grad_MN))))
        # codes take their scale when they are written (mastered.py)
        recipe.advance(frame.delayed, found, slice(0, 3, 2) if frame.codes_of is not None else slice(3))
    return dx, dw, db, dx_scale, dw_scale


def multiply(
    x: Tensor, w: Tensor | None, bias: Tensor | None, given: Given, needs: Needs = NO_GRADIENT
) -> tuple[Tensor, Saved]:
    """(y, the tensors that the gradients in `needs` read); without autograd."""
    recipe = RECIPES[given.recipe]
    x_as, w_as, dgrad, wgrad = recipe.fprop_input, recipe.fprop_weight, recipe.dgrad, recipe.wgrad
    x_held, w_held, fixed = given.x_held, given.w_held, given.fixed
    x_MK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    x_rows = None if x_held is None or x_as is None else x_as.format.rowwise(x_held, x_MK.shape[0])
    needs_dx, needs_dw = needs.x or needs.x_scale, needs.w or needs.w_scale

    # 1. The input's codes, and what the GEMM reads of it where one pass makes both; x where the product alone reads it.
    x_q: Tensor | Encoded = x
    values = columns = None
    if x_as is not None and (any(needs) or given.rows is not None or x_held is not None):
        rows, layer = given.rows, given.layer
        found = None if rows is None or rows.find is None or layer in rows.layers else rows.take(layer)
        if found is not None:
            x_q = found
        else:
            reads, col, multiple = "", None, 1
            if x_held is None and x.device.type in ONE_PASS:
                reads = "" if recipe.reads == "codes" else recipe.reads
                if needs_dw and recipe.reads_input_once and given.parts is None and not _has_columns(given):
                    col, multiple = wgrad.other, wgrad.multiple
            made = ops.encode(x_MK, x_as, col, x_rows, reads, multiple)
            x_q, values, columns = made.row.encoded, made.row.values, made.col and made.col.encoded  # type: ignore
            if rows is not None:
                rows.leave(x_q, layer, wgrad.keeps in ("rows", "square"))

    # 2. The product. W is encoded on the way, and its codes come back where backward reads them.
    made_anyhow = fixed is not None and dgrad.forward is not None and not recipe.weight_clips
    keeps_w = needs_dx and w is not None and (dgrad.keeps != "values" or made_anyhow)
    w_q: Any = given.packed if w is None else w
    if isinstance(w, GatheredWeight):
        w_q = w.rows
    elif w is not None and fixed is not None:
        w_q = fixed.rows(functools.partial(ops.codes, w, w_as, w_held))
    lead, strides = list(x.shape[:-1]), None
    if x_as is not None and recipe.contract == "dequantize" and not x.is_contiguous():
        strides = list(torch.empty_like(x, device="meta").stride())  # of an elementwise operation's result
    how = x_as, w_as, recipe.contract, lead, x.dtype, values, strides
    y, made_w, measured = ops.matmul(x_q, w_q, bias, *how, keeps_w, w_held)
    if not any(needs):
        return y, Saved()

    # 3. For backward. If W changes before it, autograd objects; so what was measured of it still holds there.
    kept_w = w if w is not None and not keeps_w else w_q if made_w is None else made_w
    if isinstance(w, GatheredWeight):
        kept_w = w.columns or w.rows
    kept_x: Tensor | Encoded | None = None
    if needs.x_scale:
        kept_x = x_MK
    elif needs_dw and wgrad.keeps == "columns":
        kept_x = _columns_of(x_MK, x_q, columns, recipe, given)
    elif needs_dw:
        kept_x = x_q if wgrad.keeps != "values" else x if x_as is None else x_MK
    reads_w = needs_dx or needs.w_scale or (needs.w and recipe.weight_clips)
    holds_x = needs.x_scale or (needs_dw and wgrad.keeps == "values" and wgrad.forward is not None)
    clips = recipe.input_clips and needs.x and not needs.x_scale
    amax = None
    if recipe.history and w is not None:
        amax = ops.absmax(x_MK)
        amax = torch.cat((amax, amax if isinstance(w, GatheredWeight) else ops.absmax(w)))
    return y, Saved(
        x=kept_x,
        w=kept_w if reads_w else None,
        x_held=x_held if x_held is None or holds_x else _transform_of(x_held) if needs.x else None,
        w_held=w_held if w_held is None or reads_w else _transform_of(w_held) if needs.w else None,
        measured=measured if needs_dx and x.device.type in ONE_PASS else None,
        clipped=ops.saturated(x_MK, x_as, x_rows) if clips and x_as is not None else None,
        amax=amax,
    )


def _has_columns(given: Given) -> bool:
    """Return whether a layer before this one may have left a column side of the input."""
    return given.columns is not None and given.columns.find is not None and given.layer not in given.columns.layers


def _columns_of(
    x_MK: Tensor, x_q: Tensor | Encoded, columns: Encoded | None, recipe: LinearRecipe, given: Given
) -> Encoded:
    """The column side of x that wgrad reads. x_q: the codes of forward. columns: the side, where it came with them."""
    found = None if given.columns is None else given.columns.take(given.layer)
    if found is not None:
        return found
    gemm = recipe.wgrad
    if columns is None:
        assert gemm.other is not None
        if isinstance(x_q, Encoded) and gemm.forward is not None:
            x_MK = ops.decode(x_q, gemm.forward, x_MK.dtype)
        if given.parts is not None:
            columns = gemms.columns(x_MK, gemm.other, gemm.multiple, given.parts.wgrad.b)
        else:
            made = ops.encode(x_MK, None, gemm.other, None, "", gemm.multiple).col
            assert made is not None
            columns = made.codes
    if given.columns is not None:
        given.columns.leave(columns, given.layer, True)
    return columns


def _fixed_columns(frame: Frame, recipe: LinearRecipe, saved: Any, grad: Tensor) -> Encoded | None:
    """The column side of a fixed weight; None where it is drawn anew, or is in high precision."""
    gemm = recipe.dgrad
    if gemm.other is None or gemm.other.draws:
        return None
    made: Encoded = frame.fixed.columns(
        grad.dtype, functools.partial(ops.Kept(saved.w, gemm, saved.w_held).columns, grad.dtype)
    )
    return made


def _transform_of(held: Scales) -> Scales | None:
    """The fitted transform alone, which pulls gradients back."""
    return None if held.transform is None else Scales(transform=held.transform)


def pulled_back(grad_RK: Tensor, operand: Operand | None, held: Scales | None, clipped: Tensor | None = None) -> Tensor:
    """The gradient of x from the gradient of its values: zero where `clipped`, then pulled back through the transform.

    held: holds the transform's matrices if it is fitted.
    """
    if operand is None or operand.transform is None:
        return grad_RK if clipped is None else ops.masked(grad_RK, clipped)
    return ops.pull_back(grad_RK, operand, None if held is None else held.transform, clipped)


@torch.compiler.disable  # backward communicates too, where a compiler would trace it
def _sharded(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    recipe: LinearRecipe,
    sides: tuple[sharding.HeldOperand, sharding.HeldOperand],
    random: Tensor | None,
    rank: int,
) -> Tensor:
    """A layer whose weight is a DTensor, and whose backward is quantised."""
    if recipe.history:
        raise ValueError("delayed scaling is not supported under tensor parallelism: use dynamic scales (fp8-hybrid)")
    if isinstance(random, DTensor):  # parallelize_module makes one of every buffer; the local tensor is the same memory
        random = random.to_local()
    on_shard = functools.partial(_on_shard, recipe, random=random, rank=rank)
    return sharding.linear(on_shard, x, w, bias, *sides, recipe)


def _on_shard(
    recipe: LinearRecipe,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    x_scales: Scales | None,
    w_scales: Scales | None,
    parts: Shards | None,
    random: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """Return one rank's part of a layer whose weight is a DTensor."""
    return quantized_linear(x, w, bias, recipe, x_scales, w_scales, random, parts=parts, rank=rank)
