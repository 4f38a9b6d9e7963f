"""Hugging Face checkpoints: save a converted model, load it again, bit for bit.

HF writes and reads tensor subclasses through torchao's quantizer: safetensors that hold codes and scales as plain
tensors, their description in the header, and a `TorchAoConfig` in config.json. `attach` gives that quantizer to a model
that `aoquant.quantize_` converted, and from then on every `save_pretrained` (the Trainer's too) writes a loadable
checkpoint. Layers left in high precision are `modules_to_not_convert`, by name.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aoquant import _register
from aoquant._messages import advice, check_path
from aoquant.config import PackedWeightConfig, by_layer
from aoquant.kv import hook
from aoquant.linear.kinds import is_layer, is_linear, is_packed, kind_of, matrix_of
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.choose import key_of
from aoquant.planning.heads import input_embeddings
from aoquant.quantize import config_of, packed_stacks, quantize_
from aoquant.report.measure import weight_of

try:
    import transformers
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES
    from torchao.quantization import FqnToConfig
    from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TorchAoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

    from aoquant.export.filling import Filling
    from aoquant.export.source import check_converted
    from aoquant.files import checkpoint, checksums
    from aoquant.files.atomic import is_main
    from aoquant.files.safetensors_file import read_json, sort_metadata
    from aoquant.integrations import pretrained_model
    from aoquant.integrations.hf_quantizer import NotedConfig, Quantizer, forget_rebuilding, needs_aoquant

    # HF's loader collects a tensor's parts by these suffixes and knows no others
    _known = TorchAoHfQuantizer(TorchAoConfig(PackedWeightConfig("nvfp4"))).get_weight_conversions()[0].source_patterns
    _parts = {f"_weight_{part}" for part in (*PackedTensor.tensor_data_names, *PackedTensor.optional_tensor_data_names)}
    if unknown := _parts - set(_known):
        raise ImportError(f"its loader does not know {', '.join(sorted(unknown))}")
except (AttributeError, ImportError, IndexError, TypeError) as error:
    _found = ", ".join(
        f"{package} {_register.version(package)}" for package in ("transformers", "torchao", "safetensors")
    )
    raise ImportError(
        f"Hugging Face checkpoints need transformers >=5.16, torchao {_register.TORCHAO} and safetensors (pip install "
        f"'aoquant[hf]'); found {_found}: {error}"
    ) from error

_READERS = {
    "compressed-tensors": "aoquant.export.reading",
    "fp_quant": "aoquant.integrations.fp_quant_folder",
    "mxfp4": "aoquant.export.reading_mxfp4",
}


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> None:
    """Write a converted model to `directory` as safetensors that `from_pretrained` loads after `import aoquant`.

    A checkpoint in `directory` is replaced as a whole: after a kill at any moment the folder loads, as the old model or
    as the new one. Files that are no part of it stay.

    kwargs: for `PreTrainedModel.save_pretrained`, such as `max_shard_size`.

    Raises:
        ValueError: the model is not converted, or is sharded, a layer's config is unknown, or the folder cannot be
            written.

    Example:

            save_pretrained(model, "checkpoint", tokenizer, max_shard_size="2GB")
    """
    for argument in ("state_dict", "distributed_checkpoint"):
        if kwargs.get(argument):
            raise ValueError(
                f"save_pretrained takes no {argument}=: HF flattens a quantised model's own weights for safetensors; "
                "leave it out"
            )
    check_path(directory, "directory", "the folder to write")
    checkpoint.check_shard_size(kwargs.get("max_shard_size", 1))
    attach(model)
    model.hf_quantizer.original_names = kwargs.get("save_original_format", True)
    if not is_main(model, kwargs.get("is_main_process", True)):
        model.save_pretrained(directory, **kwargs)
        return
    if kwargs.get("push_to_hub"):
        kwargs.setdefault("repo_id", Path(directory).absolute().name)

    def write(folder: Path) -> None:
        model.save_pretrained(folder, **kwargs)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if not kwargs.get("variant"):
            checkpoint.check(folder)
            for file in checkpoint.files(folder):
                sort_metadata(file)

    pretrained_model.save(model, directory, write)


def load_pretrained(
    directory: str | os.PathLike[str],
    model_class: Any = AutoModelForCausalLM,
    *,
    verify_checksums: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a quantised checkpoint and check that it is whole: files, schema, keys, quantised weights, and every byte.

    A folder of compressed-tensors (llm-compressor's, Kimi K2's, or `aoquant.export`'s), of gpt-oss's MXFP4 or of
    FP-Quant becomes packed tensors too, with the codes that it holds; kwargs are dtype and device_map then.

    model_class: a transformers model class or AutoModel class; models that are no causal LM need it.
    verify_checksums: compare every tensor with the checksum that stands beside it, which reads the files once more.
    kwargs: for the class's `from_pretrained`, such as `device_map`.

    Raises:
        ValueError: the checkpoint is damaged, foreign, too new, or does not fit the model; says which file or weight
            and what to do.

    Example:

            model = load_pretrained("checkpoint", device_map="cuda")
    """
    for argument in ("quantization_config", "output_loading_info", "variant", "subfolder"):
        if argument in kwargs:
            raise ValueError(f"load_pretrained takes no {argument}=; use the model class's from_pretrained for that")
    check_path(directory, "directory", "a checkpoint folder")
    folder = Path(directory)
    if reader := _READERS.get(method := checkpoint.method(folder) or ""):
        with _loading(folder, model_class, verify_checksums):
            module = import_module(reader)  # which needs its library
            filling = Filling(folder, model_class, method, **kwargs)
            configs = module.fill(filling)
            loaded = filling.finish()
            if configs:
                quantize_(loaded, by_layer(configs))
        return loaded
    quantised = checkpoint.check(folder)
    if verify_checksums:
        checksums.verify_configs(checkpoint.files(folder))
    kwargs = {"trust_remote_code": False, **kwargs}  # else transformers asks
    with _loading(folder, model_class, verify_checksums):
        model, info = model_class.from_pretrained(directory, output_loading_info=True, **kwargs)
        if problems := _misfits(model, info, quantised):
            raise ValueError(
                f"{directory}: does not fit {type(model).__name__}: {'; '.join(problems[:10])}. Load it with the model "
                "class that saved it"
            )
    return model


@contextmanager
def _loading(folder: Path, model_class: Any, verify_checksums: bool) -> Iterator[None]:
    """Name the folder, and the class that was saved where it is another one, in what loading raises."""
    try:
        with nullcontext() if verify_checksums else checksums.not_verified(), checkpoint.understood(folder):
            yield
    except (ValueError, RuntimeError) as error:
        _check_class(folder, model_class, error)
        raise


def _misfits(model: nn.Module, info: Mapping[str, Any], quantised: Mapping[str, str]) -> list[str]:
    """Return how a loaded model differs from its checkpoint. quantised: classes of tensors by name."""
    problems = [f"{kind.replace('_', ' ')}: {sorted(map(str, found))[:5]}" for kind, found in info.items() if found]
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, kind in quantised.items():
        if type(weights.get(name)).__name__ != kind:
            problems.append(f"{name} is stored as {kind} and loaded as {type(weights.get(name)).__name__}")
    with torch.device("meta"):  # HF compares no shapes once a quantizer is there
        expected = _shapes(type(model)(model.config), quantised)
    for name, w in weights.items():
        if w.shape != expected[name]:
            rows = len(expected[name]) == 2 and expected[name][0] == getattr(model.config, "vocab_size", None)
            problem = f"{name} is {tuple(w.shape)} in the checkpoint and {tuple(expected[name])} in the model"
            if rows and w.shape[1:] == expected[name][1:]:
                problem += (
                    " for the vocab_size of config.json: quantised embeddings are not resized, so resize the float model "
                    "(resize_token_embeddings) and convert it again"
                )
            problems.append(problem)
    return problems


def _shapes(model: nn.Module, quantised: Collection[str]) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters, those of `quantised` weights as (N, K)."""
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    for fqn, module in model.named_modules(remove_duplicate=False):
        kind = kind_of(module)
        if kind is not None and kind.transposed and f"{fqn}.weight" in quantised:
            shapes[f"{fqn}.weight"] = matrix_of(module).shape
    return shapes


def _check_class(directory: Path, model_class: Any, error: Exception) -> None:
    """Raise ValueError naming the class that was saved, when loading failed with another one: the likely reason."""
    if "trust_remote_code" in str(error):  # it says what to do
        return
    config = read_json(directory / "config.json")
    named, made = config.get("architectures"), model_class.__name__
    saved = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if model_class is AutoModelForCausalLM:
        made = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type", "")), made)
    if saved != made and hasattr(transformers, saved or ""):
        raise ValueError(
            f"{directory}: {model_class.__name__} cannot load it ({str(error).partition(chr(10))[0]}): it holds a "
            f"{saved}, so give model_class=transformers.{saved}"
        ) from error


def attach(model: PreTrainedModel) -> TorchAoConfig:
    """Give a converted model HF's torchao quantizer and its config, derived from the layers; returns the config.

    Raises:
        ValueError: the model is not a HF model, is not converted, is sharded, or a layer's config is unknown.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"save_pretrained saves Hugging Face models, got {type(model).__name__}: for other modules use "
            "torch.save(model.state_dict()) and load_state_dict(..., assign=True)"
        )
    training = "; to save the float weights in the middle of training, call model.save_pretrained"
    check_converted(model, "save_pretrained", "save", training)
    before = getattr(model.config, "quantization_config", None)
    before = before if isinstance(before, TorchAoConfig) else None
    configs = {fqn: _config(fqn, m, before) for fqn, m in model.named_modules() if is_packed(weight_of(m))}
    stacks = {stack.fqn: stack.config for stack in packed_stacks(model)}
    configs |= stacks | {fqn: m.kv_quant.config for fqn, m in hook.quantised(model).items()}
    if not configs:
        raise ValueError(
            "no layer of the model is quantised: call aoquant.quantize_ first, or model.save_pretrained for a float "
            "checkpoint"
        )
    _check_tie(model)
    left_out = [fqn for fqn, m in model.named_modules() if is_layer(m) and not is_packed(weight_of(m))]
    embeds = any(isinstance(m, nn.Embedding) and is_packed(weight_of(m)) for m in model.modules())
    if not embeds:
        left_out = [fqn for fqn in left_out if is_linear(model.get_submodule(fqn))]
    one, *others = configs.values()
    # given one config, HF quantises nn.Linear only; embeddings, Conv1D and experts have to be named
    linear = not stacks and all(isinstance(model.get_submodule(fqn), nn.Linear) for fqn in configs)
    same = linear and all(config_to_dict(c) == config_to_dict(one) for c in others)
    config = TorchAoConfig(
        one if same else FqnToConfig(configs),
        modules_to_not_convert=left_out,
        include_input_output_embeddings=embeds and input_embeddings(model) is not None,
    )
    if needs_aoquant(config):
        config.__class__ = NotedConfig
    model.config.quantization_config = config
    model.hf_quantizer = Quantizer(config, pre_quantized=True)
    forget_rebuilding(model)
    return config


def _check_tie(model: PreTrainedModel) -> None:
    """HF ties head and embedding again on loading where the config says so: both hold one packed weight, or neither."""
    head, embedding = model.get_output_embeddings(), input_embeddings(model)
    if head is None or embedding is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    if head.weight is not embedding.weight and (is_packed(weight_of(head)) or is_packed(weight_of(embedding))):
        raise ValueError(
            f"the {'output head' if is_packed(weight_of(head)) else 'input embedding'} is quantised by itself, and the "
            "model's config ties it "
            "to the other, so no loader could rebuild both: quantise both together while they are tied, or set "
            "model.config.tie_word_embeddings = False to save them apart"
        )


def check_storable(kind: str, fqn: str) -> None:
    """Raise ValueError for a class of tensors that torchao's safetensors do not know."""
    if kind not in ALLOWED_TENSORS_SUBCLASSES:
        choose = advice(
            "a config that makes one of them, or use torch.save(model.state_dict()), for a machine with the same kernels",
            "a recipe whose name does not begin with torchao (`aoquant recipes`)",
        )
        raise ValueError(
            f"{fqn}: torchao's safetensors store {', '.join(ALLOWED_TENSORS_SUBCLASSES)}, not {kind}: choose {choose}"
        )


def _config(fqn: str, module: nn.Module, before: TorchAoConfig | None) -> Any:
    """Return the config that makes a layer's weight. Raises ValueError: it could be written and not read again."""
    weight: Any = module.weight
    kind = type(weight.data).__name__
    check_storable(kind, fqn)
    if foreign := [part for part in weight.__tensor_flatten__()[0] if f"_weight_{part}" not in _known]:
        raise ValueError(
            f"{fqn}: its {kind} holds {', '.join(foreign)}, which Hugging Face's loader does not know, so no "
            "checkpoint folder can hold it: use aoquant's own config instead, for static activations such as "
            "Int8WeightConfig(activation='int8-tensor-static'), or torch.save(model.state_dict())"
        )

    config = config_of(module)
    if config is None and before is not None:
        config = before.quant_type
        if isinstance(config, FqnToConfig):
            key = key_of(config.fqn_to_config, fqn, default=True)
            config = config.fqn_to_config[key] if key else None
    if config is None:
        raise ValueError(
            f"{fqn}: holds a {type(weight).__name__} that neither aoquant.quantize_ nor HF made, so its config is "
            "unknown: quantise with aoquant.quantize_, or set it as the layer's `aoquant_config`"
        )
    # convert stamps float8 layers with the kernel that prepare computed; the config that makes them says so too
    if getattr(config, "kernel_preference", None) not in (None, getattr(weight, "kernel_preference", None)):
        config = dataclasses.replace(config, kernel_preference=weight.kernel_preference)
    return config
