"""The linear layer: a recipe, and one autograd function.

A linear layer has three GEMMs with two operands each, and every operand may have a format of its own:

    fprop  y  = x  W^T     input, weight
    dgrad  dx = dy W       grad_output, weight
    wgrad  dW = dy^T x     grad_output, input

`LinearRecipe` has a slot for each of the six. Backward starts from the values that fprop used: it differentiates the function that
forward computed, and rounding itself passes the gradient straight through. Scales are constants: no gradient flows through an absmax.
A backward GEMM whose slots are None multiplies these values as they are; otherwise both its operands are quantised along the axis that
it contracts (`ops.backward`), by a format that may draw random numbers. Those are functions of a state that the layer keeps, which
backward alone reads and advances: forward may run twice, as under activation checkpointing, and nothing changes.

Scales are dynamic (made from what is encoded, each time), static (held by the layer, see held.py) or learned (held, and trained:
LSQ). The gradient of a learned scale needs x / s, so a layer whose input scale is learned saves x; and values that its codes clip
pass their gradient to the scale instead of to themselves.

A transform stands before the rounding of both operands of fprop, so the formats of the recipe are transformed ones. Backward multiplies in
the transformed domain, where the codes are, masks there what was clipped there, and pulls both gradients back: dx = dx' T, dW = dW' T^-T.

What is saved for backward: x itself when it is not quantised, its packed codes when it is (layers with one input share them, see
siblings.py), and never the weight's codes, which `ops.dgrad` makes again. A side that no GEMM will read (a frozen weight, an input
without gradient) is neither saved nor encoded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aoquant import ops
from aoquant.formats import FLOAT_DTYPES, Affine, Format, HighPrecision, Int4, Randomized, Scales, Transformed
from aoquant.layers import shared_inputs as siblings
from aoquant.parallel import linear as sharding
from aoquant.transforms import Transform

STRAIGHT_THROUGH = ("identity", "clipped")
SCALES = ("dynamic", "static", "learned")
NOT_CALIBRATED = (
    "static scales, or a fitted transform, have no values yet: call aoquant.calibrate(model, forward_loop) before training, or load a "
    "state_dict"
)


@dataclass(frozen=True)
class LinearRecipe:
    """Formats of a linear layer's six operands, and the kernel contract of its forward. None is high precision.

    fprop_input, fprop_weight: formats along K.
    contract: one of `ops.CONTRACTS`: which deployed kernel the forward equals.
    straight_through: "identity", or "clipped": no gradient for values that the format's largest code clips.
    input_scales, weight_scales: "dynamic", "static" or "learned".
    transform: of both operands before they are rounded; its formats are behind it then ("hadamard16+nvfp4"), or are put there.
    dgrad_*, wgrad_*: formats of a backward GEMM's operands, along the axis that it contracts; equal, or both None.

    Two fields follow from these, and are there because a forward reads them, for which properties are slow (compiled code looks at each anew):
    words: what `_QuantizedLinear` is told: names of input format, weight format and contract; which sides clip gradients; `backward_names`;
    whether W's outer scale is found anew each time. holds: whether the layer holds scales, static or learned ones, or a fitted transform.
    """

    fprop_input: Format | None
    fprop_weight: Format
    contract: str = "aoquant"
    straight_through: str = "identity"
    input_scales: str = "dynamic"
    weight_scales: str = "dynamic"
    dgrad_grad_output: Format | None = None
    dgrad_weight: Format | None = None
    wgrad_grad_output: Format | None = None
    wgrad_input: Format | None = None
    transform: Transform | None = None
    words: tuple[str, str, str, bool, bool, str, str, bool] = field(init=False, repr=False, compare=False)
    holds: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._put_behind_transform()
        if self.contract not in ops.CONTRACTS:
            raise ValueError(f"no GEMM contract is called {self.contract!r}; choose one of {', '.join(ops.CONTRACTS)}")
        if self.straight_through not in STRAIGHT_THROUGH:
            raise ValueError(f"straight_through is one of {', '.join(STRAIGHT_THROUGH)}, got {self.straight_through!r}")
        for gemm, (first, second) in self._backward_slots().items():
            if isinstance(first, Transformed) and (first.transform.sided or first.fitted):
                raise ValueError(
                    f"{first.transform} does not cancel in {gemm}'s product: use rht{first.transform.size}+{first.base.name}"
                )
            if first != second:
                names = " and ".join(f.name if f else "high precision" for f in (first, second))
                raise ValueError(
                    f"the two operands of {gemm} have one format, or both stay in high precision, got {names}"
                )
        for side, format, scales in self._sides():
            if reason := self._why_not(side, format, scales):
                raise ValueError(reason)
        clips = [self.straight_through == "clipped" or scales == "learned" for _, _, scales in self._sides()]
        forward = self.input_name, self.fprop_weight.name, self.contract
        words = *forward, *clips, *self.backward_names, ops.finds_outer(self.fprop_weight)
        object.__setattr__(self, "words", words)
        holds = self.fitted or (self.input_scales, self.weight_scales) != ("dynamic", "dynamic")
        object.__setattr__(self, "holds", holds)

    def _put_behind_transform(self) -> None:
        """Give both formats the one transform that the recipe or either of them has."""
        formats = (self.fprop_input, self.fprop_weight)
        found = {f.transform for f in formats if isinstance(f, Transformed)} | {self.transform} - {None}
        if not found:
            return
        if len(found) > 1 or self.contract != "aoquant":
            raise ValueError(
                f"one transform stands before both operands of the aoquant GEMM, got {' and '.join(sorted(str(t) for t in found))} "
                f"with the contract {self.contract}: give one transform, and a config of aoquant's"
            )
        transform = found.pop()
        assert transform is not None
        x, w = ((f or HighPrecision()).base for f in formats)
        object.__setattr__(self, "transform", transform)
        object.__setattr__(self, "fprop_input", Transformed(x, transform))
        object.__setattr__(self, "fprop_weight", Transformed(w, transform, inverse=True))
        if transform.fitted and (self.input_scales, self.weight_scales) != ("dynamic", "dynamic"):
            raise ValueError(
                f"{transform} with static or learned scales would be calibrated twice, scales after the transform: use dynamic scales, "
                "or a Hadamard transform"
            )

    def _sides(self) -> tuple[tuple[str, Format | None, str], ...]:
        return ("input", self.fprop_input, self.input_scales), ("weight", self.fprop_weight, self.weight_scales)

    def _backward_slots(self) -> dict[str, tuple[Format | None, Format | None]]:
        return {
            "dgrad": (self.dgrad_grad_output, self.dgrad_weight),
            "wgrad": (self.wgrad_grad_output, self.wgrad_input),
        }

    def _why_not(self, side: str, format: Format | None, scales: str) -> str | None:
        """Why a side cannot have its format, or its scales cannot be held; None when they can."""
        if isinstance(format, Randomized):
            return f"{format.name} rounds at random, and a deployed layer does not: it is for backward, not for the {side} of forward"
        if scales not in SCALES:
            return f"{side}_scales is one of {', '.join(SCALES)}, got {scales!r}"
        if scales == "dynamic":
            return None
        if side == "input" and (format is None or not format.per_tensor):
            return (
                f"{scales} activation scales need a format with one scale for the whole tensor, such as int8-tensor, "
                f"int8-tensor-asym, fp8-tensor or nvfp4 (its outer scale), got {format.name if format else 'high precision'}"
            )
        if scales == "learned" and not (isinstance(format, Affine) and not format.fixed):
            return (
                f"learned scales are for integers (int8, intx), got {format.name if format else 'high precision'} for the {side}: "
                "a float's rounding is relative and hardly depends on its scale, and int4 stores a rounded minimum; use scales='static'"
            )
        assert format is not None
        try:
            format.measure(torch.empty(1, format.block or 1, dtype=torch.float32, device="meta"))
        except ValueError as error:  # scales and codes that are fitted to each other
            return str(error)
        if self.straight_through == "clipped" and isinstance(format, Int4):
            return f"{format.name} with held scales has no clipped straight-through: use straight_through='identity'"
        return None

    @property
    def deployed(self) -> LinearRecipe:
        """What convert leaves of the recipe: how it was trained is forgotten."""
        return dataclasses.replace(
            self,
            straight_through="identity",
            dgrad_grad_output=None,
            dgrad_weight=None,
            wgrad_grad_output=None,
            wgrad_input=None,
            weight_scales="dynamic",
            input_scales="dynamic" if self.input_scales == "dynamic" else "static",
        )

    @property
    def fitted(self) -> bool:
        """Whether the layer holds the matrices of a fitted transform."""
        return self.transform is not None and self.transform.fitted

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's codes and scales are the same alone and in any batch: quantised by themselves, under held scales, or not at all."""
        return self.fprop_input is None or self.fprop_input.batch_invariant or self.input_scales != "dynamic"

    @property
    def draws(self) -> bool:
        """Whether backward draws random numbers."""
        return any(isinstance(f, Randomized) for pair in self._backward_slots().values() for f in pair)

    @property
    def backward_names(self) -> tuple[str, str]:
        """Names of the formats of dgrad and of wgrad, "" for high precision."""
        dgrad, wgrad = (first.name if first else "" for first, _ in self._backward_slots().values())
        return dgrad, wgrad

    @property
    def input_name(self) -> str:
        """Name of the input's format, "" for high precision."""
        return self.fprop_input.name if self.fprop_input else ""

    def __str__(self) -> str:
        weight, x = (f"-{s}" if s != "dynamic" else "" for s in (self.weight_scales, self.input_scales))
        dgrad, wgrad = (name or "high precision" for name in self.backward_names)
        backward = f", dgrad={dgrad}, wgrad={wgrad}" if any(self.backward_names) else ""
        return f"weight={self.fprop_weight.name}{weight}, input={self.input_name or 'high precision'}{x}, gemm={self.contract}{backward}"


def check_width(x: Tensor, k: int) -> None:
    """Raise ValueError unless x has K values in its last dimension."""
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"the layer's input needs K = {k} values in its last dimension, got shape {tuple(x.shape)}")


def check_device(x: Tensor, w: Tensor) -> None:
    """Raise ValueError when input and weight are apart: one of them on meta would make the ops return uninitialised memory."""
    if x.device != w.device:
        empty = "; a weight on meta holds no values: load the checkpoint first" if w.is_meta else ""
        raise ValueError(f"the layer's input is on {x.device} and its weight on {w.device}: move one of them{empty}")


def cast(x: Tensor) -> Tensor:
    """x in the dtype that a linear layer computes in: its own, or autocast's."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def quantized_linear(
    x: Tensor,
    w: Sequence[Tensor],
    bias: Tensor | None,
    recipe: LinearRecipe,
    k: int,
    x_scales: Scales | None = None,
    w_scales: Scales | None = None,
    random: Tensor | None = None,
) -> Tensor:
    """y (..., N) = x (..., K) times a quantised weight, plus bias, differentiable in x, a high-precision weight, bias and scales.

    w: [W] (N, K), encoded in the call (QAT), or the four parts of a packed weight (inference). x_scales, w_scales: what the layer
    holds where the recipe says static or learned, or fitted; for a shard, the scales of its whole (DTensors go to `sharding.linear`). Under
    autocast x and y take autocast's dtype; the weight is encoded from its stored dtype. random: the state of the layer's random
    numbers (`formats.Random`), where its backward draws.

    Raises:
        ValueError: x is no float32, bfloat16 or float16 tensor of width K, is on another device than the weight, or the recipe's
            kernel cannot take its dtype.
    """
    check_width(x, k)
    check_device(x, w[0])
    given, x = x, cast(x)
    if sharding.is_sharded(x, *w):
        if any(recipe.backward_names):
            raise ValueError(
                "a quantised backward contracts whole rows, and the layer's weight is sharded by tensor parallelism: leave the layer "
                "out of the plan of parallelize_module (fully_shard is supported), or prepare it without backward="
            )
        on_shard = functools.partial(_on_shard, recipe)
        return sharding.linear(on_shard, x, w[0], bias, (recipe.fprop_input, x_scales), (recipe.fprop_weight, w_scales))
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"the layer's input must be float32, bfloat16 or float16, got {x.dtype}: cast it or use autocast"
        )
    words = recipe.words
    x_name, contract = words[0], words[2]
    reason = ops.input_error(contract, x.dtype, w[0].dtype if len(w) == 1 else w[1].dtype)
    if reason is not None:
        raise ValueError(reason)
    scales = (*(x_scales or (None,) * 4), *(w_scales or (None,) * 4))
    slot = None
    if x_name and x_scales is None and len(w) == 1:
        slot = siblings.slot(given, x.dtype, x_name, w[0])
    return _applied(x, bias, *scales, k, words, random, slot, *w)


@torch.compiler.allow_in_graph
def _applied(*arguments: Any) -> Tensor:
    """`_QuantizedLinear`. A compiler takes it as one call, and traces the ops that it makes instead of the Python that makes them: whatever
    that Python reads would be looked at again before every compiled step.
    """
    y: Tensor = _QuantizedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


def _on_shard(
    recipe: LinearRecipe, x: Tensor, w: Tensor, bias: Tensor | None, x_scales: Scales | None, w_scales: Scales | None
) -> Tensor:
    """One rank's part of a layer whose weight is a DTensor."""
    return quantized_linear(x, [w], bias, recipe, w.shape[1], x_scales, w_scales)


class _QuantizedLinear(torch.autograd.Function):
    """Forward under the recipe's contract; backward straight through the rounding. Arguments as in `quantized_linear`.

    xs, xz, xo, xt, ws, wz, wo, wt: held scale, zero, outer and transform of input and weight, where there are any.
    words: see `LinearRecipe`. random: advanced by one in backward. slot: see siblings.py.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        xs: Tensor | None,
        xz: Tensor | None,
        xo: Tensor | None,
        xt: Tensor | None,
        ws: Tensor | None,
        wz: Tensor | None,
        wo: Tensor | None,
        wt: Tensor | None,
        k: int,
        words: tuple[str, str, str, bool, bool, str, str, bool],
        random: Tensor | None,
        slot: siblings.Slot | None,
        *w: Tensor,
    ) -> Tensor:
        x_name, w_name, contract, x_clip, w_clip, dgrad, wgrad, finds_outer = words
        x_held, w_held = (xs, xz, xo, xt), (ws, wz, wo, wt)
        lead, direct = list(x.shape[:-1]), ops.direct(x, bias, *w)
        x_MK = x if x.dim() == 2 else x.reshape(-1, k)
        x_parts: tuple[Tensor | None, ...] = (x,)
        if x_name:
            shared = None if slot is None else slot.get()
            x_parts = shared or _encoded(direct, x_MK, x_name, x_held, ops.reads(contract))
            if shared and not direct:  # a sibling may have left out what is missing, where an op wants tensors
                x_parts = ops.filled(shared)
        w_parts: Sequence[Tensor | None] = w
        if len(w) == 1 and not (_one_pass(w[0]) and ws is wz is wo is wt is None):
            w_parts = _encoded(
                direct, w[0], w_name, w_held, "codes"
            )  # elsewhere the GEMM makes its operand of W itself
        strides = _dense_strides(x) if x_name and contract == "dequantize" and not x.is_contiguous() else None
        needs_x, needs_bias, needs_xs, _, _, _, needs_ws, *_, needs_w = ctx.needs_input_grad[:_FIXED]
        arguments = x_parts, w_parts, bias, x_name, w_name, contract, lead, k, x.dtype, strides
        if direct or (len(w_parts) == 1 and needs_x and finds_outer):
            y, measured = ops.run(direct, ops.scaled_mm_measuring, *arguments)
        else:
            y, measured = ops.scaled_mm(*arguments), None
        x_parts = x_parts[:4]  # the values that the GEMM read are not kept
        if slot is not None and shared is None:
            slot.put(x_parts)

        # if W changes before backward, autograd objects, so what was measured of it still holds there
        saved_w = [*w, *w_held, measured] if needs_x or needs_xs or needs_ws or (needs_w and w_clip) else []
        saved_x: list[Tensor | None] = []
        if needs_xs:
            saved_x = [x_MK, *x_held]
        elif needs_w or needs_ws:
            saved_x = [*x_parts]
        saved_mask = []
        if x_clip and x_name and needs_x and not needs_xs:
            saved_mask = [ops.saturated(x_MK, x_name, *x_held)]
        matrices = [xt if needs_x else None, wt if needs_w else None]  # for pulling gradients back
        ctx.save_for_backward(*matrices, *saved_w, *saved_x, *saved_mask)
        ctx.split = len(saved_w), len(saved_w) + len(saved_x)
        ctx.x_shape, ctx.k, ctx.x_name, ctx.w_name, ctx.w_clip = x.shape, k, x_name, w_name, w_clip
        ctx.needs = (needs_x, needs_bias, needs_xs, needs_ws, needs_w)
        ctx.slots, ctx.random = (dgrad, wgrad), random  # not saved: several calls of a step advance one state in place
        ctx.w_dtype, ctx.bias_dtype = w[0].dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        xt, wt, *rest = ctx.saved_tensors
        saved: tuple[Any, ...] = tuple(rest)
        first, second = ctx.split
        saved_w, saved_x, mask = saved[:first], saved[first:second], saved[second:]
        needs_x, needs_bias, needs_xs, needs_ws, needs_w = ctx.needs
        w, w_held, measured = saved_w[:-5], saved_w[-5:-1], saved_w[-1:]
        x, x_held = (saved_x[:1], saved_x[1:]) if needs_xs else (saved_x, ())
        grad_MN = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)  # reshape(-1, 0) is ambiguous
        direct = ops.direct(grad, *w)
        dx = dw = db = dxs = dws = None
        if needs_x or needs_xs:
            dx = ops.run(direct, ops.dgrad, grad_MN, w, ctx.w_name, ctx.k, *w_held, ctx.slots[0], ctx.random, *measured)
            if needs_xs:
                dxs = ops.scale_grad(dx, x[0], ctx.x_name, ctx.k, *x_held[:2])
                mask = (ops.saturated(x[0], ctx.x_name, *x_held),)
            dx = pulled_back(dx, ctx.x_name, xt, *mask) if needs_x else None
            dx = dx if dx is None or len(ctx.x_shape) == 2 else dx.reshape(ctx.x_shape)
        if needs_w or needs_ws:
            if not ctx.x_name:
                x = (x[0].reshape(-1, ctx.k),)
            if ctx.x_name or ctx.slots[1]:
                x_held = x_held or (None,) * 4
                x = ops.filled(x) if not direct and len(x) == 4 else x
                dw = ops.run(direct, ops.wgrad, grad_MN, x, ctx.x_name, ctx.k, *x_held, ctx.slots[1], ctx.random)
            else:
                dw = grad_MN.t() @ x[0]
            if needs_ws:
                dws = ops.scale_grad(dw, w[0], ctx.w_name, w[0].numel() // w_held[0].numel(), *w_held[:2])
            dw = dw.to(ctx.w_dtype) if needs_w else None
            if dw is not None:
                mask = (ops.saturated(w[0], ctx.w_name, *w_held),) if ctx.w_clip else ()
                dw = pulled_back(dw, ctx.w_name, wt, *mask)
        if needs_bias:
            db = ops.run(direct, ops.bgrad, grad_MN, ctx.bias_dtype)
        if ctx.random is not None:
            ctx.random[2:].add_(1)  # the step
        others = [None] * (len(ctx.needs_input_grad) - _FIXED)
        return dx, db, dxs, None, None, None, dws, *[None] * (_FIXED - 8), dw, *others


_FIXED = 15  # arguments of `_QuantizedLinear.forward` up to the weight, or the first part of a packed one


def _one_pass(x_RK: Tensor) -> bool:
    """Whether what a GEMM reads of x is best made together with its codes: on a GPU, where a pass over x is what costs."""
    return x_RK.is_cuda


def _encoded(
    direct: bool, x_RK: Tensor, name: str, held: Sequence[Tensor | None], reads: str
) -> tuple[Tensor | None, ...]:
    """The four parts of x; where both come of one pass, also what the GEMM reads of it, unless that is the codes."""
    if reads == "codes" or not _one_pass(x_RK) or any(t is not None for t in held):
        return ops.run(direct, ops.encode, x_RK, name, *held)
    return ops.run(direct, ops.quantize, x_RK, name, reads == "operand")


def _dense_strides(x: Tensor) -> list[int]:
    """Strides of the result of an elementwise operation on x."""
    return list(torch.empty_like(x, device="meta").stride())


def pulled_back(grad_RK: Tensor, name: str, matrix: Tensor | None, clipped: Tensor | None = None) -> Tensor:
    """The gradient of an operand from that of its values, zero where they were `clipped`; through the transform, if there is one."""
    if not Transformed.named(name):
        return grad_RK if clipped is None else ops.masked(grad_RK, clipped)
    pulled: Tensor = ops.run(ops.direct(grad_RK, matrix), ops.pull_back, grad_RK, name, matrix, clipped)
    return pulled
