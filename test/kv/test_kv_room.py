"""Caches of bytes that grow in place: whatever is done to one between two steps, it holds the tokens it was given."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from aoquant import KVCacheConfig, quantize_
from aoquant.formats import get_kv_format
from aoquant.kv import packed
from aoquant.ops import kv

IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    made = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    quantize_(made, KVCacheConfig("int8-token-head"))
    return made


@torch.no_grad()
def fed(model, cache, tokens, rows=slice(None)):
    """Logits of the last of some tokens, one after the other."""
    for i in tokens:
        logits = model(IDS[rows, i : i + 1], past_key_values=cache).logits
    return logits


def test_tokens_are_written_in_place(model) -> None:
    cache = DynamicCache(config=model.config)
    fed(model, cache, range(2))
    at = [layer.keys.data_ptr() for layer in cache.layers]
    logits = fed(model, cache, range(2, 9))
    assert at == [layer.keys.data_ptr() for layer in cache.layers]
    assert all(layer.keys.shape == (2, 1, 9, 20) and layer.keys.dtype == torch.uint8 for layer in cache.layers)
    assert torch.equal(logits[:, -1], model(IDS, use_cache=True).logits[:, -1])


@pytest.mark.parametrize("how", ["crop", "deepcopy", "shallow", "select", "repeat", "reset", "inference"])
def test_what_happens_to_a_cache_between_two_steps(model, how: str) -> None:
    cache, rows = DynamicCache(config=model.config), slice(None)
    if how == "inference":
        with torch.inference_mode():
            fed(model, cache, range(5))
    else:
        fed(model, cache, range(5))
    if how == "crop":
        fed(model, cache, [0, 0])
        cache.crop(-2)
    elif how == "deepcopy":
        fed(model, copy.deepcopy(cache), [0, 0, 0])
    elif how == "shallow":
        twin = copy.copy(cache)
        twin.layers = [copy.copy(layer) for layer in cache.layers]
        fed(model, twin, [0, 0, 0])
    elif how == "select":
        cache.batch_select_indices(torch.tensor([1]))
        rows = slice(1, 2)
    elif how == "repeat":
        cache.batch_repeat_interleave(1)
    elif how == "reset":
        cache.reset()
        fed(model, cache, range(5))
    logits = fed(model, cache, range(5, 9), rows)
    whole = DynamicCache(config=model.config)
    assert torch.equal(logits, fed(model, whole, range(9), rows))
    for layer, own in zip(cache.layers, whole.layers, strict=True):
        assert torch.equal(layer.keys, own.keys) and torch.equal(layer.values, own.values)


def test_memory_grows_when_it_is_full(model, monkeypatch) -> None:
    monkeypatch.setattr(packed, "ROOM", 2)
    cache = DynamicCache(config=model.config)
    logits = fed(model, cache, range(9))
    assert torch.equal(logits[:, -1], model(IDS).logits[:, -1])
    assert cache.layers[0].keys.shape[2] == 9


def test_bytes_are_decoded_by_any_operation() -> None:
    f, x = get_kv_format("int8-token-head"), torch.randn(1, 2, 5, 16).bfloat16()
    coded = packed.Coded(kv.pack(x, f, None), packed.New(x, f, None))
    values = kv.values(x, f, None)
    assert coded.shape == x.shape and coded.dtype == x.dtype
    assert torch.equal(coded[:, :, 1:3] * 2, values[:, :, 1:3] * 2)
    assert torch.equal(torch.nn.functional.linear(coded, torch.eye(16).bfloat16()), values)
