"""Experts under a backward of their own: grouped is the loop over experts, and experts are alike."""

from __future__ import annotations

import copy

import pytest
import torch
from support.expert_cases import FAMILIES, made, routed
from torch import Tensor, nn

from aoquant import HybridConfig, NVFP4WeightConfig, QATConfig, packed_experts, quantize_
from aoquant.linear.prepared import Prepared, QATLinear

MIXED = HybridConfig.bwd("mxfp8")
LOOPS = [
    *((family, None) for family in FAMILIES),
    *((family, backward) for family in ("mixtral", "gpt-oss") for backward in ("quartet2", MIXED)),
]


@pytest.mark.parametrize(("family", "backward"), LOOPS)
def test_23_prepared_is_a_loop_of_prepared_linear_layers(family: str, backward: str | HybridConfig | None) -> None:
    """Outputs and gradients; an expert without tokens has a zero gradient."""
    model, (x, index, weights) = made(family, "grouped_mm", torch.float32), routed(24, "random", torch.float32)
    plain = copy.deepcopy(model.experts)
    config = QATConfig(NVFP4WeightConfig(), step="prepare", backward=backward)
    quantize_(model, config)
    x.requires_grad_()
    model(x, index, weights).square().sum().backward()
    got = {name: p.grad for name, p in model.experts.named_parameters()} | {"x": x.grad}
    assert got["gate_up_proj"] is not None
    assert torch.count_nonzero(got["gate_up_proj"][3]) == torch.count_nonzero(got["down_proj"][3]) == 0
    assert all(torch.count_nonzero(got["gate_up_proj"][e]) for e in range(3))
    if backward == "quartet2":  # random numbers go by the order of the calls
        again = made(family, "grouped_mm", torch.float32)
        quantize_(again, config)
        again(x.detach(), index, weights).square().sum().backward()
        assert torch.equal(again.experts.gate_up_proj.grad, got["gate_up_proj"])
        return
    recipe = model.experts.stacks["gate_up_proj"].recipe

    def linear(w: Tensor, rows: Tensor) -> Tensor:
        layer = nn.Linear(*(w.shape if plain.is_transposed else w.shape[::-1]), bias=False)
        layer.weight = nn.Parameter((w.t() if plain.is_transposed else w).detach().contiguous())
        QATLinear.prepare(layer, Prepared(recipe, config, ""))
        layers.append(layer)
        y: Tensor = layer(rows)
        return y

    layers: list[nn.Linear] = []
    leaf = x.detach().requires_grad_()
    out = torch.zeros_like(leaf)
    for e in range(3):
        token, position = torch.where(index == e)
        y = linear(plain.gate_up_proj[e], leaf[token])
        y = plain._apply_gate(y + plain.gate_up_proj_bias[e] if plain.has_bias else y)
        y = linear(plain.down_proj[e], y)
        y = y + plain.down_proj_bias[e] if plain.has_bias else y
        y = plain.post_expert_norm(y) if hasattr(plain, "post_expert_norm") else y
        out = out.index_add(0, token, y * weights[token, position, None])
    torch.testing.assert_close(out, model(x, index, weights), rtol=1e-6, atol=1e-6)  # two addends a token
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, x.grad, rtol=1e-5, atol=1e-5)
    for e, name in [(e, name) for e in range(3) for name in ("gate_up_proj", "down_proj")]:
        grad = layers[2 * e + (name == "down_proj")].weight.grad
        assert grad is not None
        wanted = grad.t() if plain.is_transposed else grad
        torch.testing.assert_close(got[name][e], wanted, rtol=1e-5, atol=1e-5)


def test_23_mixed_experts_are_refused_with_the_index() -> None:
    experts = nn.ModuleList(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(3))
    for layer, recipe in zip(experts, ("nvfp4", "nvfp4", "mxfp4"), strict=True):
        quantize_(nn.Sequential(layer), recipe)
    with pytest.raises(ValueError, match=r"expert 2 is .*mxfp4.* and expert 0 .*nvfp4"):
        packed_experts([layer.weight.data for layer in experts])
