"""Caches of bytes that grow in place: whatever is done to one between two steps, it holds the tokens it was given."""

import copy

import pytest
import torch
from support.kv_models import IDS as PROMPT
from support.kv_models import prepared
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from aoquant import KVCacheConfig, QATConfig, quantize_
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


@pytest.mark.parametrize(
    "how", ["crop", "deepcopy", "shallow", "select", "repeat", "reset", "inference", "keys", "values"]
)
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
    elif how in ("keys", "values"):  # other memory for one of the two
        for layer in cache.layers:
            before = getattr(layer, how)
            setattr(layer, how, before.clone())
            before.zero_()
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
    cache = DynamicCache(config=model.config)
    fed(model, cache, range(2))
    with torch.no_grad():
        model(IDS[:, 2:], past_key_values=cache)  # more tokens at once than there is room for
    assert [layer.keys.shape[2] for layer in cache.layers] == [9, 9]


def test_bytes_are_decoded_by_any_operation() -> None:
    f, x = get_kv_format("int8-token-head"), torch.randn(1, 2, 5, 16).bfloat16()
    coded = packed.Coded(kv.pack(x, f, None), packed.New(x, f, None))
    values = kv.values(x, f, None)
    assert coded.shape == x.shape and coded.dtype == x.dtype
    assert torch.equal(coded[:, :, 1:3] * 2, values[:, :, 1:3] * 2)
    assert torch.equal(torch.nn.functional.linear(coded, torch.eye(16).bfloat16()), values)
    assert torch.equal(coded.sum(-1, dtype=torch.float32), values.sum(-1, dtype=torch.float32))


@pytest.mark.parametrize("write", [kv.pack, kv.values])
def test_rows_that_a_format_does_not_take_are_refused(write) -> None:
    scale, nvfp4 = torch.ones(1), get_kv_format("nvfp4")
    assert write(torch.zeros(2, 3, 5, 32), nvfp4, scale).shape[:3] == (2, 3, 5)
    with pytest.raises(ValueError, match="that 16 divides, got 24"):
        write(torch.zeros(2, 16, 5, 24), nvfp4, scale)
    with pytest.raises(ValueError, match="q8_0 makes a scale for each token and head, and takes none"):
        write(torch.zeros(2, 3, 5, 32), get_kv_format("q8_0"), scale)


def test_an_empty_cache_holds_no_layer() -> None:
    assert packed.held(DynamicCache(), 0) is None and packed.held(None, 0) is None


@pytest.mark.parametrize("converted", [False, True])
def test_one_token_attends_to_the_bytes(converted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a kernel, for which decoded values stand in here. More tokens get decoded values."""
    made = prepared("llama", "sdpa")
    if converted:
        quantize_(made, QATConfig(step="convert"))
    with torch.no_grad():
        cache = made(PROMPT[:, :9], use_cache=True).past_key_values
        want = [made(PROMPT[:, i : i + 1], past_key_values=cache).logits for i in range(9, 12)]
    seen = []

    def attend(query, keys, values, k, v, k_scale, v_scale, mask, scale):
        seen.append(keys.shape[2])
        assert keys.dtype == values.dtype == torch.uint8 and scale == 32**-0.5
        read = k.unpack(keys, k_scale, query.dtype), v.unpack(values, v_scale, query.dtype)
        return sdpa_attention_forward(made.model.layers[0].self_attn, query, *read, mask, scaling=scale)[0]

    monkeypatch.setattr(kv, "why_not_attend", lambda *given: None)
    monkeypatch.setattr(kv, "attend", attend)
    with torch.no_grad():
        cache = made(PROMPT[:, :9], use_cache=True).past_key_values
        assert not seen and cache.layers[0].keys.dtype == torch.uint8
        got = [made(PROMPT[:, i : i + 1], past_key_values=cache).logits for i in range(9, 12)]
    assert all(map(torch.equal, got, want)) and seen == [10] * 3 + [11] * 3 + [12] * 3
    if not converted:
        assert made(PROMPT, use_cache=True).past_key_values.layers[0].keys.dtype == torch.bfloat16  # with gradients
        for layer in made.model.layers:
            layer.self_attn.kv_quant.fake_quant = False
        with pytest.raises(
            ValueError, match=r"layers\.0\.self_attn: the cache holds bytes, and fake quantisation is off"
        ):
            made(PROMPT[:, :1], past_key_values=cache)
    assert len(seen) == 9


@pytest.mark.parametrize(
    "change",
    [
        "",
        "function",
        "queries",
        "dtype",
        "dropout",
        "position_bias",
        "softcap",
        "heads",
        "width",
        "columns",
        "capacity",
    ],
)
def test_which_attention_the_kernel_computes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other is left to its own function, on decoded values."""
    calls = []
    monkeypatch.setattr(kv, "attend", lambda *given: calls.append(given[-2:]) or given[0])
    f, x = get_kv_format("int8-token-head"), torch.randn(2, 2, 5, 16).bfloat16()
    room = torch.zeros(2, 2, 8, 20, dtype=torch.uint8)
    kv.pack_into(room, 0, x, f, None)
    key, value = (packed.Coded(room[:, :, :5], packed.New(x, f, None)) for _ in range(2))
    if change == "capacity":
        value = packed.Coded(room[:, :, :5].contiguous(), packed.New(x, f, None))
    query = torch.randn(
        2, 4, 2 if change == "queries" else 1, 16, dtype=torch.float32 if change == "dtype" else x.dtype
    )
    mask = torch.zeros(2, 1, 1, 5)
    if change in ("heads", "width", "columns"):
        shape = {"heads": (2, 4, 1, 5), "width": (2, 1, 1, 6), "columns": (2, 1, 5, 1)}[change]
        mask = torch.zeros(shape)
    if change == "columns":
        mask = torch.zeros(2, 1, 1, 10)[..., ::2]
    options = {"dropout": 0.1, "position_bias": mask, "softcap": 30.0}
    function = torch.nn.functional.scaled_dot_product_attention if change == "function" else sdpa_attention_forward
    given = {name: options[name] for name in options if name == change} | {"scaling": 0.5}
    found = packed.attend(function, query, key, value, mask, given)
    assert (found is None) == bool(change) == (not calls)
    if not change:
        assert calls == [(mask, 0.5)]
        packed.attend(function, query, key, value, None, {"dropout": 0.0})
        assert calls[1] == (None, 0.25)


def test_which_rows_a_kernel_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU."""
    f, x, scale = get_kv_format("fp8"), torch.zeros(2, 3, 5, 1024).bfloat16(), torch.ones(1)
    assert not kv.writes(f, x, scale)
    monkeypatch.setattr(kv, "lacks_triton", lambda device: None)
    assert all(kv.writes(get_kv_format(name), x, None) for name in kv.WRITES)
    assert all(kv.writes(f, x, torch.ones(heads)) for heads in (1, 3))
    for other in ("q8_0", "q4_0", "nvfp4"):
        assert not kv.writes(get_kv_format(other), x, None)
    assert not kv.writes(f, x.double(), scale) and not kv.writes(f, x[0], scale)
    assert not kv.writes(f, torch.zeros(2, 3, 5, 1025), scale) and not kv.writes(f, x, torch.ones(2))


def test_what_a_kernel_attends_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has Triton and a GPU."""
    cpu, why_not = torch.device("cpu"), kv.why_not_attend.__wrapped__
    fp8, int4, q8, nvfp4 = (get_kv_format(name) for name in ("fp8", "int4-token-head", "q8_0", "nvfp4"))
    assert why_not(fp8, int4, 128, torch.bfloat16, cpu) == "its kernels are for CUDA devices"
    monkeypatch.setattr(kv, "lacks_triton", lambda device: None)
    assert [why_not(fp8, int4, d, torch.bfloat16, cpu) for d in (64, 128, 256)] == [None] * 3
    for d, dtype in ((96, torch.bfloat16), (128, torch.float16)):
        assert (
            why_not(fp8, int4, d, dtype, cpu) == f"reads bfloat16 queries of 64, 128 or 256 values, got {d} of {dtype}"
        )
    assert why_not(q8, fp8, 128, torch.bfloat16, cpu) == "has no kernel that reads q8_0"
    assert why_not(fp8, nvfp4, 128, torch.bfloat16, cpu) == "has no kernel that reads nvfp4"
