"""Caches of bytes that grow in place: whatever is done to one between two steps, it holds the tokens it was given."""

import copy
import inspect
from typing import Any

import pytest
import torch
from support import kv_models
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from aoquant import KVCacheConfig, QATConfig, quantize_, set_fake_quant
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
    assert packed.held(DynamicCache(), 0) is packed.held(object(), 0) is None
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
    at = []
    for i in range(9):
        logits = fed(model, cache, [i])
        at.append(cache.layers[0].keys.data_ptr())
    assert torch.equal(logits[:, -1], model(IDS).logits[:, -1])
    assert cache.layers[0].keys.shape[2] == 9
    assert [i for i in range(1, 9) if at[i] != at[i - 1]] == [1, 4, 7], "room for two more than are written"


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_part_that_was_replaced_is_not_written_over(model, part: str) -> None:
    cache = DynamicCache(config=model.config)
    fed(model, cache, range(5))
    for layer in cache.layers:
        setattr(layer, part, getattr(layer, part).flip(0))
    given = [getattr(layer, part) for layer in cache.layers]
    fed(model, cache, [5, 6])
    assert all(torch.equal(getattr(layer, part)[:, :, :5], t) for layer, t in zip(cache.layers, given, strict=True))


def coded(memory: int = 5, even: bool = True) -> packed.Coded:
    """Return bytes of 5 tokens in memory for some more, whose heads lie one behind the other where `even`."""
    f, x = get_kv_format("int8-token-head"), torch.randn(2, 2, 5, 64).bfloat16()
    bytes_ = kv.pack(x, f, None)
    room = (
        bytes_.new_empty(2, 2, memory, bytes_.shape[3]) if even else bytes_.new_empty(2, memory, 2, 68).transpose(1, 2)
    )
    room[:, :, :5] = bytes_
    return packed.Coded(room[:, :, :5], packed.New(x, f, None))


MASK = torch.zeros(2, 1, 1, 5, dtype=torch.bfloat16)
LEFT: dict[str, dict[str, Any]] = {
    "another function": {"function": torch.nn.functional.scaled_dot_product_attention},
    "two query tokens": {"query": torch.randn(2, 4, 2, 64).bfloat16()},
    "another dtype": {"query": torch.randn(2, 4, 1, 64)},
    "dropout": {"options": {"dropout": 0.1}},
    "a position bias": {"options": {"position_bias": MASK}},
    "a soft cap": {"options": {"softcap": 30.0}},
    "a mask without heads": {"mask": MASK[0]},
    "a mask by head": {"mask": MASK.expand(2, 4, 1, 5)},
    "a mask by query": {"mask": MASK.expand(2, 1, 2, 5)},
    "a mask of fewer tokens": {"mask": MASK[..., :4]},
    "a mask that is one number": {"mask": MASK[..., :1].expand(2, 1, 1, 5)},
    "keys elsewhere": {"key": coded(8)},
    "tokens before heads": {"key": coded(even=False), "value": coded(even=False)},
}


def attended(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """Return what the kernel is called with; None where it is not."""
    monkeypatch.setattr(kv, "attend", lambda *given: given)
    options: dict[str, Any] = {
        "function": sdpa_attention_forward, "query": torch.randn(2, 4, 1, 64).bfloat16(), "key": coded(),
        "value": coded(), "mask": None, "options": {},
    }  # fmt: skip
    return packed.attend(**options | changes)


@pytest.mark.parametrize("case", LEFT)
def test_attention_that_the_kernel_does_not_compute_is_left_to_its_function(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attended(monkeypatch, **LEFT[case]) is None


def test_the_kernel_gets_bytes_mask_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = coded(8), coded(8)
    given = attended(monkeypatch, key=key, value=value)
    assert given[1] is key.bytes and given[2] is value.bytes and given[7] is None and given[8] == 0.125
    given = attended(monkeypatch, mask=MASK, options={"scaling": 0.5, "dropout": 0.0})
    assert given[7] is MASK and given[8] == 0.5


def test_a_kernel_attends_without_gradients_to_keys_and_values_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(kv, "why_not_attend", lambda *given: asked.append(given))
    new, short = coded().source, packed.New(torch.randn(2, 2, 4, 64), get_kv_format("int8-token-head"), None)
    flat = packed.New(new.x[0], new.format, None)
    assert not packed.attends(new, new)
    with torch.no_grad():
        assert packed.attends(new, new) and not packed.attends(new, short) and not packed.attends(flat, flat)
        assert asked == [(new.format, new.format, 64, torch.bfloat16, new.x.device)]
        monkeypatch.setattr(kv, "why_not_attend", lambda *given: "has no kernel")
        assert not packed.attends(new, new)


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_query_token_gets_the_bytes_that_a_kernel_reads(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "why_not_attend", lambda *given: None)
    f, given = get_kv_format("int8-token-head"), torch.randn(2, 2, 2, tokens, 64).bfloat16()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            parts = packed.store(DynamicCache(), *(packed.New(x, f, None) for x in given), 0, (), {})
        for x, t in zip(given, parts, strict=True):
            assert isinstance(t, packed.Coded) == (tokens == 1 and not grad)
            assert torch.equal(t + 0, kv.values(x, f, None))


def test_bytes_are_decoded_by_any_operation() -> None:
    f, x = get_kv_format("int8-token-head"), torch.randn(1, 2, 5, 16).bfloat16()
    held = packed.Coded(kv.pack(x, f, None), packed.New(x, f, None))
    values = kv.values(x, f, None)
    assert held.shape == x.shape and held.dtype == x.dtype
    assert torch.equal(held[:, :, 1:3] * 2, values[:, :, 1:3] * 2)
    assert torch.equal(held.sum(-1, dtype=torch.float32), values.sum(-1, dtype=torch.float32))
    assert torch.equal(torch.nn.functional.linear(held, torch.eye(16).bfloat16()), values)


def bare_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers' table of attention functions its own look-up, which earlier tests may have wrapped."""
    monkeypatch.setattr(AttentionInterface, "get_interface", inspect.unwrap(AttentionInterface.get_interface))


def kernel(monkeypatch: pytest.MonkeyPatch, made: Any) -> list[int]:
    """Let a kernel attend to bytes of any format, as on a GPU; return the numbers of tokens that it attends to."""
    tokens, module = [], made.model.layers[0].self_attn

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, k: Any, v: Any, k_scale: Any, v_scale: Any, mask: Any, scale: float
    ) -> Tensor:
        tokens.append(keys.shape[2])
        key, value = k.unpack(keys, k_scale, query.dtype), v.unpack(values, v_scale, query.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scale)[0]

    monkeypatch.setattr(kv, "why_not_attend", lambda *given: None)
    monkeypatch.setattr(kv, "attend", attend)
    return tokens


@torch.no_grad()
def stepped(made: Any, cache: DynamicCache) -> Tensor:
    """Return the logits of a prompt and of three tokens behind it."""
    ids = kv_models.IDS
    return torch.cat([made(part, past_key_values=cache).logits for part in ids.split([9, 1, 1, 1], 1)], 1)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("config", [{"format": "int8-token-head", "scale": "pow2"}, {"format": "fp8", "query": "fp8"}])
def test_models_whose_attention_reads_bytes(
    config: dict[str, Any], converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prepared model stores bytes from the first token on, and reads them by the kernel as a converted one does."""
    bare_table(monkeypatch)
    made = kv_models.prepared("llama", "sdpa", **config)
    if converted:
        quantize_(made, QATConfig(step="convert"))
    wanted, cache = stepped(made, DynamicCache()), DynamicCache()
    tokens = kernel(monkeypatch, made)
    assert torch.equal(stepped(made, cache), wanted)
    assert tokens == [10] * 3 + [11] * 3 + [12] * 3
    assert all(layer.keys.dtype == layer.values.dtype == torch.uint8 for layer in cache.layers)


def test_a_prepared_cache_goes_on_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep values where the first tokens were stored without a kernel, and bytes where gradients are wanted later."""
    made = kv_models.prepared("llama", "sdpa")
    whole, ids, floats, bytes_ = stepped(made, DynamicCache()), kv_models.IDS, DynamicCache(), DynamicCache()
    with torch.no_grad():
        made(ids[:, :9], past_key_values=floats)
        tokens = kernel(monkeypatch, made)
        assert torch.equal(made(ids[:, 9:10], past_key_values=floats).logits, whole[:, 9:10])
        made(ids[:, :9], past_key_values=bytes_)
    assert tokens == [] and [c.layers[0].keys.dtype for c in (floats, bytes_)] == [torch.bfloat16, torch.uint8]
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: gradients"):
        made(ids[:, 9:10], past_key_values=bytes_)
    set_fake_quant(made, False)
    with torch.no_grad(), pytest.raises(ValueError, match=r"layers\.0\.self_attn: the cache holds bytes"):
        made(ids[:, 9:10], past_key_values=bytes_)


def test_latent_attention_stores_values_until_it_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kv_models.prepared("deepseek_v3", "sdpa")
    wanted, cache = stepped(made, DynamicCache()), DynamicCache()
    tokens = kernel(monkeypatch, made)
    assert torch.equal(stepped(made, cache), wanted)
    assert not tokens and all(layer.keys.dtype == torch.bfloat16 for layer in cache.layers)


def test_gradients_do_not_go_through_bytes_of_earlier_tokens() -> None:
    made, ids = kv_models.prepared(), kv_models.IDS
    quantize_(made, QATConfig(step="convert"))
    cache = made(ids[:, :9]).cache
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: gradients"):
        made(ids[:, 9:], past_key_values=cache)


def test_transformers_table_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bare_table(monkeypatch)
    own = AttentionInterface.get_interface
    made = kv_models.prepared()
    quantize_(made, QATConfig(step="convert"))
    stepped(made, DynamicCache())
    assert AttentionInterface.get_interface is own, "attention reads values here, and queries stay as they are"
    kv_models.prepared(query="fp8")
    wrapped = AttentionInterface.get_interface
    kv_models.prepared(query="fp8")
    assert AttentionInterface.get_interface is wrapped and wrapped.__wrapped__ is own
