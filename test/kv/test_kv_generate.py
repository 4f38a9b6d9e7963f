"""The ways in which models generate: prepared and converted make the same tokens, from caches that hold bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.kv_models import IDS, SOME_SLOW, model, of, prepared
from transformers import DynamicCache

from aoquant import QATConfig, calibrate, quantize_, refresh_
from aoquant.kv import hook

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3}, "chunks": {"prefill_chunk_size": 4},
    "static": {"cache_implementation": "static", "disable_compile": True}, "lookup": {"prompt_lookup_num_tokens": 2},
    "no cache": {"use_cache": False},
}  # fmt: skip
FORMATS = ({"format": "fp8", "per": "head", "query": "fp8"}, of("int4-token-head"), {"format": "q4_0", "scale": "pow2"})


def tokens(made: Any, way: str) -> torch.Tensor:
    """The prompts are padded on the left, and longer than a sliding window of 8 when they end."""
    torch.manual_seed(2)
    ids, options = IDS[:, :9].clone(), {"do_sample": False, **WAYS[way]}
    if way == "lookup":
        return made.generate(ids[1:], max_new_tokens=5, **options)
    ids[0, :4] = 0
    return made.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=5, **options)


@pytest.mark.parametrize("config", [pytest.param(c, marks=() if i == 1 else pytest.mark.slow, id=c["format"])
                                    for i, c in enumerate(FORMATS)])  # fmt: skip
@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
@pytest.mark.parametrize("family", SOME_SLOW)
def test_every_way(family: str, implementation: str, config: dict[str, Any]) -> None:
    if family == "deepseek_v3":  # latent attention has one scale, and no queries of its own
        config = {name: value for name, value in config.items() if name not in ("per", "query")}
    made = prepared(family, implementation, **config)
    served = copy.deepcopy(made)
    quantize_(served, QATConfig(step="convert"))
    for way in WAYS:
        assert torch.equal(tokens(made, way), tokens(served, way)), way


def test_padding_does_not_change_a_rows_tokens() -> None:
    served = prepared("llama", format="int8-token-head", scale="pow2")
    quantize_(served, QATConfig(step="convert"))
    alone = served.generate(IDS[:1, 4:9], max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens(served, "greedy")[:1, 4 : 4 + alone.shape[1]], alone)


def test_continuous_batching_is_refused_after_convert() -> None:
    """Its cache is of the model's dtype. A prepared model writes the values of its bytes there."""

    class PagedAttentionCache(DynamicCache):
        pass

    made = prepared()
    made(IDS, past_key_values=PagedAttentionCache())
    quantize_(made, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: .*generate_batch on the prepared model"):
        made(IDS, past_key_values=PagedAttentionCache())


def test_scales_that_calibration_finds_to_be_one(recwarn: pytest.WarningsRecorder) -> None:
    """They came from data, so convert does not say that they came from nowhere."""
    made = model()
    quantize_(made, QATConfig("vllm-fp8", kv_cache="fp8", step="prepare"))
    with torch.no_grad():
        for module in hook.quantised(made).values():
            module.v_proj.weight.mul_(1e4)
            module.k_proj.weight.mul_(1e4)
            module.kv_quant.config.scale = "pow2"
    calibrate(made, [IDS])
    for scale in hook.scales(made).values():
        assert scale > 1
        scale.fill_(1.0)
    quantize_(made, QATConfig(step="convert"))
    assert not [w for w in recwarn if "KV-cache" in str(w.message)]


@pytest.mark.parametrize("base", [None, "vllm-fp8"])
def test_a_converted_copy_follows_training(base: str | None) -> None:
    made = model()
    quantize_(made, QATConfig(base, kv_cache="fp8", step="prepare"))
    calibrate(made, [IDS])
    served = copy.deepcopy(made)
    quantize_(served, QATConfig(step="convert"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    calibrate(made, [IDS[:1]])
    assert not torch.equal(made(IDS).logits, served(IDS).logits)
    refresh_(served, made)
    assert all(map(torch.equal, hook.scales(served).values(), hook.scales(made).values()))
    assert torch.equal(tokens(made, "greedy"), tokens(served, "greedy"))
    other = prepared(format="q8_0", scale="pow2")
    with pytest.raises(ValueError, match="quantise their KV caches otherwise"):
        refresh_(other, made)
