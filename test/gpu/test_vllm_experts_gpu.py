"""What the vLLM plugin computes for packed experts on a GPU: the bits of converted experts, and one CUDA graph for any
routing.
"""

from __future__ import annotations

import pytest
import torch
from support.gpu import captured
from support.moe_models import model_of
from torch.nn import functional as F

from aoquant import get_recipe, quantize_
from aoquant.integrations.vllm_experts import multiplied

pytestmark = pytest.mark.gpu
TOKENS = 48


def routing(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, two experts for each, and their weights, as vLLM's router gives them."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(TOKENS, 64, generator=g, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.randn(TOKENS, 8, generator=g, device="cuda").softmax(-1).topk(2)
    return x, ids.int(), weights


@pytest.mark.parametrize("recipe", ["int4-g32", "mxfp4-weight", "mxfp4-h32", "nvfp4", "fp8"])
def test_experts_in_vllm_are_converted_experts(recipe: str) -> None:
    model = model_of("mixtral").cuda().eval()
    model.set_experts_implementation("grouped_mm")
    quantize_(model, get_recipe(recipe).make())
    experts = model.model.layers[0].mlp.experts
    w13, w2 = experts.gate_up_proj, experts.down_proj
    x, ids, weights = routing(0)
    with torch.inference_mode():
        assert torch.equal(multiplied(x, ids, weights, w13, w2, F.silu), experts(x, ids.long(), weights))
    with torch.no_grad():
        graph, y = captured(lambda: multiplied(x, ids, weights, w13, w2, F.silu))
        for mine, other in zip((x, ids, weights), routing(1), strict=True):
            mine.copy_(other)
        graph.replay()
        assert torch.equal(y, experts(x, ids.long(), weights))
