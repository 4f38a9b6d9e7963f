"""Gradients for the input of torchao's packed layers, which an adapter below them needs.

torchao's tensors are made for inference: the integer kernels return a y without a gradient, silently, and the fp8 ones
have no derivative. Such layers get a forward hook that keeps y, bit for bit, and differentiates it as y = x W^^T + b:
dx = dy W^, straight through the activation's rounding. Codes are kept for backward and decoded there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.linear.checks import cast
from aoquant.linear.tensor import PackedTensor
from aoquant.quantize import config_of
from aoquant.report.measure import has_value, packed_value


def mend(model: nn.Module) -> None:
    """Give every linear layer of `model` that `aoquant.quantize_` packed into a torchao tensor an input gradient."""
    for name, module in model.named_modules():
        ours = isinstance(module, nn.Linear) and config_of(module) is not None
        if ours and not any(isinstance(h, _Gradient) for h in module._forward_hooks.values()):
            module.register_forward_hook(_Gradient(name))


@dataclass(frozen=True)
class _Gradient:
    """A forward hook. fqn: the layer's name, for errors."""

    fqn: str

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        """y with a gradient."""
        w, bias = layer.weight, layer.bias
        trains = inputs[0].requires_grad or (bias is not None and bias.requires_grad)
        if isinstance(w, PackedTensor) or config_of(layer) is None or not (trains and torch.is_grad_enabled()):
            return None
        if not has_value(w):
            raise ValueError(
                f"{self.fqn}: a gradient has to pass through its {type(w).__name__}, which has no dequantize() to "
                "make one with: train adapters on another format, or on the prepared model"
            )
        return _InputGradient.apply(cast(inputs[0]), bias, y.detach(), w)  # type: ignore[no-untyped-call]


class _InputGradient(torch.autograd.Function):
    """y as it is; backward is that of x W^T + b with the values of the packed W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, y: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (w,), (x_dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        dx = (grad @ packed_value(w).to(grad.dtype)).to(x_dtype) if needs_x else None
        db = grad.flatten(0, -2).sum(0).to(bias_dtype) if needs_bias else None
        return dx, db, None, None
