"""GGUF's names for an architecture: its metadata, and how its tensors differ from Hugging Face's.

Three things differ. llama.cpp rotates pairs of neighbouring values where Hugging Face's Llama rotates halves of a head,
so the rows of Llama's and Mistral's q and k projections are permuted (Qwen's and Gemma's are not). Gemma's norms
multiply by 1 + w, and the file holds 1 + w. Llama 3's scaled rotation goes into a tensor of frequency factors. Names of
tensors are the `gguf` library's mapping. Source: llama.cpp `convert_hf_to_gguf.py`, `src/llama-arch.cpp`; transformers
`modeling_rope_utils.py`.

llama.cpp knows an architecture's activation function, scale of attention, soft caps and YaRN's ramp by heart, and reads
no key for them. A config that differs there is refused by field. Sliding windows are read for Gemma 2 and 3 alone;
Mistral's and Qwen's layers attend to all tokens, which is the same while the context is no longer than the window.
Source: llama.cpp `src/models/*.cpp`, `src/llama-context.cpp`. Windows, YaRN and scales of attention were run in
llama-cpp-python 0.3.36 against transformers; the rest was read.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, TensorNameMap, get_tensor_name_map
from torch import Tensor

from aoquant._messages import warn

_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_SCALED_BY_WIDTH = {MODEL_ARCH.GEMMA2: 46, MODEL_ARCH.GEMMA3: 62}  # layers of the 27B models, known by their number
_PERIOD = {MODEL_ARCH.GEMMA2: 2, MODEL_ARCH.GEMMA3: 6}  # every such layer is global


Field = tuple[str, Any, Any]  # of the config: its name, its value, and what llama.cpp computes


@dataclass(frozen=True)
class Architecture:
    """arch: gguf's. permuted: whether q's and k's rows are. norms_plus_one: whether norms are stored as 1 + w."""

    arch: MODEL_ARCH
    permuted: bool = False
    norms_plus_one: bool = False

    @property
    def name(self) -> str:
        return MODEL_ARCH_NAMES[self.arch]

    def names(self, layers: int) -> TensorNameMap:
        return get_tensor_name_map(self.arch, layers)

    def rows(self, name: str, t: Tensor, config: Mapping[str, Any]) -> Tensor:
        """A tensor's rows in llama.cpp's order. t: codes' bytes, values or a bias: the first dimension counts."""
        if not self.permuted:
            return t
        module = name.rpartition(".")[0].rpartition(".")[2]
        heads = {"q_proj": config["num_attention_heads"], "k_proj": kv_heads(config)}.get(module)
        if heads is None:
            return t
        return t.reshape(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


_LLAMA = Architecture(MODEL_ARCH.LLAMA, permuted=True)
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture(MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": Architecture(MODEL_ARCH.QWEN3),
    "GemmaForCausalLM": Architecture(MODEL_ARCH.GEMMA, norms_plus_one=True),
    "Gemma2ForCausalLM": Architecture(MODEL_ARCH.GEMMA2, norms_plus_one=True),
    "Gemma3ForCausalLM": Architecture(MODEL_ARCH.GEMMA3, norms_plus_one=True),
}


def find(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a model's config.

    Raises:
        ValueError: none is known, or llama.cpp would compute another model than the config says.
    """
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(f"gguf: no architecture is known for {name}; there are {', '.join(ARCHITECTURES)}")
    found = ARCHITECTURES[name]
    rope = rope_of(config)
    if (kind := rope.get("rope_type", "default")) not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(
            f"gguf: the model rotates by rope_type={kind!r}; the file can say default, linear, yarn and llama3"
        )
    if others := differences(found.arch, config, rope):
        raise ValueError(
            f"gguf: llama.cpp would compute another model than this {name}, and the file has no field for "
            + ", ".join(others)
        )
    return found


def kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_metadata(writer: GGUFWriter, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Sizes, norms, windows and rotation."""
    dim = head_dim(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(_context(architecture, config))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(kv_heads(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(config["vocab_size"])
    pattern = windows(architecture.arch, config)
    if any(pattern):
        writer.add_sliding_window(config["sliding_window"])
        if pattern != (known := default_windows(architecture.arch, len(pattern))) and any(known):
            writer.add_sliding_window_pattern(pattern)
    if local := local_rope(config):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if (cap := config.get("attn_logit_softcapping")) is not None:
        writer.add_attn_logit_softcapping(cap)
    if (cap := config.get("final_logit_softcapping")) is not None:
        writer.add_final_logit_softcapping(cap)
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if (factor := attention_factor(rope)) != 1.0:
            writer.add_rope_scaling_attn_factors(factor)


def _context(architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Tokens for which llama.cpp computes what the model does: no more than a window that it does not know."""
    length: int = config["max_position_embeddings"]
    unknown = any(windows(architecture.arch, config)) and not any(default_windows(architecture.arch, 2))
    if not unknown or config["sliding_window"] >= length:
        return length
    window: int = config["sliding_window"]
    warn(
        f"llama.cpp computes no sliding window for {architecture.name}: the file's context length is the window, {window} of {length} "
        "tokens, up to which the two are the same"
    )
    return window


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation's parameters; of the global layers where a model has two kinds."""
    found: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if isinstance(found.get("full_attention"), Mapping):
        found = dict(found["full_attention"])
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return found


def rope_factors(config: Mapping[str, Any]) -> Tensor | None:
    """(head_dim / 2,) float32 by which llama.cpp divides Llama 3's frequencies; None for an unscaled rotation."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    dim = head_dim(config)
    inverse = rope["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    wavelength = 2 * math.pi / inverse
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    factor = torch.full_like(smooth, rope["factor"])
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(smooth <= 0, factor, torch.where(smooth >= 1, torch.ones_like(factor), between))


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
