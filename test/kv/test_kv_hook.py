"""The parts around a KV cache one by one: the config's fields, where a cache is, what a module may have, its scales."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kv_models import prepared
from transformers.cache_utils import QuantoQuantizedLayer

from aoquant import KVCacheConfig
from aoquant.kv import hook


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, True, "max", None])
def test_a_scale_is_a_rule_or_a_finite_number_above_zero(scale: Any) -> None:
    with pytest.raises(ValueError, match="KVCacheConfig: scale"):
        KVCacheConfig("fp8", scale)


@pytest.mark.parametrize(("scale", "start"), [("pow2", 1.0), ("amax", 1.0), (2, 2.0), (0.5, 0.5)])
def test_scales_before_calibration(scale: Any, start: float) -> None:
    assert KVCacheConfig(scale=scale).start == start
    assert hook.scales(prepared(scale=scale)).popitem()[1].tolist() == [start]


def test_formats_of_keys_and_values() -> None:
    """Take a scale where one format is static; refuse one where none is, and a newer schema."""
    for given in ({"key": "q8_0"}, {"value": "q8_0"}):
        KVCacheConfig("fp8", 2.0, per="head", **given)
    for refused in ({"scale": 2.0}, {"per": "head"}, {"scale": "amax"}):
        with pytest.raises(ValueError, match="leave out scale and per"):
            KVCacheConfig("fp8", key="q8_0", value="q4_0", **refused)
    with pytest.raises(ValueError, match="schema 2"):
        KVCacheConfig(version=2)
    both = KVCacheConfig(key="q8_0", value="q4_0")
    assert (both.k_format.name, both.k_format.role, both.v_format.name, both.v_format.role) == (
        "q8_0",
        "k",
        "q4_0",
        "v",
    )
    assert [
        config.about
        for config in (KVCacheConfig(query="fp8"), both, KVCacheConfig(value="q8_0"), KVCacheConfig(key="fp8"))
    ] == ["fp8, queries too", "q8_0 keys, q4_0 values", "fp8 keys, q8_0 values", "fp8"]


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "wanted"),
    [
        (("x", "c", "y"), {}, ("cache", 1), (("x", ["c"], "y"), {})),
        (("x", "y", "c"), {}, ("cache", 2), (("x", "y", ["c"]), {})),
        (("x",), {"cache": "c"}, ("cache", 1), (("x",), {"cache": ["c"]})),
        (("x",), {"past_key_values": "c"}, ("cache", 1), (("x",), {"past_key_values": ["c"]})),
        (("x", None), {"past_key_values": "c"}, ("cache", 1), (("x", None), {"past_key_values": ["c"]})),
        (("x",), {}, ("past_key_values", 1), (("x",), {"past_key_values": [None]})),
        ((), {"x": "x"}, ("cache", 0), ((), {"x": "x", "cache": [None]})),
    ],
)
def test_the_place_of_the_cache(args: Any, kwargs: Any, argument: tuple[str, int], wanted: Any) -> None:
    """By place, by the name of forward, by the other name, or nowhere; other arguments stay as they are."""
    assert hook.in_place(args, kwargs, argument, lambda cache: [cache]) == wanted


class Cached(torch.nn.Module):
    """An attention module, whose fields are given, that writes into a cache."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.v_proj = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        vars(self).update(given)

    def forward(self, x: Any, cache: Any = None) -> Any:
        return cache.update(x, x, 0)


class Writeless(Cached):
    """Linear attention, which updates its cache by other means."""

    def forward(self, x: Any, cache: Any = None) -> Any:
        return cache.conv_states


class Crossed(Cached):
    def forward(self, x: Any, cache: Any = None) -> Any:
        return cache.cross_attention_cache.update(x, x, 0) or cache.update(x, x, 0)


class EncoderDecoder(Cached):
    def forward(self, x: Any, cache: Any = None) -> Any:
        return cache.update(x, x, 0) if type(cache).__name__ == "EncoderDecoderCache" else x


class Named(Cached):
    """Take the cache by its older name."""

    def forward(self, x: Any, past_key_values: Any = None) -> Any:
        return past_key_values.update(x, x, 0)


class _QuantAttention(Cached):
    pass


class QuantizedKVCache(torch.nn.Module):
    pass


def holding(inner: torch.nn.Module) -> Cached:
    module = Cached()
    module.inner = inner
    return module


LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}


@pytest.mark.parametrize(
    ("module", "config", "reason"),
    [
        (Cached(), KVCacheConfig(per="head"), None),
        (Named(head_dim=32), KVCacheConfig("nvfp4"), None),
        (Cached(**LATENT), KVCacheConfig(), None),
        (Writeless(), KVCacheConfig(), "Writeless writes no keys"),
        (Crossed(), KVCacheConfig(), "EncoderDecoderCache"),
        (EncoderDecoder(), KVCacheConfig(), "EncoderDecoderCache"),
        (_QuantAttention(), KVCacheConfig(), "another library .*_QuantAttention"),
        (holding(QuantizedKVCache()), KVCacheConfig(), "another library .*QuantizedKVCache"),
        (Cached(**LATENT), KVCacheConfig(per="head"), "one scale for all heads"),
        (Cached(**LATENT), KVCacheConfig(query="fp8"), "one scale for all heads"),
        (Cached(), KVCacheConfig(query="fp8"), "Cached calls no attention function"),
        (Cached(head_dim=24), KVCacheConfig("nvfp4", value="fp8"), "nvfp4 needs .*got 24"),
        (Cached(head_dim=24), KVCacheConfig("fp8", value="nvfp4"), "nvfp4 needs .*got 24"),
        (Cached(**LATENT | {"kv_lora_rank": 24}), KVCacheConfig("fp8", key="nvfp4"), "nvfp4 needs .*got 24"),
        (Cached(**LATENT | {"qk_rope_head_dim": 24}), KVCacheConfig("fp8", value="nvfp4"), "nvfp4 needs .*got 24"),
    ],
)
def test_why_an_attention_module_keeps_its_cache(module: Any, config: KVCacheConfig, reason: str | None) -> None:
    found = hook.why_not(module, config)
    assert found is None if reason is None else re.search(reason, found or "")


@pytest.mark.parametrize(
    ("given", "plain", "packed"),
    [
        ({"head_dim": 32, "config": SimpleNamespace(num_key_value_heads=2, num_attention_heads=8)}, 256, 2 * 68),
        ({"head_dim": 32, "config": SimpleNamespace(num_attention_heads=8)}, 1024, 8 * 68),
        ({"head_dim": 32, "config": SimpleNamespace(num_key_value_heads=None, num_attention_heads=8)}, 1024, 8 * 68),
        ({"head_dim": 32, "config": SimpleNamespace()}, 128, 68),
        ({"head_dim": 32}, 128, 68),
        ({"head_dim": None}, None, None),
        ({}, None, None),
        (LATENT | {"config": SimpleNamespace(num_key_value_heads=4)}, 160, 68 + 16),
        (LATENT | {"qk_rope_head_dim": 0}, None, None),
        ({"head_dim": 32, "is_kv_shared_layer": True}, 0, 0),
        ({"head_dim": 32, "is_kv_shared_layer": False}, 128, 68),
    ],
)
def test_bytes_of_a_token(given: dict[str, Any], plain: int | None, packed: int | None) -> None:
    """A row of int8-token-head has 4 bytes of scale, one of fp8 has none, and values of bfloat16 take 2 each."""
    module = Cached(**given)
    assert hook.bytes_per_token(module, None) == plain
    assert hook.bytes_per_token(module, KVCacheConfig("int8-token-head", value="fp8")) == packed


def test_high_precision_is_that_of_the_weights() -> None:
    assert hook.bytes_per_token(Cached(head_dim=32).float(), None) == 256
    module = Cached(head_dim=32)
    module.register_parameter("codes", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    assert hook.bytes_per_token(module, None) == 128
    del module.v_proj
    assert hook.bytes_per_token(module, None) == 2 * 32 * 4, "a module without weights computes in float32"


def test_attention_modules_hand_their_cache_to_no_module_inside() -> None:
    outer = holding(Named())
    assert list(hook.attentions(torch.nn.ModuleDict({"a": Cached(), "ab": outer}))) == ["a", "ab.inner"]
    assert list(hook.attentions(outer)) == ["inner"] and list(hook.attentions(Cached())) == [""]
    assert [hook.argument(m) for m in (Cached(), Named(), torch.nn.Linear(2, 2))] == [
        ("cache", 1),
        ("past_key_values", 1),
        None,
    ]


def test_said_scales_are_a_number_or_a_range() -> None:
    given = {"k_scale": [0.5], "v_scale": [2.0, 0.25, 1.0], "q_scale": [3.0, 3.0]}
    assert hook.said(given) == "k_scale 0.5, v_scale 0.25 to 2, q_scale 3" and hook.said({}) == ""


@pytest.mark.parametrize(
    ("layer", "number", "refused"), [("second", 0, False), ("second", 1, True), ("cross", 0, True)]
)
def test_caches_that_quantise_or_divide_otherwise(layer: str, number: int, refused: bool) -> None:
    """Only the own layer of a cache matters, and one that is not there yet is made by the cache."""
    own = QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=None), own], update=lambda k, v, *args: (k, v))
    if layer == "cross":
        cache = SimpleNamespace(layers=[], cross_attention_cache=None, update=cache.update)
    passing, x = hook.Passing(prepared().model.layers[0].self_attn, cache), torch.zeros(1, 2, 1, 32)
    if refused:
        kind = "SimpleNamespace" if layer == "cross" else "QuantoQuantizedLayer"
        with pytest.raises(ValueError, match=rf"layers\.0\.self_attn.*a {kind} quantises"):
            passing.update(x, x, number)
    else:
        assert torch.equal(passing.update(x, x, number)[0], x)


def test_what_else_a_module_asks_its_cache_is_answered_by_it() -> None:
    cache, module = SimpleNamespace(get_seq_length=lambda layer=0: 5 + layer, is_sliding=[True]), prepared()
    passing = hook.Passing(module.model.layers[0].self_attn, cache)
    assert passing.get_seq_length() == 5 and passing.get_seq_length(2) == 7 and passing.is_sliding == [True]
    assert hook.Passing(module.model.layers[0].self_attn, None).get_seq_length() == 0
    assert not hasattr(passing, "other")


@pytest.mark.parametrize(
    ("scale", "values", "calibrated", "warned"),
    [
        ("pow2", 1.0, False, True),
        ("amax", 1.0, False, True),
        ("pow2", 1.0, True, False),
        ("pow2", 2.0, False, False),
        (1.0, 1.0, False, False),
    ],
)
def test_scales_that_came_from_nowhere(scale: Any, values: float, calibrated: bool, warned: bool) -> None:
    """Tell scales that are given as numbers, loaded or set from the 1 that they begin with."""
    made = prepared(scale=scale)
    modules = hook.quantised(made)
    for module in modules.values():
        module.v_scale.fill_(values)
        module.kv_quant.calibrated = calibrated
    assert hook.uncalibrated(modules.values()) == (list(modules) if warned else [])
    first = next(iter(modules.values()))
    first.v_scale = first.v_scale.to("meta")  # not loaded yet
    assert hook.uncalibrated([first]) == []
    assert hook.uncalibrated(hook.quantised(prepared(format="q8_0", scale="pow2")).values()) == []


def test_caches_to_calibrate_take_their_scales_from_data() -> None:
    assert len(hook.to_calibrate(prepared(scale="amax"))) == 3
    assert len(hook.to_calibrate(prepared(format="q8_0", scale="pow2", query="fp8"))) == 3
    for config in ({"scale": 1.0}, {"format": "q8_0", "scale": "pow2"}):
        assert hook.to_calibrate(prepared(**config)) == {}
    made = prepared(scale="pow2")
    made.model.layers[1].self_attn.kv_quant.converted = True
    assert list(hook.to_calibrate(made)) == [f"model.layers.{i}.self_attn" for i in (0, 2)]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, None])
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "q_scale"])
def test_magnitudes_that_give_no_scale(name: str, wrong: float | None) -> None:
    made = prepared(scale="amax", per="head", query="fp8")
    modules = hook.quantised(made)
    for fqn, module in modules.items():
        seen = {n: torch.full_like(module.get_buffer(n), 448.0) for n in hook.SCALES}
        if fqn.endswith("1.self_attn"):
            seen = {n: t for n, t in seen.items() if n != name or wrong is not None}
            for t in (seen[name],) if name in seen else ():
                t.view(-1)[-1] = wrong
        module.kv_quant.found = seen
    found = hook.calibrated(modules)
    assert [isinstance(v, str) for v in found.values()] == [False, True, False]
    first = found["model.layers.0.self_attn"]
    assert isinstance(first, dict) and {n: t.flatten().tolist() for n, t in first.items()} == {
        "k_scale": [1.0, 1.0],
        "v_scale": [1.0, 1.0],
        "q_scale": [1.0],
    }


def test_latent_attention_has_one_scale_of_the_larger_magnitude() -> None:
    for name in ("k_scale", "v_scale"):
        module = prepared("deepseek_v3", scale="amax").model.layers[0].self_attn
        module.kv_quant.found = {n: torch.tensor([896.0 if n == name else 448.0]) for n in ("k_scale", "v_scale")}
        assert hook.calibrated({"": module})[""] == {"k_scale": torch.tensor([2.0]), "v_scale": torch.tensor([2.0])}


def test_watching_keeps_the_largest_magnitude_of_all_calls() -> None:
    """Make a scale for each key-value head where they are per head, and one for queries."""
    for per, wanted in (("head", [[[5.0]], [[7.0]]]), ("tensor", [7.0])):
        quant = hook.KVQuant("", KVCacheConfig(per=per), ("cache", 1), seen={})
        for x in (torch.tensor([1.0, -7.0]), torch.tensor([-5.0, 2.0])):
            for name in ("k_scale", "q_scale"):
                quant.watch(name, x.view(1, 2, 1, 1).expand(3, 2, 4, 8))
        assert quant.seen is not None and quant.seen["k_scale"].tolist() == wanted
        assert quant.seen["q_scale"].tolist() == [7.0]
