"""The source of an export: a converted model, in memory or as a checkpoint folder, weight by weight.

Both give the same things: the model's config as JSON, its modules (on meta for a folder: classes, names and ties, no
values) and a reader for every weight. A weight is read twice: once without its codes, to decide whether the target can
hold it, and once whole, to repack it. So a folder of any size is exported with one layer in memory, and nothing is
written before everything is decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.utils import TorchAOBaseTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from aoquant.export.experts import Weight, as_stored
from aoquant.integrations import checkpoint, checksums
from aoquant.integrations.safetensors_file import StoredTensor, header
from aoquant.integrations.stored_names import stored_name
from aoquant.layers.packed_experts import PackedExperts
from aoquant.layers.qat import PreparedModule
from aoquant.layers.routers import routers_of
from aoquant.parallel import fsdp
from aoquant.tensor import PackedTensor


@dataclass(frozen=True)
class Source:
    """A converted model. weights: by name, each once; experts' matrices one by one. tied: other names of the same
    weights. folder: of a checkpoint; None in memory. routers: names of routers' layers, which stay float.
    """

    config: dict[str, Any]
    modules: Mapping[str, nn.Module]
    weights: dict[str, Weight]
    tied: dict[str, str]
    folder: Path | None = None
    routers: tuple[str, ...] = ()

    def embeddings(self) -> set[str]:
        """Names of the embeddings' modules."""
        return {name for name, module in self.modules.items() if isinstance(module, nn.Embedding)}

    def linears(self) -> list[str]:
        """Names of the linear layers' modules."""
        return [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]


def of_model(model: nn.Module) -> Source:
    """The source that a converted Hugging Face model in memory is.

    Raises:
        ValueError: it is no Hugging Face model, is not converted, or is sharded.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"export writes Hugging Face models, got {type(model).__name__}: engines need its config.json")
    if prepared := [name for name, m in model.named_modules() if isinstance(m, PreparedModule)]:
        raise ValueError(
            f"{len(prepared)} layer(s), such as {prepared[0]}, are prepared and not converted: call "
            "quantize_(model, QATConfig(step='convert')) first"
        )
    if fsdp.is_distributed(model):
        raise ValueError(
            f"the model is sharded over ranks, and export writes whole tensors: {fsdp.GATHER}, and export that"
        )
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = _ties(model)
    stored = {n: t for n, t in model.state_dict().items() if n not in tied and n not in ignored}
    if config.get("tie_word_embeddings") and "lm_head.weight" in stored:
        config["tie_word_embeddings"] = False
    weights = {name: Weight(name, _tensor_class(t), _in_memory(t), _expert_in_memory(t)) for name, t in stored.items()}
    weights = as_stored(model, weights)
    return _checked(Source(config, dict(model.named_modules()), weights, tied, routers=_routers(model)))


def of_checkpoint(folder: Path) -> Source:
    """The source that a folder of `aoquant.save_pretrained`, `aoquant.convert_checkpoint` or `aoquant run` is.

    Raises:
        ValueError: the folder holds no complete converted checkpoint of a model that transformers knows, or a tensor
            there is not what was written.
    """
    if not (folder / "config.json").is_file() and (folder / "checkpoint" / "config.json").is_file():
        folder = folder / "checkpoint"  # of a run's results
    checkpoint.check(folder)
    checksums.verify_unless_told(checkpoint.files(folder))
    config = checkpoint.read_json(folder / "config.json")
    config.pop("quantization_config")
    described: dict[str, str] = {}
    stored_tensors: dict[str, StoredTensor] = {}
    for path in checkpoint.files(folder):
        metadata, found = header(path)
        described |= metadata
        stored_tensors |= found
    model = _skeleton(folder)
    tied = _ties(model)
    names = [n for n in json.loads(described["tensor_names"]) if n not in tied]
    expected = {n for n in model.state_dict() if n not in tied and n not in set(model._keys_to_ignore_on_save or ())}
    if wrong := sorted(expected ^ set(names)):
        raise ValueError(
            f"{folder}: its tensors and {type(model).__name__}'s differ in {checkpoint.some(wrong)}: load it with aoquant.load_pretrained "
            "and export the model"
        )
    weights = {n: _on_disk(model, n, described[n], stored_tensors) for n in names}
    weights = as_stored(model, weights, stored_tensors)
    return _checked(Source(config, dict(model.named_modules()), weights, tied, folder, _routers(model)))


def _checked(source: Source) -> Source:
    if all(weight.tensor_class == "Tensor" for weight in source.weights.values()):
        raise ValueError("no layer of the model is quantised: call aoquant.quantize_ first; there is nothing to export")
    return source


def _skeleton(folder: Path) -> PreTrainedModel:
    """The float model of a folder's config.json, on meta."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'}: transformers cannot read it: {error}") from None
    del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _ties(model: PreTrainedModel) -> dict[str, str]:
    """Second names of shared parameters, each with the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _tensor_class(tensor: Tensor) -> str:
    return type(tensor).__name__ if isinstance(tensor, TorchAOBaseTensor) else "Tensor"


def _in_memory(tensor: Tensor) -> Callable[[bool], Tensor]:
    def read(codes: bool) -> Tensor:
        if isinstance(tensor, PackedTensor) and not codes:
            return _without_codes(tensor)
        return tensor.detach().cpu()

    return read


def _expert_in_memory(tensor: Tensor) -> Callable[[int, bool], PackedTensor] | None:
    if not isinstance(tensor, PackedExperts):
        return None

    def read(expert: int, codes: bool) -> PackedTensor:
        packed = tensor.expert(expert)
        return packed.detach().cpu() if codes else _without_codes(packed)

    return read


def _without_codes(p: PackedTensor) -> PackedTensor:
    others = [None if t is None else t.cpu() for t in (p.scale, p.zero_point, p.per_tensor_scale, p.act_pre_scale)]
    return p._with([torch.empty_like(p.qdata, device="meta"), *others])


def _on_disk(model: PreTrainedModel, name: str, described: str, stored_tensors: dict[str, StoredTensor]) -> Weight:
    content = json.loads(described)
    tensor_class: str = content["_type"]
    if tensor_class == "Tensor":
        return Weight(name, tensor_class, lambda codes: stored_tensors[stored_name(model, name)].read())
    module, _, parameter = name.rpartition(".")
    parts = {f"{module}._{parameter}_{part}": part for part in content["_tensor_data_names"]}
    places = {part: stored_tensors[stored_name(model, part)] for part in parts}
    metadata = {"tensor_names": json.dumps([name]), name: described}

    def built(codes: bool, rows: tuple[int, int] | None) -> Any:
        values = {}
        for part, kind in parts.items():
            place = places[part]
            if codes or kind != "qdata":
                values[part] = place.read() if rows is None else place.rows(*rows)
            else:
                count = place.shape[:1] if rows is None else (rows[1] - rows[0],)
                values[part] = torch.empty(*count, *place.shape[1:], dtype=place.dtype, device="meta")
        return unflatten_tensor_state_dict(values, metadata)[0][name]

    def expert(index: int, codes: bool) -> PackedTensor:
        stack = built(codes, (index, index + 1))
        assert isinstance(stack, PackedExperts)
        return stack.expert(0)

    return Weight(
        name, tensor_class, lambda codes: built(codes, None), expert if tensor_class == "PackedExperts" else None
    )


def _routers(model: nn.Module) -> tuple[str, ...]:
    """Names in files of the layers in a model's routers."""
    found = (f"{name}.{n}" for name, router in routers_of(model).items() for n, p in router.named_parameters())
    stored = (stored_name(model, name) for name in found)
    return tuple(name.removesuffix(".weight") for name in stored if name.endswith(".weight"))
