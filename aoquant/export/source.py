"""The source of an export: a converted model, in memory or as a checkpoint folder, weight by weight.

Both give the same things: the model's config as JSON, its modules (on meta for a folder: classes, names and ties, no
values) and a reader for every weight. A weight is read twice: once without its codes, to decide whether the target can
hold it, and once whole, to repack it. So a folder of any size is exported with one layer in memory, and nothing is
written before everything is decided.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.utils import TorchAOBaseTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from aoquant._messages import one_line, some
from aoquant.distributed import fsdp
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.routers import routers_of
from aoquant.export.weights import Weight, as_stored, given
from aoquant.files import checkpoint, checksums
from aoquant.files.atomic import POINTER
from aoquant.files.safetensors_file import StoredTensor, header, read_json
from aoquant.files.stored_names import model_names, warn_of_dtypes
from aoquant.kv import hook
from aoquant.linear.kinds import is_layer, matrix_of
from aoquant.linear.prepared import PreparedModule
from aoquant.linear.tensor import PackedTensor


@dataclass(frozen=True)
class Source:
    """A converted model. weights: by name, each once; experts' matrices one by one. tied: other names of the same
    weights. stock: the float model that an engine makes of the config, on meta. folder: of a checkpoint; None in
    memory. routers: names in files of routers' layers, which stay float.
    """

    config: dict[str, Any]
    modules: Mapping[str, nn.Module]
    weights: dict[str, Weight]
    tied: dict[str, str]
    stock: PreTrainedModel
    folder: Path | None = None
    routers: tuple[str, ...] = ()

    def embeddings(self) -> set[str]:
        """Names of the embeddings' modules."""
        return {name for name, module in self.modules.items() if isinstance(module, nn.Embedding)}

    def linears(self) -> list[str]:
        """Names of the linear layers' modules."""
        return [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]

    def in_files(self, module: str) -> str:
        """Name in files of a module with a weight."""
        weight = self.weights.get(f"{module}.weight")  # a tied one is stored under another name
        return module if weight is None else weight.module_in_files

    def names_of(self, modules: Iterable[str]) -> list[str]:
        """Names of modules in files and in the model: vLLM looks for the former, transformers for the latter."""
        return list(dict.fromkeys(name for module in modules for name in (self.in_files(module), module)))

    def left_out(self, quantised: Mapping[str, object]) -> list[str]:
        """Names of the modules that engines take for linear layers and that are not quantised."""
        return list(dict.fromkeys((*self.names_of(n for n in self.linears() if n not in quantised), *self.routers)))


def check_converted(model: nn.Module, writer: str, then: str, before: str = "") -> None:
    """Raise ValueError for a model that is sharded, and for layers or KV caches that are prepared and not converted.

    writer, then: who asks, and what to do with a gathered model, in words. before: how to save before training ends.
    """
    convert = "call quantize_(model, QATConfig(step='convert'))"
    if prepared := [name for name, m in model.named_modules() if isinstance(m, PreparedModule)]:
        raise ValueError(
            f"{len(prepared)} layer(s), such as {prepared[0]}, are prepared and not converted: {convert} first{before}"
        )
    if prepared := [fqn for fqn, m in hook.quantised(model).items() if not m.kv_quant.converted]:
        raise ValueError(f"{prepared[0]}: its KV cache is prepared and not converted: {convert}")
    if fsdp.is_distributed(model):
        raise ValueError(
            f"the model is sharded over ranks, and {writer} writes whole tensors: {fsdp.GATHER}, and {then} that"
        )


def of_model(model: nn.Module) -> Source:
    """The source that a converted Hugging Face model in memory is.

    Raises:
        ValueError: it is no Hugging Face model, is not converted, or is sharded.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"export writes Hugging Face models, got {type(model).__name__}: engines need its config.json")
    check_converted(model, "export", "export")
    warn_of_dtypes(model)

    def weight(name: str, t: Tensor) -> Weight:
        kind = type(t).__name__ if isinstance(t, TorchAOBaseTensor) else "Tensor"
        return Weight(name, kind, _in_memory(t), _expert_in_memory(t))

    return _checked(_of_model(model, weight))


def of_plan(model: PreTrainedModel, planned: Mapping[str, Weight], folder: Path) -> Source:
    """Return the source that a float model on meta will be when its `planned` weights, by name, are quantised.

    folder: of the float model, with its tokenizer.
    """
    found = _of_model(model, lambda name, t: planned.get(name) or Weight(name, "Tensor", given(t.detach())))
    return replace(_checked(found), folder=folder)


def _of_model(model: PreTrainedModel, weight: Callable[[str, Tensor], Weight]) -> Source:
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    if config.get("tie_word_embeddings") and not model.all_tied_weights_keys.keys() <= _ties(model).keys():
        config["tie_word_embeddings"] = False
    # not from the JSON text, which spells infinity as an object; transformers decodes that where it reads a file
    own = {name: config[name] for name in ("architectures", "dtype", "tie_word_embeddings") if name in config}
    plain = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    stock = empty(type(model), type(model.config).from_dict(plain | own))
    tied = {name: kept for name, kept in _ties(model).items() if name in _ties(stock)}
    scales = hook.scales(model)  # kv_cache.py writes them
    stored = {name: t for name, t in _kept(model, tied).items() if name not in scales}
    _check_fits(model, stock, stored)
    weights = as_stored(model, {name: weight(name, t) for name, t in stored.items()})
    return Source(config, dict(model.named_modules()), weights, tied, stock, routers=_routers(weights, model))


def of_checkpoint(folder: Path) -> Source:
    """The source that a folder of `aoquant.save_pretrained`, `aoquant.convert_checkpoint` or `aoquant run` is.

    Raises:
        ValueError: the folder holds no complete converted checkpoint of a model that transformers knows, or a tensor
            there is not what was written.
    """
    if not (folder / "config.json").is_file() and (folder / "checkpoint" / "config.json").is_file():
        folder = folder / "checkpoint"  # of a run's results
    with checkpoint.understood(folder):
        return _of_checkpoint(folder)


def _of_checkpoint(folder: Path) -> Source:
    checkpoint.check(folder)
    checksums.verify_unless_told(checkpoint.files(folder), configs=True)
    config = read_json(folder / "config.json")
    quantised = TorchAoConfig.from_dict(config.pop("quantization_config"))
    config.pop(POINTER, None)
    described: dict[str, str] = {}
    stored_tensors: dict[str, StoredTensor] = {}
    for path in checkpoint.files(folder):
        metadata, found = header(path)
        described |= metadata
        stored_tensors |= found
    model, stock = _skeleton(folder), _skeleton(folder)
    hook.attach_named(model, getattr(quantised.quant_type, "fqn_to_config", {}))
    tied, scales = _ties(model), hook.scales(model)
    no_weights = (*scales, "tensor_names", "format", *checksums.ENTRIES)
    names = [n for n in described if n not in tied and n not in no_weights]
    if wrong := sorted(_kept(stock, tied).keys() ^ set(names)):
        raise ValueError(
            f"{folder}: its tensors and {type(model).__name__}'s differ in {some(wrong)}: load it with aoquant.load_pretrained "
            "and export the model"
        )
    parts = {n: _parts(n, described[n]) for n in names}
    places = model_names(model, stored_tensors, (*(part for own in parts.values() for part in own), *scales))
    homes = {part: name for name, part in places.items()}
    for name in scales:
        if name not in homes:
            raise ValueError(f"{folder}: {name}, a scale of a KV cache, is in no file: save the checkpoint again")
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner).register_buffer(own_name, stored_tensors[homes[name]].read())
    weights = {
        n: _on_disk(folder, n, described[n], {p: stored_tensors[homes[p]] for p in parts[n] if p in homes})
        for n in names
    }
    places_of = {n: home.rpartition(".")[:2] for n in names if (home := homes.get(next(iter(parts[n]))))}
    kept_whole = {n: f"{owner}{dot}{n.rpartition('.')[2]}" for n, (owner, dot) in places_of.items()}
    weights = as_stored(model, weights, kept_whole, stored_tensors)
    return _checked(Source(config, dict(model.named_modules()), weights, tied, stock, folder, _routers(weights, model)))


def _checked(source: Source) -> Source:
    cached = hook.quantised(source.modules[""])
    if not cached and all(weight.tensor_class == "Tensor" for weight in source.weights.values()):
        raise ValueError("no layer of the model is quantised: call aoquant.quantize_ first; there is nothing to export")
    return source


def config_of(folder: Path) -> Any:
    """Return the config of a folder. Raises ValueError: transformers cannot read it."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except checkpoint.NO_MODEL as error:
        raise ValueError(f"{folder / 'config.json'}: transformers cannot read it: {one_line(error)}") from None


def _skeleton(folder: Path) -> PreTrainedModel:
    config = config_of(folder)
    del config.quantization_config
    return empty(class_of(config), config)


def empty(model_class: Any, config: Any, **options: Any) -> PreTrainedModel:
    """Return the float model of a config, on meta."""
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model: PreTrainedModel = make(config, **options)
    return model


def names_by_parameter(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def _ties(model: PreTrainedModel) -> dict[str, str]:
    """Second names of shared parameters, each with the one that files have."""
    tied = dict[str, str]()
    for names in names_by_parameter(model):
        kept = next((name for name in names if name not in model.all_tied_weights_keys), names[0])
        tied |= {name: kept for name in names if name != kept}
    return tied


def _kept(model: PreTrainedModel, tied: Iterable[str]) -> dict[str, Tensor]:
    """The tensors that a model's files hold, by name in the model. tied: second names, which they leave out."""
    left_out = {*tied, *(model._keys_to_ignore_on_save or ())}
    return {name: t for name, t in model.state_dict().items() if name not in left_out}


def _check_fits(model: PreTrainedModel, stock: PreTrainedModel, stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError for tensors that the model's own class, made from its config, does not have, or lacks."""
    expected = _kept(stock, _ties(stock))
    wrong = sorted(stored.keys() ^ expected.keys())
    for name in stored.keys() & expected.keys():
        owner = stock.get_submodule(name.rpartition(".")[0])
        shape = matrix_of(owner).shape if name.endswith(".weight") and is_layer(owner) else expected[name].shape
        if stored[name].shape not in (shape, expected[name].shape):
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"{type(model).__name__}: its tensors are not those that its config describes, and no engine would find {some(wrong)}: "
            "merge adapters, tie or untie weights as the config says, and undo other changes of its modules"
        )


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


def _parts(name: str, described: str) -> dict[str, str]:
    """The plain tensors that a weight is stored as, by name, each with its kind; "" for a plain weight."""
    module, _, parameter = name.rpartition(".")
    kinds = json.loads(described).get("_tensor_data_names")
    return {name: ""} if kinds is None else {f"{module}._{parameter}_{kind}": kind for kind in kinds}


def _on_disk(folder: Path, name: str, described: str, places: Mapping[str, StoredTensor]) -> Weight:
    """The weight whose parts lie in `places`. A plain one that is not there is stored in pieces, and read by these."""
    tensor_class: str = json.loads(described)["_type"]

    def place_of(part: str) -> StoredTensor:
        if part not in places:
            raise ValueError(f"{folder}: {part} is described and is in no file: copy or save the checkpoint again")
        return places[part]

    if tensor_class == "Tensor":
        return Weight(name, tensor_class, lambda codes: place_of(name).read())
    parts = _parts(name, described)
    metadata = {"tensor_names": json.dumps([name]), name: described}

    def built(codes: bool, rows: tuple[int, int] | None) -> Any:
        values = {}
        for part, kind in parts.items():
            place = place_of(part)
            if codes or kind != "qdata":
                values[part] = place.read() if rows is None else place.rows(*rows)
            else:
                count = place.shape[:1] if rows is None else (rows[1] - rows[0],)
                values[part] = torch.empty(*count, *place.shape[1:], dtype=place.dtype, device="meta")
        return unflatten_tensor_state_dict(values, metadata)[0][name]

    def expert(index: int, codes: bool) -> PackedTensor:
        return built(codes, (index, index + 1)).expert(0)

    return Weight(
        name, tensor_class, lambda codes: built(codes, None), expert if tensor_class == "PackedExperts" else None
    )


def _routers(weights: Mapping[str, Weight], model: nn.Module) -> tuple[str, ...]:
    """Names in files of the layers in a model's routers."""
    found = (f"{name}.{n}" for name, router in routers_of(model).items() for n, p in router.named_parameters())
    return tuple(weights[name].module_in_files for name in found if name.endswith(".weight"))


def class_of(config: Any) -> Any:
    """Return the transformers class that a config names; AutoModelForCausalLM where it names none."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(named, type) and issubclass(named, PreTrainedModel)
    return named if known else AutoModelForCausalLM
