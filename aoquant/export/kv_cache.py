"""KV caches in exported folders: scales under the names that engines read, or the serving flag that no file can hold.

    compressed-tensors  kv_cache_scheme; self_attn.k_scale, v_scale, q_scale     fp8, for the tensor or each head
    modelopt            kv_cache_quant_algo; self_attn.k_proj.k_scale, v_proj.v_scale; self_attn.q_scale
                                                                                 fp8 and nvfp4, for the tensor
    a flag alone        --kv-cache-dtype of vLLM, -ctk and -ctv of llama.cpp     formats that make scales at run time;
                                                                                 fp8 of latent attention, scale 1.0

Engines quantise the cache of every layer alike, so one config for all of them is required. vLLM 0.33 renames the scales
of latent attention to names that it does not have, and computes with 1.0. With a scale for each head it wants a q_scale
for each query head. Source: vLLM `maybe_remap_kv_scale_name`, `get_cache_scale_mapper`, `kv_cache.py`; modelopt's
`unified_export_hf.py`; SGLang `fp4_kv_cache_quant_method.py`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from aoquant._messages import warn
from aoquant.export.targets import Description
from aoquant.export.weights import Weight, given
from aoquant.kv import KVCacheConfig, hook

_VLLM = {
    "fp8-token-head": "fp8_per_token_head",
    "int8-token-head": "int8_per_token_head",
    "int4-token-head": "int4_per_token_head",
    "fp8-e5m2": "fp8_e5m2",
}


def scheme_of(modules: Mapping[str, nn.Module], target: str) -> KVCacheConfig | None:
    """Return the config of a model's KV caches where the target's files hold it; None where there is none, or where a
    flag says it, which is warned of.

    modules: of the model, by name.

    Raises:
        ValueError: an engine that reads the files would store other bytes.
    """
    caches = hook.quantised(modules[""])
    if not caches:
        return None
    first, module = next(iter(caches.items()))
    config: KVCacheConfig = module.kv_quant.config
    others = [fqn for fqn, m in hook.attentions(modules[""]).items() if not hook.shares(m) and fqn not in caches]
    others += [fqn for fqn, m in caches.items() if m.kv_quant.config != config]
    if others:
        raise ValueError(
            f"{others[0]}: its KV cache is not quantised as that of {first}, and engines quantise all alike: quantise every "
            "cache by one config"
        )
    k, v = config.k_format.name, config.v_format.name
    if (k in ("q8_0", "q4_0") and v in ("q8_0", "q4_0")) != (target == "gguf") or (target != "gguf" and k != v):
        raise ValueError(
            f"{first}: no engine that reads {target} stores keys as {k} and values as {v}: train "
            + (
                "q8_0 or q4_0"
                if target == "gguf"
                else "one format for both, such as fp8 (q8_0 and q4_0 are llama.cpp's)"
            )
        )
    scales = [m.get_buffer(n) for m in caches.values() for n in hook.SCALES if n in m._buffers]
    if k in ("nvfp4", "fp8-e5m2") and not all(bool((t == 1).all()) for t in scales):
        why = "SGLang multiplies its scale by 6 and vLLM does not" if k == "nvfp4" else "engines take no scales for it"
        raise ValueError(
            f"{first}: {k} is exported with scale 1.0 alone, because {why}: train KVCacheConfig({k!r}, scale=1.0)"
        )
    if k == "nvfp4" and target != "modelopt":
        raise ValueError(
            f"{first}: kv_cache_scheme of {target} holds fp8 alone: export format='modelopt', or train fp8"
        )
    if config.per == "head" and target == "modelopt":
        raise ValueError(
            f"{first}: modelopt has one scale for a cache, and this one has a scale for each head: train per='tensor'"
        )
    latent = next((fqn for fqn, m in caches.items() if hook.is_latent(m)), None)
    if latent is not None and target != "gguf" and not all(bool((t == 1).all()) for t in scales):
        raise ValueError(
            f"{latent}: vLLM loads no scales of latent attention and computes with 1.0: train KVCacheConfig({k!r}, scale=1.0)"
        )
    serve = _VLLM | ({"fp8": "fp8"} if latent is not None and target == "compressed-tensors" else {})
    flag = f"-ctk {k} -ctv {v}" if target == "gguf" else f"--kv-cache-dtype {serve[k]}" if k in serve else ""
    if flag:
        warn(f"the files cannot say that the KV cache is {k}: serve them with {flag}")
        return None
    if k == "fp8" and config.query is None and latent is None:
        warn(
            "vLLM casts queries to fp8 beside an fp8 KV cache on NVIDIA GPUs, which training did not: train query='fp8'"
        )
    return config


def check_layers(layers: Mapping[str, Any], scheme: KVCacheConfig | None, target: str) -> None:
    """Raise ValueError for float layers where the target's files say nothing of the KV cache either."""
    if not layers and (scheme is None or target != "compressed-tensors"):
        raise ValueError(
            f"the layers are float, and {target} files say nothing of this KV cache alone: save the model by model.save_pretrained, "
            "and serve it with the engine's option for the cache; or quantise layers, too"
        )


def weights_of(modules: Mapping[str, nn.Module], stored: Mapping[str, Weight], target: str) -> dict[str, Weight]:
    """Return the scales of a model's KV caches as weights, under the target's names. stored: of the model's weights."""
    found: dict[str, Weight] = {}
    for fqn, module in hook.quantised(modules[""]).items():
        inside = next(w for name, w in stored.items() if name.startswith(f"{fqn}."))
        place = inside.name_in_files.removesuffix(inside.name.removeprefix(fqn)) if inside.stored else fqn
        for name in (n for n in hook.SCALES if n in module._buffers):
            of = {"k_scale": ".k_proj", "v_scale": ".v_proj"}.get(name, "") if target == "modelopt" else ""
            if of and not hasattr(module, of[1:]):
                of = ""
            own = f"{place}{of}.{name}"
            scale = module.get_buffer(name).detach().float().cpu()
            if name == "q_scale" and module.kv_quant.config.per == "head":  # vLLM takes the largest of each group
                scale = scale.expand(module.config.num_attention_heads, 1, 1).contiguous()
            found[own] = Weight(own, "Tensor", given(scale))
    return found


def describe(config: KVCacheConfig, description: Description, target: str) -> None:
    """Add the KV cache to a folder's description."""
    bits = 4 if config.k_format.name == "nvfp4" else 8
    scheme: dict[str, Any] = {"num_bits": bits, "type": "float", "dynamic": False}
    if target == "modelopt":
        algorithm = {"kv_cache_quant_algo": "NVFP4" if bits == 4 else "FP8"}
        description.config.update(algorithm, kv_cache_scheme=scheme)
        description.files["hf_quant_config.json"]["quantization"].update(algorithm)
    else:
        strategy = "attn_head" if config.per == "head" else "tensor"
        description.config["kv_cache_scheme"] = {**scheme, "strategy": strategy, "symmetric": True}


def attach_scheme(model: nn.Module, scheme: Any, scales: Mapping[str, Tensor]) -> str | None:
    """Quantise a model's KV caches as a folder's kv_cache_scheme says; return why it cannot be, or None.

    scheme: compressed-tensors' QuantizationArgs. scales: of the folder, by name in the model; absent ones are 1.
    """
    kind = (scheme.num_bits, scheme.type, scheme.symmetric, bool(scheme.dynamic))
    if kind != (8, "float", True, False) or scheme.strategy not in ("tensor", "attn_head"):
        return f"{scheme.num_bits}-bit {scheme.type}, strategy {scheme.strategy}"
    queries = [t for name, t in scales.items() if name.endswith(".q_scale")]
    if any(bool((t != t.flatten()[0]).any()) for t in queries):
        return "its queries have a scale for each head"
    query = "fp8" if queries else None
    config = KVCacheConfig("fp8", "amax", per="head" if scheme.strategy == "attn_head" else "tensor", query=query)
    modules = {fqn: m for fqn, m in hook.attentions(model).items() if not hook.shares(m)}
    for fqn, module in modules.items():
        if (reason := hook.why_not(module, config)) is not None:
            return f"{fqn}: {reason}"
    for fqn, module in modules.items():
        hook.attach(module, fqn, config, converted=True)
        for name in (n for n in hook.SCALES if n in module._buffers):
            empty = module.get_buffer(name)
            given = scales.get(f"{fqn}.{name}")
            if name == "q_scale" and given is not None:  # of every head the same
                given = given.flatten()[:1]
            if given is not None and given.numel() != empty.numel():
                raise ValueError(f"{fqn}.{name} holds {given.numel()} scales, and the model wants {empty.numel()}")
            values = empty.new_ones(empty.shape, device="cpu") if given is None else given.float().view(empty.shape)
            module.register_buffer(name, values)
    return None
