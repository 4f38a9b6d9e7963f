"""Where llama.cpp computes another model than a config says, whatever the file holds.

llama.cpp knows an architecture's activation function, scale of attention, soft caps and YaRN's ramp by heart, and reads
no key for them. A config that differs there is refused by field. Sliding windows are read for Gemma 2 and 3 alone;
Mistral's and Qwen's layers attend to all tokens, which is the same while the context is no longer than the window.
Source: llama.cpp `src/models/*.cpp`, `src/llama-context.cpp`. Windows, YaRN and scales of attention were run in
llama-cpp-python 0.3.36 against transformers; the rest was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from gguf import MODEL_ARCH

_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_SCALED_BY_WIDTH = {MODEL_ARCH.GEMMA2: 46, MODEL_ARCH.GEMMA3: 62}  # layers of the 27B models, known by their number
_PERIOD = {MODEL_ARCH.GEMMA2: 2, MODEL_ARCH.GEMMA3: 6}  # every such layer is global


Field = tuple[str, Any, Any]  # of the config: its name, its value, and what llama.cpp computes


def differences(arch: MODEL_ARCH, config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Every field in which the model is not the one that llama.cpp would compute. rope: of the global layers."""
    every = (*_network(arch, config), *_rotation(arch, config, rope))
    return [f"{field}={value!r} (llama.cpp: {engine!r})" for field, value, engine in every if value != engine]


def default_windows(arch: MODEL_ARCH, layers: int) -> list[bool]:
    """Return whether each layer has a sliding window where the file says nothing; all False where none is known."""
    period = _PERIOD.get(arch, 1)
    return [bool((i + 1) % period) for i in range(layers)]


def windows(arch: MODEL_ARCH, config: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer of the model has a sliding window."""
    layers: int = config["num_hidden_layers"]
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [False] * layers
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch in _PERIOD:
        return default_windows(arch, layers)
    if config["architectures"][0] == "LlamaForCausalLM":
        return [False] * layers
    return [i >= config.get("max_window_layers", 0) for i in range(layers)]


def attention_factor(rope: Mapping[str, Any]) -> float:
    """YaRN's factor on cosines and sines over the one that llama.cpp makes of `factor` alone."""
    plain = _mscale(rope["factor"], 1.0)
    given = rope.get("attention_factor")
    if given is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        given = _mscale(rope["factor"], rope["mscale"]) / _mscale(rope["factor"], rope["mscale_all_dim"])
    return 1.0 if given is None else float(given) / plain


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def _network(arch: MODEL_ARCH, config: Mapping[str, Any]) -> Iterator[Field]:
    gemma = arch in (MODEL_ARCH.GEMMA, MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)
    act = "hidden_activation" if arch in _PERIOD else "hidden_act"
    known = "gelu_pytorch_tanh" if gemma else "silu"
    used = config.get(act, known)
    yield act, _SAME.get(used, used), known
    if arch != MODEL_ARCH.LLAMA:  # Qwen3's output projection was run: llama.cpp refuses the file
        yield "attention_bias", bool(config.get("attention_bias")), False
    if arch not in _PERIOD:
        return
    heads, width = config["num_attention_heads"], config["hidden_size"]
    wide = config["num_hidden_layers"] == _SCALED_BY_WIDTH[arch]
    scale = width // heads if wide else config.get("head_dim") or width // heads
    yield "query_pre_attn_scalar", config.get("query_pre_attn_scalar", scale), scale
    if arch == MODEL_ARCH.GEMMA2:
        for cap, known_cap in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            if config.get(cap, known_cap) is None:
                yield cap, None, known_cap
        if not any(windows(arch, config)):  # llama.cpp aborts
            yield "layer_types", "all full_attention", "some sliding_attention"
    else:
        yield "attn_logit_softcapping", config.get("attn_logit_softcapping"), None
        yield "use_bidirectional_attention", bool(config.get("use_bidirectional_attention")), False


def _rotation(arch: MODEL_ARCH, config: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[Field]:
    kind = rope.get("rope_type", "default")
    yield "partial_rotary_factor", rope.get("partial_rotary_factor") or 1.0, 1.0
    if kind == "yarn":
        yield "beta_fast", float(rope.get("beta_fast") or 32), 32.0
        yield "beta_slow", float(rope.get("beta_slow") or 1), 1.0
        yield "truncate", rope.get("truncate", True), True
    if (kind == "llama3" and arch != MODEL_ARCH.LLAMA) or (kind == "yarn" and arch == MODEL_ARCH.GEMMA3):
        yield "rope_type", kind, "default"
    local = local_rope(config)
    yield "rope_type of sliding_attention", local.get("rope_type", "default"), "default"


def local_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotation's parameters of layers with a window, where they have their own."""
    found = (config.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(found, Mapping):
        return found
    return {"rope_theta": config["rope_local_base_freq"]} if config.get("rope_local_base_freq") else {}
