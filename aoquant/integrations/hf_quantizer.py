"""transformers' quantizers of torchao's tensors and of FP-Quant, with what saving and loading them safely needs.

transformers keeps a quantizer for each quantisation method; importing aoquant puts this subclass of its torchao
quantizer in that place (see `_register.py`). A method "aoquant" of our own would be worse: without `import aoquant`
transformers skips a method that it does not know, with a log line, and goes on with random weights.

A config that trains, `TorchAoConfig(QATConfig(...))`, is no quantisation of a checkpoint: the float weights are loaded,
and `aoquant.quantize_` prepares the model as a whole. From then on it is the model that `quantize_` gives: it trains,
and what it saves is a float checkpoint. FP-Quant's config does the same wherever its own package does not run.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao
from torchao.quantization import FqnToConfig
from transformers.integrations.torchao import TorchAoDeserialize, TorchAoQuantize
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_fp_quant import FPQuantHfQuantizer
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_fp_quant_available
from transformers.utils.quantization_config import TorchAoConfig

from aoquant._messages import warn
from aoquant.config import WeightConfig
from aoquant.experts.families import experts_of, is_transposed, stacked_names, stacks_of
from aoquant.files import checksums
from aoquant.files.stored_names import wide_dtype
from aoquant.hybrid import HybridConfig
from aoquant.integrations.fp_quant import from_fp_quant
from aoquant.kv import KVCacheConfig, hook
from aoquant.linear.packed import adopt
from aoquant.planning import caches
from aoquant.planning.caches import CachePlan
from aoquant.planning.choose import each, key_of
from aoquant.planning.plan import ours
from aoquant.quantize import quantize_

REQUIRES = "pip install aoquant; then `import aoquant` before from_pretrained, or aoquant.load_pretrained(folder)"
_PACKED = ("PackedTensor", "PackedExperts")


class Quantizer(TorchAoHfQuantizer):
    """transformers' torchao quantizer with checksums, tied packed weights, and saving after loading.

    original_names: whether `save_pretrained` writes tensors under the names that transformers read them by, as it does
    unless save_original_format=False; checksums go by those names.
    """

    original_names = True
    quantization_config: Any
    caches: CachePlan | None = None  # of a model that is quantised as it is loaded

    @property
    def is_trainable(self) -> bool:
        """Adapters train beside codes of any width; transformers would refuse all but 8 bits."""
        return needs_aoquant(self.quantization_config) or bool(super().is_trainable)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a weight is packed as it is loaded: none, where the whole model is prepared afterwards."""
        scale = param_name.rpartition(".")[2] in hook.SCALES  # of a KV cache, whose module a config names
        return not (scale or trains(self.quantization_config)) and bool(
            super().param_needs_quantization(model, param_name, **kwargs)
        )

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        super().validate_environment(*args, **kwargs)
        if not torch.accelerator.is_available():
            self.offload_to_cpu = False

    def set_metadata(self, checkpoint_files: list[str]) -> None:
        super().set_metadata(checkpoint_files)
        self.metadata = rebuildable(getattr(self, "metadata", {}))
        checksums.verify_unless_told(Path(f) for f in checkpoint_files if f.endswith(".safetensors"))

    def get_weight_conversions(self) -> list[Any]:
        conversions: list[Any] = super().get_weight_conversions()
        for conversion in conversions:
            conversion.operations = [Rebuild(self)]
        return conversions

    def get_quantize_ops(self) -> Any:
        return Quantize(self)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the content of a checkpoint: plain tensors, and each file's metadata with the checksums.

        A model with offloaded weights gets no checksums: their values are not here to be read.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        again = {to for to, source in model.all_tied_weights_keys.items() if weights.get(to) is weights.get(source)}
        flat, metadata = flatten_tensor_state_dict({n: t for n, t in model.state_dict().items() if n not in again})
        metadata = rebuildable(metadata)
        config = json.loads(model.config.to_json_string())
        metadata[checksums.CONFIGS] = checksums.of_configs({"config.json": config})
        if not any(t.is_meta for t in flat.values()):
            metadata[checksums.KEY] = checksums.table(self._as_written(model, flat), metadata)
        return flat, metadata

    def _as_written(self, model: Any, flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors under their names in the files, as transformers' save_pretrained makes them."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        ignored = model._keys_to_ignore_on_save or ()
        kept = remove_tied_weights_from_state_dict({n: t for n, t in flat.items() if n not in ignored}, model)
        return revert_weight_conversion(model, kept) if self.original_names else kept

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if not (self.pre_quantized or trains(self.quantization_config)):
            self.caches = caches.plan(model, self.quantization_config.quant_type, None)
            if self.caches.layers is None:
                raise ValueError(
                    "TorchAoConfig quantises layers as they are loaded, and this config is for KV caches alone: load the "
                    "float model, and call aoquant.quantize_"
                )
            self.quantization_config = copy.copy(self.quantization_config)  # the caller's stays as it is
            self.quantization_config.quant_type = self.caches.layers
        super()._process_model_before_weight_loading(model, *args, **kwargs)
        if self.pre_quantized and not trains(self.quantization_config):
            hook.attach_named(model, getattr(self.quantization_config.quant_type, "fqn_to_config", {}))
        # before anything is built: transformers only logs what building raises
        _check_classes(model, getattr(self, "metadata", {}))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if trains(self.quantization_config):
            return self._prepared(model)
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if self.pre_quantized:
            forget_rebuilding(model)
        elif not isinstance(self.quantization_config.quant_type, FqnToConfig) and (experts := experts_of(model)):
            warn(
                f"stacked experts of {len(experts)} module(s), such as {next(iter(experts))}, stay float: TorchAoConfig quantises linear "
                "layers as they are loaded; call aoquant.quantize_ on the loaded float model"
            )
        for module in model.modules():
            adopt(module)
        if self.caches is not None:
            self.caches.apply(model)
        if needs_aoquant(self.quantization_config):
            self.quantization_config.__class__ = NotedConfig
        return model

    def _prepared(self, model: Any) -> Any:
        """Return the float model, prepared, and no longer one that transformers takes for quantised."""
        _release(self, model)
        config = self.quantization_config.quant_type
        kinds = (nn.Linear, nn.Embedding) if self.quantization_config.include_input_output_embeddings else (nn.Linear,)

        def chosen(module: nn.Module, fqn: str) -> bool:
            taken = isinstance(module, kinds) or bool(stacks_of(module))
            return taken and should_convert_module(fqn, self.modules_to_not_convert)

        if isinstance(config, FqnToConfig):
            if nn.Embedding in kinds:  # "_default" means them too, as it does in transformers
                keys, ends = config.fqn_to_config, (model.get_input_embeddings(), model.get_output_embeddings())
                names = [n for n, m in model.named_modules() if chosen(m, n) and any(m is end for end in ends)]
                named = {n: keys["_default"] for n in names if key_of(keys, n, default=True) == "_default"}
                config = FqnToConfig({**named, **keys})
            quantize_(model, config)
        else:
            quantize_(model, config, chosen)
        return model


def fp_quantizer(config: Any, *, pre_quantized: bool = True, **kwargs: Any) -> HfQuantizer:
    """Return transformers' FP-Quant quantizer, which needs a GPU and the package fp_quant; aoquant's where the config
    emulates, or that package is missing.

    Raises:
        ValueError: a folder of packed layers, and no package.
    """
    there = is_fp_quant_available()
    if pre_quantized and not there:
        raise ValueError("this folder was quantised by FP-Quant: read it with aoquant.load_pretrained, on any device")
    ours = not pre_quantized and (config.pseudoquantization or not there)
    return (FPQuantizer if ours else FPQuantHfQuantizer)(config, pre_quantized=pre_quantized, **kwargs)


class FPQuantizer(HfQuantizer):
    """Quantise a float model by FP-Quant's config, into aoquant's layers: they compute its numbers on any device."""

    is_serializable = is_trainable = True

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _release(self, model)
        quantize_(model, *from_fp_quant(self.quantization_config))
        return model


def trains(config: Any) -> bool:
    """Return whether a TorchAoConfig prepares for training, and packs nothing."""
    every = each(config.quant_type)
    return any(isinstance(c, HybridConfig) or getattr(ours(c), "step", None) == "prepare" for c in every)


def _release(quantizer: HfQuantizer, model: Any) -> None:
    """Make a model that `quantizer` loaded an ordinary one for transformers."""
    quantizer.remove_quantization_config(model)
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            vars(config).pop("_is_quantized", None)


def _check_classes(model: nn.Module, metadata: dict[str, str]) -> None:
    """Raise ValueError for packed experts in a layer, for a layer's packed weight in experts, and for experts that are
    turned round. Names that the model lacks are left out.

    A file's metadata says which class a weight gets, and without checksums anyone may have changed it. The shapes may
    agree all the same.
    """
    if not is_metadata_torchao(metadata):
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in json.loads(metadata["tensor_names"]):
        described, (owner, _, own) = json.loads(metadata[name]), name.rpartition(".")
        module = modules.get(owner)
        if module is None or own not in module._parameters or described["_type"] not in _PACKED:
            continue
        packed = described["_type"], described["_data"].get("transposed", False)
        stacked = own in stacked_names(module)
        wanted = ("PackedExperts", is_transposed(module)) if stacked else ("PackedTensor", False)
        if packed != wanted:
            raise ValueError(
                f"{name} is stored as {_described(*packed)}, and {type(module).__name__} takes {_described(*wanted)}: the "
                "description in the file's metadata is wrong, copy or save the checkpoint again"
            )


def _described(cls: str, transposed: bool) -> str:
    return f"{cls}{' (E, K, N)' if transposed else ''}"


class Rebuild(TorchAoDeserialize):
    """transformers' step that rebuilds a tensor subclass, in the dtype that a float weight would get in its place."""

    def convert(self, input_dict: Any, *, model: Any, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        dtype = model.get_parameter(full_layer_name).dtype  # of the empty parameter that is filled
        dtype = wide_dtype(model, full_layer_name, dtype) or dtype
        rebuilt = super().convert(input_dict, model=model, full_layer_name=full_layer_name, **kwargs)
        _ask_for_buffers(model, full_layer_name)
        return {name: weight.to(dtype) for name, weight in rebuilt.items()}


class Quantize(TorchAoQuantize):
    """transformers' step that quantises a weight as it is loaded."""

    def _quantize(self, module: nn.Module, config: Any, filter_fn: Any = lambda module, fqn: True) -> None:
        """Quantise the module that transformers chose: torchao's default filter leaves embeddings float."""
        super()._quantize(module, config, filter_fn)

    def convert(self, input_dict: Any, *, model: Any, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = super().convert(
            input_dict, model=model, full_layer_name=full_layer_name, **kwargs
        )
        _ask_for_buffers(model, full_layer_name)
        return made


def _ask_for_buffers(model: Any, weight: str) -> None:
    """Let transformers fill the buffers that no file holds, such as Gemma's embed_scale, in the module of a weight.

    Both steps call the whole module initialised, and it would keep buffers of unwritten memory. Its parameters have a
    mark of their own and stay.
    """
    module = model.get_submodule(weight.rpartition(".")[0])
    module._is_hf_initialized = not module._non_persistent_buffers_set


class NotedConfig(TorchAoConfig):
    """transformers' TorchAoConfig whose entry in config.json says what has to be imported to read it."""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "requires": REQUIRES}


def rebuildable(metadata: dict[str, str]) -> dict[str, str]:
    """Return a file's metadata with the names that torchao can take apart: it splits each at its last dot.

    Parameters and buffers of the model itself, such as BART's final_logits_bias, have no dot. They are plain tensors,
    which nobody has to rebuild; their own entries stay.
    """
    if not is_metadata_torchao(metadata):
        return metadata
    names = [name for name in json.loads(metadata["tensor_names"]) if "." in name]
    return {**metadata, "tensor_names": json.dumps(names)}


def needs_aoquant(config: Any) -> bool:
    """Return whether a TorchAoConfig holds configs of aoquant's, which cannot be read without it."""
    base = config.quant_type
    every = base.fqn_to_config.values() if isinstance(base, FqnToConfig) else (base,)
    return any(isinstance(c, WeightConfig | KVCacheConfig) for c in every)


def forget_rebuilding(model: Any) -> None:
    """Drop the step that rebuilt tensor subclasses on loading: saving would run it backwards, and it has no reverse."""
    if conversions := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [
            c for c in conversions if not any(isinstance(op, TorchAoDeserialize) for op in getattr(c, "operations", ()))
        ]


# Here, and in no function that aoquant calls once transformers is imported: this file may be what imports it.
assert auto.AUTO_QUANTIZER_MAPPING["torchao"] is TorchAoHfQuantizer
assert auto.AUTO_QUANTIZER_MAPPING["fp_quant"] is FPQuantHfQuantizer
auto.AUTO_QUANTIZER_MAPPING.update(torchao=Quantizer, fp_quant=fp_quantizer)
