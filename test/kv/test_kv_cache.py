"""KV caches: what attention reads is a function of the stored bytes, prepared, converted, with and without a cache."""

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from support.kv_models import FAMILIES, IDS, SIZES, SOME_SLOW, generated, model, of, prepared, recorded
from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import FqnToConfig
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import QuantoQuantizedLayer

import aoquant
from aoquant import AoquantWarning, KVCacheConfig, QATConfig, calibrate, quantize_
from aoquant.formats.kv import KV_NAMES
from aoquant.kv import hook


def cells(formats):
    every = [(f, n, i) for f in FAMILIES for n in formats for i in ("eager", "sdpa")]
    quick = {("llama", "int8-token-head", "sdpa"), *((f, "fp8", "eager") for f in ("gemma3", "deepseek_v3"))}
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.slow) for c in every]


@pytest.mark.parametrize(("family", "name", "implementation"), cells(KV_NAMES))
def test_prepared(family: str, name: str, implementation: str) -> None:
    made = prepared(family, implementation, **of(name))
    plain, values = recorded(made, use_cache=False)
    assert not torch.equal(plain.logits, model(family, implementation)(IDS, use_cache=False).logits)
    cached, same = recorded(made, use_cache=True)
    assert torch.equal(plain.logits, cached.logits)
    assert len(values) == 2 * len(hook.quantised(made)) and all(map(torch.equal, values, same))
    _, alone = recorded(made, input_ids=IDS[:1], use_cache=False)
    assert torch.equal(values[0][:1], alone[0]), "a token's bytes depend on the batch"
    if implementation == "eager":  # sdpa's kernels depend on the number of queries
        made_cache = made(IDS[:, :9]).cache
        steps = [made(IDS[:, i : i + 1], past_key_values=made_cache).logits for i in range(9, 12)]
        assert torch.equal(torch.cat(steps, 1), cached.logits[:, 9:])


@pytest.mark.parametrize(("family", "name", "implementation"), cells(KV_NAMES))
def test_converted_generates_the_same_from_bytes(family: str, name: str, implementation: str) -> None:
    made = prepared(family, implementation, **of(name))
    tokens, logits, floats = generated(made)
    plain = made(IDS, use_cache=False).logits
    quantize_(made, QATConfig(step="convert"))
    packed_tokens, packed_logits, packed = generated(made)
    assert torch.equal(tokens, packed_tokens) and torch.equal(logits, packed_logits)
    assert torch.equal(plain, made(IDS, use_cache=False).logits)
    for before, after in zip(floats.layers, packed.layers, strict=True):
        assert after.keys.dtype == after.values.dtype == torch.uint8
        assert after.keys.shape[:3] == before.keys.shape[:3]
        k = made.model.layers[0].self_attn.kv_quant.config.k_format
        assert after.keys.shape[3] == k.row_bytes(before.keys.shape[3]) + k.scale_bytes < 2 * before.keys.shape[3]


@pytest.mark.parametrize("family", SOME_SLOW)
def test_static_cache(family: str) -> None:
    made = prepared(family)
    tokens, logits, _ = generated(made)
    quantize_(made, QATConfig(step="convert"))
    static, same, cache = generated(made, cache_implementation="static", disable_compile=True)
    assert torch.equal(tokens, static) and torch.equal(logits, same)
    assert all(layer.keys.dtype == torch.uint8 for layer in cache.layers)


@pytest.mark.parametrize("family", SOME_SLOW)
def test_gradients(family: str) -> None:
    made = prepared(family).train()
    made(IDS, labels=IDS).loss.backward()
    grads = {n: p.grad.clone() for n, p in made.named_parameters()}
    assert all(g.abs().sum() > 0 for n, g in grads.items() if "experts" not in n)
    made.zero_grad()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    made(IDS, labels=IDS).loss.backward()
    assert all(torch.equal(p.grad, grads[n]) for n, p in made.named_parameters())


def test_gradients_are_straight_through() -> None:
    x = torch.randn(2, 3, 4, 64, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(2, 3, 4, 64).mul(1e-3).bfloat16()
    hook.fake(x, KVCacheConfig("fp8").k_format, torch.tensor([0.0625])).backward(g)
    assert torch.equal(x.grad, g)


def test_converted_caches_pass_gradients() -> None:
    made = prepared().train()
    made(IDS, labels=IDS).loss.backward()
    wanted = {n: p.grad.clone() for n, p in made.named_parameters()}
    made.zero_grad()
    quantize_(made, QATConfig(step="convert"))
    made(IDS, labels=IDS, use_cache=True).loss.backward()
    assert all(torch.equal(p.grad, wanted[n]) for n, p in made.named_parameters())


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("scale", ["pow2", "amax"])
def test_calibrate(scale: str, per: str) -> None:
    made = prepared(scale=scale, per=per, query="fp8")
    seen = {}
    original = hook.KVQuant.watch
    floats = model()
    attention = made.model.layers[0].self_attn
    hook.KVQuant.watch = lambda self, name, x: (seen.setdefault((self.fqn, name), x), original(self, name, x))[1]
    try:
        calibrate(made, [IDS])
    finally:
        hook.KVQuant.watch = original
    k = seen["model.layers.0.self_attn", "k_scale"].float().abs()
    amax = k.amax((0, 2, 3)).view(2, 1, 1) if per == "head" else k.amax().view(1)
    wanted = amax / 448
    if scale == "pow2":
        wanted = torch.exp2(torch.log2(wanted).ceil())
    assert torch.equal(attention.k_scale, wanted)
    assert attention.q_scale.shape == (1,) and attention.q_scale.item() not in (0.0, 1.0)
    noise = (made(IDS).logits - floats(IDS).logits).float().square().mean()
    assert 0 < noise < 0.01 * floats(IDS).logits.float().square().mean()


def test_queries() -> None:
    with_query, without = prepared(query="fp8"), prepared()
    assert not torch.equal(with_query(IDS).logits, without(IDS).logits)
    with_query.train()(IDS, labels=IDS).loss.backward()
    assert with_query.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    tokens, logits, _ = generated(with_query.eval())
    quantize_(with_query, QATConfig(step="convert"))
    assert all(map(torch.equal, generated(with_query)[:2], (tokens, logits)))


def test_layers_and_cache_together() -> None:
    made = model()
    quantize_(made, QATConfig("int4-g32", kv_cache="fp8", step="prepare"))
    calibrate(made, [IDS])
    assert not hook.uncalibrated(hook.quantised(made).values())
    logits = made(IDS).logits
    quantize_(made, QATConfig(step="convert"))
    assert torch.equal(made(IDS).logits, logits)
    assert isinstance(made.model.layers[0].self_attn.q_proj.weight, aoquant.PackedTensor)


def test_at_once_and_by_name() -> None:
    made = model()
    key = r"re:.*layers\.[01]\.self_attn"
    quantize_(made, FqnToConfig({key: None, "_default": KVCacheConfig("int8-token-head")}))
    assert list(hook.quantised(made)) == ["model.layers.2.self_attn"]
    other = model()
    mixed = FqnToConfig({key: KVCacheConfig("q8_0"), r"re:.*mlp\..*": aoquant.Int4WeightConfig(32)})
    quantize_(other, mixed)
    assert len(hook.quantised(other)) == 2
    assert isinstance(other.model.layers[0].mlp.up_proj.weight, aoquant.PackedTensor)
    assert not isinstance(other.model.layers[0].self_attn.q_proj.weight, aoquant.PackedTensor)
    third = model()
    quantize_(third, QATConfig(FqnToConfig({key: None, "_default": aoquant.Int4WeightConfig(32)}), kv_cache="q4_0"))
    assert list(hook.quantised(third)) == ["model.layers.2.self_attn"]
    assert isinstance(third.model.layers[0].self_attn.q_proj, aoquant.linear.prepared.QATLinear)


def test_uncalibrated_scales_warn_once() -> None:
    made = prepared(scale="pow2")
    with pytest.warns(AoquantWarning, match="scales of 3 attention") as said:
        quantize_(made, QATConfig(step="convert"))
    assert len([w for w in said if "KV-cache" in str(w.message)]) == 1
    made(IDS)


def test_switches_copies_and_config() -> None:
    made, plain = prepared(), model()(IDS).logits
    quantised = made(IDS).logits
    assert aoquant.set_fake_quant(made, False) == 3 and torch.equal(made(IDS).logits, plain)
    aoquant.set_fake_quant(made, True)
    twin = copy.deepcopy(made)
    assert aoquant.unprepare(made) == 3 and torch.equal(made(IDS).logits, plain)
    assert not any("scale" in name for name in made.state_dict())
    assert torch.equal(twin(IDS).logits, quantised)
    config = KVCacheConfig("fp8", scale=0.5, per="head", value="q8_0")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert dataclasses.replace(config, key="nvfp4").k_format.name == "nvfp4"


def test_compiles_in_one_graph() -> None:
    made = prepared(implementation="sdpa")
    with torch.no_grad():
        wanted = made(IDS, use_cache=False).logits
        found = torch.compile(made, fullgraph=True, backend="eager")(IDS, use_cache=False).logits
    assert torch.equal(wanted, found)


def test_refusals() -> None:
    bert = BertModel(
        BertConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    with pytest.raises(ValueError, match=r"encoder\.layer\.0\.attention.*EncoderDecoderCache"):
        quantize_(bert, KVCacheConfig())
    with pytest.raises(ValueError, match=r"layers\.\*\.self_attn.*one scale for all heads"):
        prepared("deepseek_v3", per="head")
    with pytest.raises(ValueError, match="is quantised already"):
        quantize_(prepared(), QATConfig(KVCacheConfig(), step="prepare"))
    for config in (KVCacheConfig(), QATConfig("int8-row/", kv_cache="fp8")):
        with pytest.raises(ValueError, match="no attention module"):
            quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
    small = SIZES | {"head_dim": 24}
    with pytest.raises(ValueError, match=r"self_attn.*that 16 divides, got 24"):
        quantize_(LlamaForCausalLM(LlamaConfig(**small)), KVCacheConfig("nvfp4"))
    for wrong in (
        {"format": "int9"},
        {"scale": 0.0},
        {"per": "row"},
        {"query": "int8"},
        {"format": "q8_0", "scale": 2.0},
    ):
        with pytest.raises(ValueError, match="KV"):
            KVCacheConfig(**wrong)
    with pytest.raises(ValueError, match="kv_cache"):
        QATConfig("int4-g32", kv_cache=8)
    made = prepared()
    cache = made(IDS).cache
    quantize_(made, QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*new\s+cache"):
        made(IDS[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate(prepared(scale=1.0), [IDS])


@pytest.mark.parametrize("step", ["prepare", "quantize"])
def test_skip_incompatible_leaves_out_the_caches_that_cannot(step: str) -> None:
    """The others get their config, and a warning names those that are left out."""
    first, second = KVCacheConfig("fp8", scale=0.5), KVCacheConfig("q8_0")
    made, config = model(), second if step == "quantize" else QATConfig(second, step="prepare")
    quantize_(made, QATConfig(FqnToConfig({r"re:.*layers\.1\.self_attn": first}), step="prepare"))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn: its KV cache is quantised already"):
        quantize_(made, config)
    assert list(hook.quantised(made)) == ["model.layers.1.self_attn"]
    with pytest.warns(AoquantWarning, match=r"layers\.1\.self_attn: its KV cache is quantised already"):
        quantize_(made, config, skip_incompatible=True)
    found = [layer.self_attn.kv_quant for layer in made.model.layers]
    assert [quant.config for quant in found] == [second, first, second]
    assert [quant.converted for quant in found] == [step == "quantize", False, step == "quantize"]


def test_transformers_quantised_cache_is_refused() -> None:
    class Cache:  # of layers that need no other package to be made so
        layers = [QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)]

    passing = hook.Passing(prepared().model.layers[0].self_attn, Cache())
    x = torch.zeros(1, 2, 1, 32)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*QuantoQuantizedLayer quantises"):
        passing.update(x, x, 0)


def test_writers_refuse_what_is_prepared(tmp_path) -> None:
    made = prepared()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*not converted"):
        aoquant.save_pretrained(made, tmp_path / "out")


@pytest.mark.parametrize("base", ["int4-g32", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [KVCacheConfig("fp8", "amax", per="head", query="fp8"), KVCacheConfig("q8_0")])
def test_checkpoints(tmp_path, config: KVCacheConfig, base: str | None) -> None:
    made = model()
    quantize_(made, QATConfig(base, kv_cache=config))
    if config.k_format.static:
        calibrate(made, [IDS])
    quantize_(made, QATConfig(step="convert"))
    aoquant.save_pretrained(made, tmp_path / "out")
    loaded = aoquant.load_pretrained(tmp_path / "out", attn_implementation="eager")
    assert [m.kv_quant.config for m in hook.quantised(loaded).values()] == 3 * [config]
    scales = {name: t for name, t in made.named_buffers() if name.endswith("_scale")}
    assert len(scales) == (9 if config.k_format.static else 0)
    for name, scale in scales.items():
        assert torch.equal(loaded.get_buffer(name), scale), name
    assert all(map(torch.equal, generated(loaded)[:2], generated(made)[:2]))


@pytest.mark.parametrize("missed", [KVCacheConfig(), None])
def test_a_name_that_matches_no_attention_module_warns(missed: KVCacheConfig | None) -> None:
    configs = {"re:.*layers\\.9\\.self_attn": missed, "re:.*self_attn": KVCacheConfig()}
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.warns(AoquantWarning, match=r"layers.*9.*matches no attention module"):
        quantize_(model, FqnToConfig(configs))
    assert len(hook.quantised(model)) == 3


@pytest.mark.parametrize("trains", [True, False])
def test_names_beside_layers(trains: bool) -> None:
    """A KV config that reaches no cache is refused, though layers are chosen; _default may be one in QATConfig too."""

    def given(**by_name: Any) -> Any:
        return QATConfig(FqnToConfig(by_name), step="prepare") if trains else FqnToConfig(by_name)

    made, cache, layers = model(), KVCacheConfig("q8_0"), aoquant.Int4WeightConfig(32)
    with pytest.raises(ValueError, match=r"no KV cache to quantise.*there are: model\.layers\.0\.self_attn"):
        quantize_(made, given(**{r"re:.*layers\.9\.self_attn": cache, "_default": layers}))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp, a LlamaMLP, which writes none"):
        quantize_(made, given(**{"model.layers.0.mlp": cache, "re:.*self_attn": cache, "_default": layers}))
    assert not hook.quantised(made) and not any("QAT" in type(m).__name__ for m in made.modules())
    quantize_(made, given(**{r"re:.*layers\.[01]\.self_attn": None, "_default": cache}))
    assert list(hook.quantised(made)) == ["model.layers.2.self_attn"]


def test_an_attention_without_source_is_refused_by_name() -> None:
    """Its source says how it uses its cache."""
    scope: dict[str, Any] = {"torch": torch}
    exec("class Own(torch.nn.Module):\n  def forward(self, x, cache=None): return cache.update(x, x, 0)[0]", scope)
    with pytest.raises(ValueError, match=r"0: Own\.forward has no source"):
        quantize_(torch.nn.Sequential(scope["Own"]()), KVCacheConfig())
