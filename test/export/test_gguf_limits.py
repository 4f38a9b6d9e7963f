"""Fields of a config that llama.cpp computes otherwise are refused by name, and those that GGUF has keys for are
written. Windows, YaRN and scales of attention were tried with llama-cpp-python 0.3.36: above 31 dB from transformers
with Q8_0 and random weights where written, below 17 dB where refused. The rest was read in llama.cpp.
"""

from __future__ import annotations

import json
import math
from typing import Any

import gguf
import pytest
from support.models import SMALL
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from aoquant.export import gguf_arch

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SLIDING, GLOBAL = "sliding_attention", "full_attention"


def config(kind: Any, **more: Any) -> dict[str, Any]:
    """As export reads it from a model."""
    name = kind.__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    return {**json.loads(kind(**{**SMALL, **more}).to_json_string()), "architectures": [name]}


REFUSED = [
    (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act='gelu' (llama.cpp: 'silu')"),
    # not "gelu": from transformers 5.18 or later on GemmaConfig makes "gelu_pytorch_tanh" of it, as llama.cpp does
    (GemmaConfig, {"head_dim": 32, "hidden_act": "relu"}, "hidden_act='relu' (llama.cpp: 'gelu_pytorch_tanh')"),
    (Qwen3Config, {"attention_bias": True}, "attention_bias=True (llama.cpp: False)"),
    (LlamaConfig, {"rope_parameters": {**YARN, "beta_fast": 4.0}}, "beta_fast=4.0 (llama.cpp: 32.0)"),
    (LlamaConfig, {"rope_parameters": {**YARN, "beta_slow": 2.0}}, "beta_slow=2.0"),
    (LlamaConfig, {"rope_parameters": {**YARN, "truncate": False}}, "truncate=False"),
    (Qwen2Config, {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
    (Gemma2Config, {**GEMMA, "query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16 (llama.cpp: 32)"),
    (Gemma2Config, {**GEMMA, "layer_types": [GLOBAL, GLOBAL]}, "layer_types='all full_attention'"),
    (Gemma2Config, {**GEMMA, "final_logit_softcapping": None}, "final_logit_softcapping=None (llama.cpp: 30.0)"),
    (Gemma3TextConfig, {**GEMMA, "query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16"),
    (Gemma3TextConfig, {**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (Gemma3TextConfig, {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
]


@pytest.mark.parametrize(
    ("kind", "more", "said"), REFUSED, ids=[f"{k.__name__}-{s.split('=')[0]}" for k, _, s in REFUSED]
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_field(kind: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp would compute another model than this") as caught:
        gguf_arch.find(config(kind, **more))
    assert said in str(caught.value) and str(caught.value).count("(llama.cpp:") == 1


def metadata(kind: Any, **more: Any) -> dict[str, Any]:
    """The keys of the file, without the architecture's name."""
    content = config(kind, **more)
    found = gguf_arch.find(content)
    writer = gguf.GGUFWriter(None, found.name)
    gguf_arch.add_metadata(writer, found, content)
    return {name.partition(".")[2]: v.value for name, v in writer.kv_data[0].items()}


def test_windows_and_rotations_that_gguf_has_keys_for_are_written() -> None:
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    plain = metadata(Gemma3TextConfig, **GEMMA)
    assert plain[window] == 4 and pattern not in plain and plain["rope.freq_base_swa"] == 10000.0
    local = {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "default", "rope_theta": 1e6},
    }
    other = metadata(Gemma3TextConfig, **GEMMA, layer_types=[GLOBAL, SLIDING], rope_parameters=local)
    assert other[pattern] == [False, True] and (other["rope.freq_base"], other["rope.freq_base_swa"]) == (1e6, 100.0)
    assert window not in metadata(Gemma3TextConfig, **GEMMA, layer_types=[GLOBAL, GLOBAL])
    assert metadata(Gemma2Config, **GEMMA, layer_types=[GLOBAL, SLIDING])[pattern] == [False, True]
    assert pattern not in metadata(Gemma2Config, **GEMMA)

    scaled = "rope.scaling.attn_factor"
    assert scaled not in metadata(LlamaConfig, rope_parameters=YARN)
    given = metadata(LlamaConfig, rope_parameters={**YARN, "attention_factor": 2.0})
    assert given[scaled] == pytest.approx(2 / (1 + 0.1 * math.log(4)))
    both = metadata(LlamaConfig, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 2.0})
    assert both[scaled] == pytest.approx((1 + 0.07 * math.log(4)) / (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize(
    ("kind", "more"),
    [(MistralConfig, {"head_dim": 32}), (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_a_window_that_llama_cpp_does_not_know_bounds_the_context(kind: Any, more: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="the file's context length is the window, 4 of 64 tokens"):
        assert metadata(kind, **more, sliding_window=4)["context_length"] == 4
    assert metadata(kind, **more, sliding_window=64)["context_length"] == 64
    assert metadata(LlamaConfig)["context_length"] == 64
