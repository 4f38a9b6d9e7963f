"""Gradients of prepared layers beside those of the same layers in float: what a quantised backward costs, in dB.

The model runs forward and backward once. Then each layer alone is given the input x and the gradient dy that it met,
and its dx and dW are compared with those of its float weight, dx = dy W and dW = dy^T x, in float32. What is
differentiated is the loss that the model returns, or the mean square of its outputs. Gradients and states of the model
stay as they were; delayed scales do not advance.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.linear.prepared import DELAYED_STATE, RANDOM, QATLinear
from aoquant.report.measure import decibels, energies, hooked, logits_of, run


def gradients(model: nn.Module, batch: Any) -> dict[int, dict[str, Any]]:
    """Return dB of dx and dW as fields of a row, by the layer's id, for prepared linear layers that run."""
    layers = [m for m in model.modules() if isinstance(m, QATLinear) and m.fake_quant]
    with _untouched(layers), torch.enable_grad():
        return _measured(_met(model, layers, batch))


@contextmanager
def _untouched(layers: list[QATLinear]) -> Iterator[None]:
    """States of random numbers are as before afterwards; delayed scales have no history inside, and do not advance."""
    random = [(b, b.clone()) for m in layers if (b := m._buffers.get(RANDOM)) is not None]
    histories = [(m, b) for m in layers if (b := m._buffers.get(DELAYED_STATE[0])) is not None]
    for layer, history in histories:
        layer._buffers[DELAYED_STATE[0]] = history[:, :0]
    try:
        yield
    finally:
        for layer, history in histories:
            layer._buffers[DELAYED_STATE[0]] = history
        for state, before in random:
            state.copy_(before)


def _met(model: nn.Module, layers: list[QATLinear], batch: Any) -> list[tuple[QATLinear, Tensor, Tensor]]:
    """Return each call of a layer: the layer, its input and the gradient of its output."""
    calls: list[tuple[QATLinear, Tensor, Tensor]] = []

    def remember(layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()
        assert isinstance(layer, QATLinear)
        calls.append((layer, args[0].detach(), y))
        return y

    with hooked(layer.register_forward_hook(remember) for layer in layers):
        loss = _loss(run(model, batch))
    found = torch.autograd.grad(loss, [y for *_, y in calls], allow_unused=True) if calls else ()
    return [(layer, x, dy) for (layer, x, _), dy in zip(calls, found, strict=True) if dy is not None]


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", output.get("loss") if isinstance(output, Mapping) else None)
    return loss if isinstance(loss, Tensor) else logits_of(output).float().square().mean()


def _measured(met: list[tuple[QATLinear, Tensor, Tensor]]) -> dict[int, dict[str, Any]]:
    sums: dict[int, list[float]] = {}
    for layer, given, dy in met:
        x, w = (t.detach().clone().requires_grad_() for t in (given, layer.weight))
        y = torch.func.functional_call(layer, {"weight": w}, (x,))
        got = torch.autograd.grad(y, (x, w), dy)
        x_MK, dy_MN, w_NK = (t.detach().float() for t in (x.flatten(0, -2), dy.flatten(0, -2), w))
        want = (dy_MN @ w_NK).view(x.shape), dy_MN.t() @ x_MK
        found = [e for a, b in zip(want, got, strict=True) for e in energies(a, b.float())]
        known = sums.setdefault(id(layer), [0.0] * 4)
        sums[id(layer)] = [a + b for a, b in zip(known, found, strict=True)]
    return {
        key: {"input_gradient_sqnr_db": decibels(*s[:2]), "weight_gradient_sqnr_db": decibels(*s[2:])}
        for key, s in sums.items()
    }
