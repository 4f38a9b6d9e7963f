"""Scales of latent attention's KV cache are loaded under no name."""

from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

PREFIX = "model.layers.0.self_attn."
HELD = f"{PREFIX}mla_attn.mla_attn.k_scale"  # the parameter of vLLM's DeepSeek
mapper = ModelOptFp8Config.get_cache_scale_mapper()
for name in ("k_proj.k_scale", "k_scale", "mla_attn.k_scale", "mla_attn.mla_attn.k_scale"):
    ((renamed, _),) = mapper.apply([(PREFIX + name, None)])  # by AutoWeightsLoader, and then by the model
    assert maybe_remap_kv_scale_name(renamed, {HELD: None}) is None
assert maybe_remap_kv_scale_name(f"{PREFIX}k_proj.k_scale", {HELD: None}) == HELD  # the model alone finds it
