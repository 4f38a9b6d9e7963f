"""The forward of all experts at once, as a GPU runs it, here over the ops' loops: to the bit the forward in a loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from aoquant import Int4WeightConfig, MXFP4WeightConfig, NVFP4WeightConfig, QATConfig, quantize_
from aoquant.formats import get_operand
from aoquant.layers import experts, grouped, packed_experts
from aoquant.layers.grouped import why_not_at_once
from aoquant.layers.recipe import LinearRecipe
from aoquant.ops import grouped as grouped_ops
from aoquant.transforms import Hadamard

H, WIDTH, E = 64, 96, 4
MADE: dict[str, Any] = {
    "mixtral": lambda: MixtralExperts(MixtralConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
    "gpt-oss": lambda: GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=WIDTH, num_local_experts=E)),
}
CONFIGS = {
    "int4": Int4WeightConfig(32),
    "nvfp4": NVFP4WeightConfig(),
    "mxfp4": MXFP4WeightConfig(),
    "hadamard": MXFP4WeightConfig(transform=Hadamard(32)),
}


def made(family: str) -> Any:
    torch.manual_seed(0)
    layer = MADE[family]().to(torch.bfloat16)
    layer.config._experts_implementation = "grouped_mm"
    layer._is_expert_parallel = True  # what transformers sets on a rank whose routing names other ranks' experts
    for p in layer.parameters():
        p.data.normal_(0, 0.2)
    return nn.ModuleDict({"experts": layer})


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights. Expert 3 has no tokens, and some tokens are another rank's."""
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(16)])
    index[::5, 0] = E
    return torch.randn(16, H).bfloat16(), index, torch.rand(16, 2).bfloat16()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the device is not asked."""
    monkeypatch.setattr(grouped_ops, "why_not", lambda *args: None)


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_all_at_once_is_the_loop(config: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and dW to the bit; dx within its sum over a token's experts, which are two; the gradients of biases,
    which the loop rounds in every addition, within that.
    """
    loop, (x, index, weights) = made(family), routed()
    quantize_(loop, QATConfig(config, step="prepare"))
    once = copy.deepcopy(loop)
    results = []
    for model in (loop, once):
        if model is once:
            monkeypatch.setattr(grouped_ops, "why_not", lambda *args: None)
        given = x.clone().requires_grad_()
        y = model["experts"](given, index, weights)
        y.float().square().sum().backward()
        results.append((y, given.grad, {n: p.grad for n, p in model.named_parameters()}))
    (y, dx, dw), (y_once, dx_once, dw_once) = results
    assert torch.equal(y, y_once)
    torch.testing.assert_close(dx, dx_once, rtol=2.0**-7, atol=2.0**-7 * dx.abs().max().item())
    for name, grad in dw.items():
        assert torch.count_nonzero(dw_once[name][3]) == 0
        if name.endswith("_bias"):
            torch.testing.assert_close(dw_once[name], grad, rtol=2.0**-6, atol=2.0**-7 * grad.abs().max().item())
        elif CONFIGS["hadamard"] is config:
            torch.testing.assert_close(dw_once[name], grad)
        else:
            assert torch.equal(dw_once[name], grad), name


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "float32 under autocast"])
@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("at_once")
def test_prepared_is_converted(config: Any, family: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made(family), routed()
    if autocast:
        model = model.float()
        for p in model.parameters():
            p.data += 1e-4 * torch.randn_like(p)  # values that bfloat16 does not have
    quantize_(model, QATConfig(config, step="prepare"))
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return grouped.grouped_at_once(*args)

    for module in (experts, packed_experts):
        monkeypatch.setattr(module, "grouped_at_once", counted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model["experts"](*batch)
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model["experts"](*batch), y)
    assert len(calls) == 4


@pytest.mark.usefixtures("at_once")
def test_one_graph_for_a_compiler() -> None:
    for family, config in (("mixtral", CONFIGS["int4"]), ("gpt-oss", CONFIGS["nvfp4"])):
        model, (x, index, weights) = made(family), routed()
        quantize_(model, QATConfig(config, step="prepare"))
        found = []
        torch.compiler.reset()
        for run in (model["experts"], torch.compile(model["experts"], fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = run(given, index, weights)
            y.float().square().sum().backward()
            found.append([y, given.grad, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("at_once")
def test_a_frozen_stack_and_a_float_one() -> None:
    """No gradient that was not asked for; a parameter that is not prepared is multiplied as it is."""
    model, (x, index, weights) = made("mixtral"), routed()
    quantize_(model, QATConfig(CONFIGS["int4"], step="prepare"))
    e = model["experts"]
    e.gate_up_proj.requires_grad_(False)
    e(x, index, weights).float().sum().backward()
    assert e.gate_up_proj.grad is None
    assert e.down_proj.grad is not None
    e.unprepare_stack("down_proj")
    y = e(x, index, weights)
    assert torch.isfinite(y).all()
    assert torch.count_nonzero(y[::5]) > 0


REASONS = {
    "activations with one scale": (LinearRecipe(get_operand("int8-tensor"), get_operand("int8-row")), "row by row"),
    "another contract": (LinearRecipe(None, get_operand("intx4-g32"), "dequantize"), "not dequantize"),
    "clipped": (LinearRecipe(None, get_operand("mxfp4"), straight_through="clipped"), "straight through"),
    "the device": (LinearRecipe(None, get_operand("mxfp4")), "CUDA"),
}


@pytest.mark.parametrize(("recipe", "reason"), REASONS.values(), ids=REASONS)
def test_what_is_a_loop_says_why(recipe: LinearRecipe, reason: str) -> None:
    assert reason in str(why_not_at_once(recipe, torch.empty(E, WIDTH, H, dtype=torch.bfloat16), False))
