"""The linear layer: a recipe, one autograd function, and the module that prepare swaps in.

A linear layer has three GEMMs with two operands each, and every operand may have a format of its own:

    fprop  y  = x  W^T     input, weight
    dgrad  dx = dy W       grad_output, weight
    wgrad  dW = dy^T x     grad_output, input

`LinearRecipe` has a slot for each of the six. Today the four backward slots stay in high precision, with the values that fprop used:
backward differentiates the function that forward computed, and rounding itself passes the gradient straight through. Scales are
constants: no gradient flows through an absmax.

What is saved for backward: x itself when it is not quantised, its packed codes when it is, and never the weight's codes, which
`ops.dgrad` makes again. A side that no GEMM will read (a frozen weight, an input without gradient) is neither saved nor encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aoquant import ops
from aoquant.formats import FLOAT_DTYPES, Format, layout

STRAIGHT_THROUGH = ("identity", "clipped")


@dataclass(frozen=True)
class LinearRecipe:
    """Formats of a linear layer's six operands, and the kernel contract of its forward. None is high precision.

    fprop_input, fprop_weight: formats along K.
    contract: one of `ops.CONTRACTS`: which deployed kernel the forward equals.
    straight_through: "identity", or "clipped": no gradient for values that the format's largest code clips.
    dgrad_*, wgrad_*, transform: seams for per-direction formats and for transforms; only None exists today.
    """

    fprop_input: Format | None
    fprop_weight: Format
    contract: str = "aoquant"
    straight_through: str = "identity"
    dgrad_grad_output: Format | None = None
    dgrad_weight: Format | None = None
    wgrad_grad_output: Format | None = None
    wgrad_input: Format | None = None
    transform: str | None = None

    def __post_init__(self) -> None:
        if self.contract not in ops.CONTRACTS:
            raise ValueError(f"no GEMM contract is called {self.contract!r}; choose one of {', '.join(ops.CONTRACTS)}")
        if self.straight_through not in STRAIGHT_THROUGH:
            raise ValueError(f"straight_through is one of {', '.join(STRAIGHT_THROUGH)}, got {self.straight_through!r}")
        for slot in ("dgrad_grad_output", "dgrad_weight", "wgrad_grad_output", "wgrad_input", "transform"):
            if getattr(self, slot) is not None:
                raise ValueError(
                    f"{slot} must be None in this version (high precision, no transform), got {getattr(self, slot)}"
                )

    @property
    def input_name(self) -> str:
        """Name of the input's format, "" for high precision."""
        return self.fprop_input.name if self.fprop_input else ""

    def __str__(self) -> str:
        return f"weight={self.fprop_weight.name}, input={self.input_name or 'high precision'}, gemm={self.contract}"


def quantized_linear(x: Tensor, w: Sequence[Tensor], bias: Tensor | None, recipe: LinearRecipe, k: int) -> Tensor:
    """y (..., N) = x (..., K) times a quantised weight, plus bias, differentiable in x, a high-precision weight, and bias.

    w: [W] (N, K), encoded in the call (QAT), or the four parts of a packed weight (inference). Under autocast x and y take
    autocast's dtype; the weight is encoded from its stored dtype.

    Raises:
        ValueError: x is no float32, bfloat16 or float16 tensor of width K, or the recipe's kernel cannot take its dtype.
    """
    if x.shape[-1] != k:
        raise ValueError(f"the layer's input needs K = {k} values in its last dimension, got shape {tuple(x.shape)}")
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"the layer's input must be float32, bfloat16 or float16, got {x.dtype}: cast it or use autocast"
        )
    if recipe.contract in ops.BFLOAT16_ONLY and x.dtype != torch.bfloat16:
        kernel, instead = ops.BFLOAT16_ONLY[recipe.contract]
        raise ValueError(
            f"{kernel} takes bfloat16 activations, got {x.dtype}: run the model in bfloat16, or under "
            f"torch.autocast(dtype=torch.bfloat16), or use {instead}, which takes any dtype"
        )
    names = (recipe.input_name, recipe.fprop_weight.name, recipe.contract, recipe.straight_through)
    return _QuantizedLinear.apply(x, bias, k, *names, *w)  # type: ignore[no-untyped-call]


class _QuantizedLinear(torch.autograd.Function):
    """Forward under the recipe's contract; backward straight through the rounding. Arguments as in `quantized_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, k: int, x_name: str, w_name: str, contract: str, ste: str, *w: Tensor
    ) -> Tensor:
        lead = list(x.shape[:-1])
        x_parts = ops.encode(x.reshape(-1, k), x_name) if x_name else (x,)
        w_parts = ops.encode(w[0], w_name) if len(w) == 1 else w
        strides = _dense_strides(x) if x_name and contract == "dequantize" and not x.is_contiguous() else None
        y = ops.scaled_mm(x_parts, w_parts, bias, x_name, w_name, contract, lead, k, x.dtype, strides)

        needs_x, needs_bias, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[7]
        clip = ste == "clipped"
        saved: list[Tensor] = [*w] if needs_x or (needs_w and clip) else []
        ctx.saved_w = len(saved)
        saved += x_parts if needs_w else ()
        if clip and x_name and needs_x:
            saved.append(ops.saturated(x.reshape(-1, k), x_name))
        ctx.save_for_backward(*saved)
        ctx.x_shape, ctx.k, ctx.x_name, ctx.w_name, ctx.clip = x.shape, k, x_name, w_name, clip
        ctx.needs = (needs_x, needs_w, needs_bias)
        ctx.w_dtype, ctx.bias_dtype = w[0].dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        w, rest = saved[: ctx.saved_w], saved[ctx.saved_w :]
        needs_x, needs_w, needs_bias = ctx.needs
        grad_MN = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if needs_x:
            dx = ops.dgrad(grad_MN, w, ctx.w_name, ctx.k)
            if ctx.clip and ctx.x_name:
                dx = _masked(dx, rest[-1])
            dx = dx.reshape(ctx.x_shape)
        if needs_w:
            if ctx.x_name:
                dw = ops.wgrad(grad_MN, rest[:4], ctx.x_name, ctx.k)
            else:
                dw = grad_MN.t() @ rest[0].reshape(-1, ctx.k)
            dw = dw.to(ctx.w_dtype)
            if ctx.clip:
                dw = _masked(dw, ops.saturated(w[0], ctx.w_name))
        if needs_bias:
            db = ops.bgrad(grad_MN, ctx.bias_dtype)
        return dx, db, None, None, None, None, None, dw, *[None] * (len(ctx.needs_input_grad) - 8)


def _dense_strides(x: Tensor) -> list[int]:
    """Strides of the result of an elementwise operation on x."""
    return list(torch.empty_like(x, device="meta").stride())


def _masked(grad_RK: Tensor, saturated_bits: Tensor) -> Tensor:
    """Zero the gradient of clipped values."""
    return grad_RK.masked_fill(layout.unpack(saturated_bits, 1, grad_RK.shape[1]).bool(), 0)


@dataclass(frozen=True)
class Prepared:
    """What prepare leaves on a module: the recipe, the config that convert must be given, and the layer's name for errors."""

    recipe: LinearRecipe
    config: Any
    fqn: str


class QATLinear(nn.Linear):
    """nn.Linear whose forward computes what the converted layer will compute.

    Made by swapping the class of an existing nn.Linear in place, so parameters, state_dict keys, hooks, attributes, mode and
    tying stay as they were. `fake_quant = False` switches it back to a plain linear for as long as you like.
    """

    prepared: Prepared
    fake_quant: bool

    @classmethod
    def prepare(cls, linear: nn.Linear, prepared: Prepared) -> QATLinear:
        """Swap `linear`'s class in place."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.prepared, linear.fake_quant = prepared, True
        return linear

    def unprepare(self) -> nn.Linear:
        """Swap back to a plain nn.Linear in place."""
        del self.prepared, self.fake_quant
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not self.fake_quant:
            return F.linear(x, self.weight, self.bias)
        try:
            return quantized_linear(x, [self.weight], self.bias, self.prepared.recipe, self.in_features)
        except ValueError as error:
            raise ValueError(f"{self.prepared.fqn or 'linear'}: {error}") from None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.prepared.recipe}{'' if self.fake_quant else ', fake_quant=False'}"


def set_fake_quant(model: nn.Module, enabled: bool) -> int:
    """Switch fake quantisation of every prepared layer in `model`; returns how many there are."""
    layers = [m for m in model.modules() if isinstance(m, QATLinear)]
    for layer in layers:
        layer.fake_quant = enabled
    return len(layers)
