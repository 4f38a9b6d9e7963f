"""The vLLM plugin: folders of `aoquant.save_pretrained` and `convert_checkpoint`, served by stock vLLM.

vLLM loads torchao checkpoints by quantising a placeholder of every layer and copying the stored codes into it. For a
`PackedTensor` the plugin zeroes the placeholder first, gives a fused layer the recipe that all of its parts have, gives
stacked experts a method of ours (vllm_experts.py), and reads folders by the names that vLLM splits. Source: vLLM 0.32
`quantization/torchao.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from aoquant.integrations import vllm_experts, vllm_names
from aoquant.planning.choose import key_of

_MARK = "_aoquant"


def register() -> None:
    """Patch vLLM's torchao loader, once. Does nothing in a vLLM without one."""
    import aoquant as aoquant  # registers the tensor classes and configs

    try:
        from vllm.model_executor.layers.quantization import torchao
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    except ImportError:
        return
    patch(torchao, DefaultModelLoader)


def patch(torchao: Any, loader: Any, experts: Callable[[Any, Any, str], Any] = vllm_experts.method_in_vllm) -> None:
    """Patch the module that holds `torchao_quantize_param_data` and `TorchAOConfig`, and the class that reads files.

    experts: (config, layer, prefix) to the quantisation method of experts, or None for float.
    """
    if getattr(torchao, _MARK, False):
        return
    setattr(torchao, _MARK, True)
    quantize, method = torchao.torchao_quantize_param_data, torchao.TorchAOConfig.get_quant_method

    @functools.wraps(quantize)
    def zeroed(param: torch.Tensor, config: Any) -> Any:
        param.data.zero_()  # the checkpoint overwrites it
        return quantize(param, config)

    @functools.wraps(method)
    def fused(self: Any, layer: Any, prefix: str) -> Any:
        if hasattr(layer, "moe_config"):
            return experts(self, layer, prefix)
        parent, _, own = prefix.rpartition(".")
        mapping = getattr(self, "packed_modules_mapping", {})
        if parts := [f"{parent}.{part}" for part in mapping.get(own, ())]:
            left_out = {part for part in parts if torchao.should_skip(part, self.skip_modules)}
            if resolve_fused(self.torchao_config, left_out, prefix, parts) is None:
                self.skip_modules.append(prefix)
        return method(self, layer, prefix)

    torchao.torchao_quantize_param_data = zeroed
    torchao.TorchAOConfig.get_quant_method = fused
    vllm_names.patch_loader(loader)


def resolve_fused(config: Any, left_out: Collection[str], prefix: str, parts: Sequence[str]) -> Any:
    """The recipe of the fused layer `prefix`, which is that of all its `parts`, written into `config`; None for float.

    config: a recipe, or an `FqnToConfig`. left_out: parts that the checkpoint does not quantise.

    Raises:
        ValueError: the parts have different recipes, or some are quantised and some are not.
    """
    by_name = getattr(config, "fqn_to_config", {"_default": config})
    keys = [None if part in left_out else key_of(by_name, part, default=True) for part in parts]
    found = [None if key is None else by_name[key] for key in keys]
    if any(other != found[0] for other in found):
        said = ", ".join(f"{part.rpartition('.')[2]}: {c or 'float'}" for part, c in zip(parts, found, strict=True))
        raise ValueError(
            f"{prefix}: vLLM computes these layers as one, and they have different recipes ({said}): give them one"
        )
    # torchao keeps two equal fields; vLLM reads the older one, which is another dict in a config that was loaded
    for field in ("fqn_to_config", "module_fqn_to_config"):
        getattr(config, field, {}).setdefault(prefix, found[0])
    return found[0]
