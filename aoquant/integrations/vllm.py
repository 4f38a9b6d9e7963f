"""The vLLM plugin: folders of `aoquant.save_pretrained` and `convert_checkpoint`, served by stock vLLM.

vLLM loads torchao checkpoints by quantising a placeholder of every layer and copying the stored codes into it. Two
things stand in the way of a `PackedTensor`, and the plugin mends both where vLLM starts a process (entry point group
vllm.general_plugins):

- The placeholder is uninitialised memory, which aoquant refuses to quantise when it holds NaN or Inf. It is zeroed
  first.
- A config of several recipes names q_proj and k_proj, and vLLM asks for qkv_proj. The fused layer gets the recipe that
  all of its parts have, and parts with different ones are refused by name: one GEMM has one recipe.

Weights fused by rows need an outer scale a row, which is how PackedTensor stores it, so any format is served: GridFlip,
four-over-six and transforms too. Source: vLLM 0.32 `quantization/torchao.py`. A first version was run by hand on its
CPU build; the tests run this one against a stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_MARK = "_aoquant"


def register() -> None:
    """Patch vLLM's torchao loader, once. Does nothing in a vLLM without one."""
    import aoquant as aoquant  # registers the tensor classes and configs

    try:
        from vllm.model_executor.layers.quantization import torchao
    except ImportError:
        return
    patch(torchao)


def patch(torchao: Any) -> None:
    """Patch the module that holds `torchao_quantize_param_data` and `TorchAOConfig`."""
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
        mapping = getattr(self, "packed_modules_mapping", {})
        resolve_fused(self.torchao_config, prefix, mapping)
        return method(self, layer, prefix)

    torchao.torchao_quantize_param_data = zeroed
    torchao.TorchAOConfig.get_quant_method = fused


def resolve_fused(config: Any, prefix: str, mapping: Mapping[str, Sequence[str]]) -> None:
    """Give `config`, an `FqnToConfig`, an entry for the fused layer `prefix` where it has them for the parts.

    mapping: a fused layer's own name to those of its parts, vLLM's packed_modules_mapping.

    Raises:
        ValueError: the parts have different recipes.
    """
    by_name = getattr(config, "fqn_to_config", None)
    parent, _, own = prefix.rpartition(".")
    if by_name is None or prefix in by_name or own not in mapping:
        return
    parts = [f"{parent}.{part}" for part in mapping[own]]
    if not any(part in by_name for part in parts):
        return
    found = [by_name.get(part) for part in parts]
    if any(other != found[0] for other in found):
        said = ", ".join(f"{part.rpartition('.')[2]}: {c}" for part, c in zip(parts, found, strict=True))
        raise ValueError(
            f"{prefix}: vLLM computes these layers as one, and they have different recipes ({said}): give them one"
        )
    by_name[prefix] = found[0]
