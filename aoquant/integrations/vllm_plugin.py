"""The vLLM plugin: folders of `aoquant.save_pretrained` and `convert_checkpoint`, served by stock vLLM.

vLLM loads torchao checkpoints by quantising a placeholder of every layer and copying the stored codes into it. For a
`PackedTensor` the plugin zeroes the placeholder first, gives a fused layer the recipe that all of its parts have, gives
stacked experts a method of ours (vllm_experts.py), and reads folders by the names that vLLM splits. Source: vLLM 0.32
`quantization/torchao.py`.
"""

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.export import source
from aoquant.files import checksums
from aoquant.files.safetensors_file import header
from aoquant.integrations import vllm_experts
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
    _patch_loader(loader)


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


def _patch_loader(loader: Any) -> None:
    """Patch vLLM's DefaultModelLoader for folders of aoquant: models with experts are read as `weights_in` does, and
    float layers keep their weights on a CPU, where vLLM would pack them away from `sync_vllm`.
    """
    stock = loader.get_all_weights

    @functools.wraps(stock)
    def all_weights(self: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        if model_config.quantization == "torchao":
            folder, files, safetensors, _ = self._prepare_weights(
                model_name_or_path=model_config.model,
                subfolder=None,
                revision=model_config.revision,
                fall_back_to_pt=True,
                allow_patterns_overrides=None,
            )
            if safetensors and is_ours(files):
                for module in model.modules():
                    if hasattr(module, "quant_method"):
                        module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
                if any(hasattr(m, "moe_config") for m in model.modules()):
                    self.counter_before_loading_weights = time.perf_counter()  # vLLM logs how long it takes
                    return weights_in(Path(folder))
        return stock(self, model_config, model)

    loader.get_all_weights = all_weights


def is_ours(files: Sequence[str]) -> bool:
    """Return whether the files are those of aoquant's own checkpoint, and not of an export or another library."""
    return all({checksums.KEY, "tensor_names"} <= header(Path(file)).metadata.keys() for file in files)


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a folder of aoquant's as vLLM's loaders take them, one in memory at a time.

    Each expert's matrices stand under the names of the float checkpoint. vLLM goes by the names in the metadata, which
    are transformers' own; where files have others, as Mixtral's have, it would leave those weights unread without a
    word, and stacked experts have no name that its loader splits.

    Raises:
        ValueError: as `aoquant.export` of the folder.
    """
    for weight in source.of_checkpoint(folder).weights.values():
        yield weight.name_in_files, weight.read(True)
