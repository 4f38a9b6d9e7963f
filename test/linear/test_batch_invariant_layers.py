"""A row is its own, in layers and in a model: what a token gets does not depend on what is computed with it.

Codes are compared to the byte in test_batch_invariance.py. Outputs differ by the order of sums that a GEMM of another
height takes, no more: the bound is SUMS. torchao's dynamic NVFP4, which makes no such promise, is two orders of
magnitude outside of it.
"""

from typing import Any

import pytest
import torch
from support import models
from torch import Tensor, nn
from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor
from transformers import LlamaForCausalLM

import aoquant
from aoquant import NVFP4WeightConfig, QATConfig, quantize_
from aoquant.config import WeightConfig
from aoquant.linear.prepared import QATLinear
from aoquant.recipes import get_recipe, list_recipes

SUMS = 1e-5  # relative to the largest value of a row, for float32 sums of up to 256 products taken in another order
BY_TENSOR = ("fp8-hybrid", "nvfp4-training", "te-nvfp4-sr")  # which follow TransformerEngine, and say so
OWN = [r.name for r in list_recipes() if isinstance(r.make(), WeightConfig) and r.name not in BY_TENSOR]
CONFIGS: dict[str, WeightConfig] = {
    **{name: get_recipe(name).make() for name in OWN},  # type: ignore[dict-item]
    "nvfp4-none": NVFP4WeightConfig("none"),
    "nvfp4-static": NVFP4WeightConfig(activation="nvfp4-static"),
    "gridflip-search/nvfp4-search-row": get_recipe("gridflip-search/nvfp4-search-row").make(),  # type: ignore[dict-item]
}
LEFT: dict[str, WeightConfig] = {
    "nvfp4": NVFP4WeightConfig(activation="nvfp4"),
    "fouroversix": NVFP4WeightConfig(rule="four_over_six", activation="fouroversix"),
    "te-nvfp4": NVFP4WeightConfig(numerics="te"),
    **{name: get_recipe(name).make() for name in BY_TENSOR},  # type: ignore[dict-item]
    "int8-tensor": aoquant.Int8WeightConfig(activation="int8-tensor"),
}


def layer(config: Any, device: torch.device, step: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64)).to(device)
    quantize_(model, QATConfig(config, **options))
    recipe = model[0].prepared.recipe  # type: ignore[union-attr]
    if recipe.fitted or recipe.input_scales in ("static", "learned"):
        aoquant.calibrate(model, lambda m: m(torch.randn(64, 256, device=device)))
    if step == "convert":
        quantize_(model, QATConfig(step="convert"))
    return model.eval()


def apart(one: Tensor, other: Tensor) -> float:
    """Largest difference, in the largest value of its row."""
    return float(((one - other).abs().amax(-1) / other.abs().amax(-1)).max())


def worst(model: nn.Module, device: torch.device) -> float:
    """How far a token's output is apart alone, in a loud batch, behind padding and at another place."""
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).to(device)
    loud, padding = 300.0 * torch.randn(9, 256, device=device), torch.zeros(3, 256, device=device)
    with torch.no_grad():
        alone = model(x)
        found = [
            model(torch.cat((x, loud)))[:1],
            model(torch.cat((loud, x)))[9:],
            model(torch.cat((padding, x)))[3:],
            model(torch.stack((padding, torch.cat((loud[:2], x)))))[1, 2:],
        ]
    return max(apart(y, alone) for y in found)


@pytest.mark.parametrize("step", ["prepare", "convert"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer(name: str, step: str, device: torch.device) -> None:
    config = CONFIGS[name]
    assert config.recipe().batch_invariant, "every recipe whose target is ours promises it"
    assert worst(layer(config, device, step), device) <= SUMS


STATIC: dict[str, Any] = {
    name: aoquant.PackedWeightConfig("int8-row", name)
    for name in ("int8-tensor-static", "int8-tensor-asym-static", "intx8-tensor-static", "fp8-tensor-static", "nvfp4-static",
                 "fouroversix-static", "hadamard16+int8-tensor-static", "int8-tensor-static:0.02", "int8-tensor-asym-static:0.02:-3")
} | {"torchao": Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()])}  # fmt: skip
HELD: dict[str, Any] = {"learned": {"scales": "learned"}, "clipped": {"straight_through": "clipped"}}


@pytest.mark.parametrize(
    ("name", "option"), [(n, "") for n in (*CONFIGS, *STATIC)] + [(n, o) for n in STATIC if "int8-t" in n for o in HELD]
)
def test_nan_and_inf_stay_in_their_row(name: str, option: str, device: torch.device) -> None:
    """Outputs and gradients of all other rows keep their bits, and a NaN shows in its own row."""
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).to(device)
    for step in ("prepare", "convert") if name != "torchao" else ("prepare",):
        model = layer((CONFIGS | STATIC)[name], device, step, **HELD.get(option, {}))

        def run(x: Tensor, model: nn.Module = model) -> Tensor:
            """y and dx, row beside row; of a converted layer y alone."""
            if any(isinstance(m, QATLinear) for m in model):
                y = model(x.requires_grad_())
                return torch.cat((y, *torch.autograd.grad(y.sum(), x)), 1).detach()
            with torch.no_grad():
                return model(x)

        want = run(x.clone())
        for value in (torch.nan, torch.inf, -torch.inf):
            broken = x.clone()
            broken[2, 5] = value
            got = run(broken)
            assert torch.equal(got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]]), (step, value)
            assert value == value or got[2, :64].isnan().all()


@pytest.mark.parametrize("name", LEFT)
def test_what_makes_no_promise_shows_why(name: str, device: torch.device) -> None:
    assert not LEFT[name].recipe().batch_invariant
    assert worst(layer(LEFT[name], device, "convert"), device) > 100 * SUMS


def llama(config: Any, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "attention_bias": False}
    model = models.llama(dtype=torch.float32, attn_implementation="eager", **sizes).to(device)
    quantize_(model, config)
    return model


def decoding(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits (1, T, V): a prompt of four, then token by token with the cache."""
    out = model(ids[:, :4], use_cache=True)
    logits, cache = [out.logits], out.past_key_values
    for t in range(4, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@torch.no_grad()
def leaks(model: LlamaForCausalLM, device: torch.device) -> dict[str, float]:
    """How far the logits of a prompt are apart from what it gets in other company."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 96, (4, 12), generator=generator).to(device)
    whole = model(ids[:1]).logits
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.int64, device=device), ids[:1]), 1)
    mask = (torch.arange(17, device=device) >= 5).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {
        "batch": apart(model(ids).logits[:1], whole),
        "padding": apart(model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:], whole),
        "decode": apart(decoding(model, ids[:1]), whole),
    }


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-4over6", "nvfp4-h16", "mxfp4", "fp8", "int8-int4"])
def test_a_model(name: str, device: torch.device) -> None:
    """A prompt at once, in a batch, behind padding, and as prefill and decode."""
    found = leaks(llama(CONFIGS[name], device), device)
    assert max(found.values()) <= 2 * SUMS, found  # of two layers


def test_a_model_with_one_scale_for_the_batch(device: torch.device) -> None:
    found = leaks(llama(NVFP4WeightConfig(activation="nvfp4"), device), device)
    assert min(found["batch"], found["decode"]) > 1e-2, found


def test_a_checkpoint_keeps_the_format_that_it_names() -> None:
    """Configs write every field, so what was saved with activation="nvfp4" as the default comes back as that."""
    from torchao.core.config import config_from_dict, config_to_dict

    saved = {"_type": "NVFP4WeightConfig", "_version": 1, "_data": {"outer": "dynamic", "pts": None, "activation": "nvfp4", "rule": "absmax",
             "metric": "mse", "tile": 1, "transform": None, "numerics": "ao"}}  # fmt: skip
    assert config_from_dict(saved).recipe().input_name == "nvfp4"
    assert config_to_dict(NVFP4WeightConfig())["_data"]["activation"] == "nvfp4-row"
