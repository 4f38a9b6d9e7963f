"""The forward of all experts at once, as a GPU runs it, here over the ops' loops: to the bit the forward in a loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.expert_cases import CONFIGS, E, Holder, at_once, made, routed
from torch import Tensor

from aoquant import Hadamard, MXFP4WeightConfig, QATConfig, quantize_
from aoquant.experts import grouped_linear, packed_experts, stack

ONCE = {name: QATConfig(CONFIGS[name]) for name in ("int4", "nvfp4", "mxfp4")} | {
    "hadamard": QATConfig(MXFP4WeightConfig(transform=Hadamard(32)))
}
LOOPS = {  # which only a loop computes: one scale for all tokens, another contract, masks
    "int8-tensor": QATConfig(CONFIGS["int8-tensor"]),
    "intx": QATConfig(CONFIGS["intx"]),
    "clipped": QATConfig(MXFP4WeightConfig(), straight_through="clipped"),
}
families = pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])


def model_of(family: str) -> Holder:
    model: Holder = made(family, "grouped_mm")
    model.experts._is_expert_parallel = True  # type: ignore[assignment]  # routing names experts of other ranks
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Expert 3 has no tokens, and some tokens are another rank's."""
    x, index, weights = routed(16, "random")
    index[::5, 0] = E
    return x, index, weights


@pytest.fixture(name="at_once")
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)


@families
@pytest.mark.parametrize("name", ONCE | LOOPS)
def test_all_at_once_is_the_loop(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and dW to the bit; dx within its sum over a token's experts, which are two; the gradients of biases,
    which the loop rounds in every addition, within that.
    """
    loop, (x, index, weights) = model_of(family), batch()
    quantize_(loop, (ONCE | LOOPS)[name])
    once = copy.deepcopy(loop)
    results = []
    for model in (loop, once):
        if model is once:
            at_once(monkeypatch)
        given = x.clone().requires_grad_()
        y = model(given, index, weights)
        y.float().square().sum().backward()
        results.append((y, given.grad, {n: p.grad for n, p in model.named_parameters()}))
    (y, dx, dw), (y_once, dx_once, dw_once) = results
    assert torch.equal(y, y_once)
    torch.testing.assert_close(dx, dx_once, rtol=2.0**-7, atol=2.0**-7 * dx.abs().max().item())
    for part, grad in dw.items():
        assert torch.count_nonzero(dw_once[part][3]) == 0
        if part.endswith("_bias"):
            torch.testing.assert_close(dw_once[part], grad, rtol=2.0**-6, atol=2.0**-7 * grad.abs().max().item())
        elif name == "hadamard":
            torch.testing.assert_close(dw_once[part], grad)
        else:
            assert torch.equal(dw_once[part], grad), part


@families
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "float32 under autocast"])
@pytest.mark.parametrize("name", ONCE)
@pytest.mark.usefixtures("at_once")
def test_prepared_is_converted(name: str, family: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of(family), batch()
    if autocast:
        model = model.float()
        for p in model.parameters():
            p.data += 1e-4 * torch.randn_like(p)  # values that bfloat16 does not have
    quantize_(model, ONCE[name])
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return grouped_linear.grouped_at_once(*args)

    for module in (stack, packed_experts):
        monkeypatch.setattr(module, "grouped_at_once", counted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(*given)
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(*given), y)
    assert len(calls) == 4


@pytest.mark.usefixtures("at_once")
def test_a_frozen_stack_and_a_float_one() -> None:
    """No gradient that was not asked for; a parameter that is not prepared is multiplied as it is."""
    model, given = model_of("mixtral"), batch()
    quantize_(model, ONCE["int4"])
    e = model.experts
    e.gate_up_proj.requires_grad_(False)
    model(*given).float().sum().backward()
    assert e.gate_up_proj.grad is None and e.down_proj.grad is not None
    e.unprepare_stack("down_proj")
    y = model(*given)
    assert torch.isfinite(y).all() and torch.count_nonzero(y[::5]) > 0
