"""The layout of a converted checkpoint, file by file, before a single weight is read.

The model is built on the meta device from config.json, quantised there by the code that quantises real models, and
taken through Hugging Face's own rules for names, tied weights and shards. Read backwards, they name the tensor of the
source behind every tensor that will be written. Any misfit is an error here.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from aoquant._messages import advice, some
from aoquant.experts.families import is_transposed
from aoquant.experts.packed_experts import packed_experts
from aoquant.export.source import class_of, config_of, empty, names_by_parameter
from aoquant.files import checkpoint, checksums
from aoquant.files.safetensors_file import StoredTensor, read_json, reading
from aoquant.files.stored_names import keep_wide, pieces_of, stored_name
from aoquant.formats import FLOAT_DTYPES
from aoquant.integrations import hf
from aoquant.integrations.plans import ptq_plan
from aoquant.kv import hook
from aoquant.planning import caches, stack_changes
from aoquant.planning.changes import Change
from aoquant.planning.coverage import Coverage, coverage
from aoquant.planning.fused import shared_at_once
from aoquant.planning.plan import not_finite
from aoquant.planning.tied import identity
from aoquant.quantize import apply, pack

# buffers of old checkpoints, which models compute themselves
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True)
class Source:
    """A layer's weight, or a stacked parameter of experts, to quantise.

    names: several when layers share a weight.
    stored: where it is stored: one tensor; or for each expert the tensors whose rows are its weight (N, K), in order.
    dtype: to load it in.
    experts: how many a stack has, each of which is a unit; None for a layer, which is one unit.
    """

    change: Change
    names: list[str]
    stored: StoredTensor | Sequence[Sequence[StoredTensor]]
    dtype: torch.dtype
    experts: int | None = None

    @property
    def place(self) -> tuple[Path, int]:
        """Return where its first byte is stored."""
        first = self.stored if isinstance(self.stored, StoredTensor) else self.stored[0][0]
        return first.path, first.start

    @property
    def size(self) -> int:
        """Bytes to read."""
        if isinstance(self.stored, StoredTensor):
            return self.stored.size
        return sum(source.size for sources in self.stored for source in sources)

    @property
    def units(self) -> Sequence[int | None]:
        """Return the experts, or None for the one unit of a layer."""
        return (None,) if self.experts is None else range(self.experts)

    def rebuilt(self) -> type[Tensor]:
        """Return the class of the tensor that loaders make."""
        return type(self.change.weight.data)

    @torch.no_grad()
    def encode(self, unit: int | None, device: torch.device | str) -> dict[str, Tensor]:
        """Return a unit's stored parts by name, those of an expert as one row (1, ...).

        Raises:
            ValueError: the weight holds NaN or Inf.
        """
        weight, change = self.read(unit), self.change
        if change.layer is not None:
            packed = pack(change, weight, device)
        else:
            one = stack_changes.pack_expert(change, weight, device)
            packed = packed_experts([one], transposed=is_transposed(change.module))
        return flatten_tensor_state_dict(dict.fromkeys(self.names, packed))[0]

    def read(self, unit: int | None) -> Tensor:
        """Return a unit's float weight (N, K). Raises ValueError: it holds NaN or Inf."""
        if not isinstance(self.stored, StoredTensor):
            assert unit is not None
            weight = torch.cat([source.read() for source in self.stored[unit]])
        elif unit is None:
            weight = self.stored.read()
        else:
            weight = self.stored.rows(unit, unit + 1)[0]
            weight = weight.t() if is_transposed(self.change.module) else weight
        weight = weight.to(self.dtype)
        if reason := not_finite(weight):
            expert = "" if unit is None else f", expert {unit}"
            raise ValueError(f"{self.change.fqn}{expert} {tuple(weight.shape)}: {reason}")
        return weight


@dataclass(frozen=True)
class Skeleton:
    """A converted checkpoint without its values.

    model: quantised, on meta, with its quantisation config. files: tensors (meta) by name, by file. metadata: of every
    file's header, under the model's own names. index: content of the index file, None for a single file. layers: to
    encode, and stacked experts. parts: where their codes and scales are written, name in the model to name in the files
    (transformers renames some architectures' tensors). copies: where tensors that stay float are read. scales: of KV
    caches, which no text calibrates. twins: pairs that the config ties and the source holds twice: must be equal.
    skipped: layers left out, and why. coverage: the quantised parameters, and the float ones.
    """

    model: PreTrainedModel
    files: dict[str, dict[str, Tensor]]
    metadata: dict[str, str]
    index: dict[str, Any] | None
    layers: list[Source]
    parts: dict[str, str]
    copies: dict[str, StoredTensor]
    scales: dict[str, Tensor]
    twins: list[tuple[StoredTensor, StoredTensor]]
    skipped: Mapping[str, str]
    coverage: Coverage

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.dtype.itemsize for tensors in self.files.values() for t in tensors.values())

    def save_configs(self, folder: Path, source: Path) -> None:
        """Write index, generation_config.json and, last, config.json: a folder without it loads nowhere."""
        if self.index is not None:
            text = json.dumps(self.index, indent=2, sort_keys=True) + "\n"
            (folder / checkpoint.INDEX).write_text(text, encoding="utf-8")
        if self.model.can_generate():
            generation, stored = self.model.generation_config, source / "generation_config.json"
            if stored.is_file():
                with reading(stored):
                    generation = GenerationConfig.from_pretrained(source)
            generation.save_pretrained(folder)
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(folder)


def build(
    source: Path,
    stored: Mapping[str, StoredTensor],
    config: Any,
    max_shard_size: int | str,
    dtype: torch.dtype | str,
    *,
    skip_incompatible: bool = False,
) -> Skeleton:
    """Return the skeleton of what `config` makes of the checkpoint in `source`, whose tensors are `stored`.

    Raises:
        ValueError: as the module's docstring says.
    """
    model = empty_model(source, stored, dtype)
    names = model.state_dict()
    floats = {k: t for k, t in names.items() if k not in (model._keys_to_ignore_on_save or ())}
    kept = remove_tied_weights_from_state_dict(dict(floats), model)
    expected = revert_weight_conversion(model, dict(kept))
    tied = _tied(model)
    sources = {name: _home(name, stored, tied) for name in expected}
    twins = [
        (stored[a], stored[b])
        for a in floats.keys() - kept.keys()
        for b in tied[a]
        if {a, b} <= stored.keys() and b in kept
    ]
    _check_keys(source, stored, model, sources, tied)
    for name, found in sources.items():
        _check_stored(name, found, expected[name])

    layers, packed = list[Source](), dict[Hashable, nn.Parameter]()
    planned = ptq_plan(model, config, skip_incompatible=skip_incompatible)
    for stack in planned.experts:
        layers.append(_source(stack, model, stored, tied))
    for stack in planned.experts:
        stack_changes.apply(stack)
    for change in planned.layers:
        weight = change.module.weight
        if identity(weight) not in packed:
            layers.append(_source(change, model, stored, tied))
        apply(change, packed)
    quantise_caches(model, config, skip_incompatible=skip_incompatible)
    caches.warn_of_scales(hook.uncalibrated(hook.quantised(model).values()))
    hf.attach(model)

    flat, metadata = model.hf_quantizer.get_state_dict_and_metadata(model)
    layers = [replace(y, names=[n for n in y.names if n in metadata]) for y in layers]  # a tied pair is saved once
    flat = {k: t for k, t in flat.items() if k in kept or k not in names}
    reverted = revert_weight_conversion(model, flat)
    written = {id(t): name for name, t in reverted.items()}  # renaming hands the same tensors on
    parts = {name: written[id(t)] for name, t in flat.items() if name not in names}
    tensors = {k: reverted[k] for k in sorted(reverted, key=dot_natural_key)}  # as a loaded model saves them
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    index = None
    if split.is_sharded:
        total = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": total, "weight_map": split.tensor_to_filename}
    files = {file: {n: tensors[n] for n in names} for file, names in split.filename_to_tensors.items()}
    scales = {written[id(flat[name])]: flat[name] for name in hook.scales(model)}
    copies = {name: found for name in tensors if (found := sources.get(name)) is not None}
    metadata[checksums.KEY] = checksums.table(tensors, metadata)  # placeholders: there are no values yet
    header = {**metadata, "format": "pt"}
    left = planned.skipped, coverage(model)
    return Skeleton(model, files, header, index, layers, parts, copies, scales, twins, *left)


def quantise_caches(model: PreTrainedModel, config: Any, *, skip_incompatible: bool) -> None:
    """Quantise the KV caches of a model on meta, with the scales that an uncalibrated model has."""
    caches.plan(model, config, None, skip_incompatible=skip_incompatible).apply(model)
    for name, scale in hook.scales(model).items():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        start = torch.full_like(scale, module.kv_quant.config.start, device="cpu")
        module.register_buffer(name.rpartition(".")[2], start)


def _source(
    change: Change, model: PreTrainedModel, stored: Mapping[str, StoredTensor], tied: Mapping[str, list[str]]
) -> Source:
    weight = change.weight
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is weight]
    if change.layer is None:
        count, pieces = len(weight), pieces_of(model, names[0])
        homes = [(p.expert, _home(p.name, stored, tied)) for p in pieces]
        split = [[found for e, found in homes if found and e == expert] for expert in range(count)]
        whole = None if pieces else _home(stored_name(model, names[0]), stored, tied)
        assert pieces or whole is not None  # `_check_keys` has seen them all
        return Source(change, names, whole or split, weight.dtype, count)
    origin = revert_weight_conversion(model, {names[0]: weight})
    found = _home(next(iter(origin)), stored, tied)
    if len(origin) > 1 or found is None or found.shape != weight.shape:
        raise ValueError(
            f"{change.fqn} {tuple(weight.shape)}: transformers puts its weight together from several stored tensors: "
            f"leave it out, or load the model whole{advice('', ', in Python,')} and use aoquant.quantize_"
        )
    return Source(change, names, found, weight.dtype)


def empty_model(source: Path, stored: Mapping[str, StoredTensor], dtype: torch.dtype | str) -> PreTrainedModel:
    """The model of a float checkpoint on the meta device, in the dtypes of `from_pretrained(dtype=dtype)`.

    Raises:
        ValueError: the checkpoint is quantised, or transformers has no class for it.
    """
    read_json(source / "config.json")  # transformers has its own words for what is no JSON
    config = config_of(source)
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"{source}: is quantised already ({method}): convert the float checkpoint that it was made from"
        )
    if dtype == "auto":
        floats = (found.dtype for found in stored.values() if found.dtype in FLOAT_DTYPES)
        dtype = config.dtype or next(floats, torch.get_default_dtype())
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in FLOAT_DTYPES:
        raise ValueError(f"{source}: dtype must be auto, float32, bfloat16 or float16, got {dtype}")
    with checkpoint.understood(source):
        model: PreTrainedModel = empty(class_of(config), config, dtype=chosen).eval()
    keep_wide(model, chosen)
    return model


def _tied(model: PreTrainedModel) -> dict[str, list[str]]:
    """For every parameter's name, the other names of the same parameter."""
    return {name: [n for n in names if n != name] for names in names_by_parameter(model) for name in names}


def _home(name: str, stored: Mapping[str, StoredTensor], tied: Mapping[str, list[str]]) -> StoredTensor | None:
    """Return where the source keeps a tensor: under its name, or under one that the model ties to it."""
    return next((stored[n] for n in (name, *tied.get(name, ())) if n in stored), None)


def _check_keys(
    source: Path,
    stored: Mapping[str, StoredTensor],
    model: PreTrainedModel,
    sources: Mapping[str, StoredTensor | None],
    tied: Mapping[str, list[str]],
) -> None:
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED]
    ignored = [re.compile(pattern) for pattern in patterns]
    known = {*sources, *(n for name in sources for n in tied.get(name, ()))}
    missing = sorted(name for name, found in sources.items() if found is None)
    strange = sorted(n for n in stored if n not in known and not any(p.search(n) for p in ignored))
    problems = [f"{some(names)} {what}" for names, what in ((missing, "missing"), (strange, "unexpected")) if names]
    if problems:
        raise ValueError(
            f"{source}: does not hold the weights of {type(model).__name__} under their names: "
            f"{'; '.join(sorted(problems))}. Load it with "
            "transformers, save it again, and convert that; or copy the checkpoint again if files were lost"
        )


def _check_stored(name: str, found: StoredTensor | None, expected: Tensor) -> None:
    assert found is not None
    if found.shape != expected.shape:
        raise ValueError(
            f"{found.path}: {name} is {found.shape} and the model that config.json describes wants "
            f"{tuple(expected.shape)}"
        )
    if found.dtype != expected.dtype and not {found.dtype, expected.dtype} <= {*FLOAT_DTYPES}:
        raise ValueError(
            f"{found.path}: {name} is stored as {str(found.dtype).removeprefix('torch.')}, and float32, bfloat16 or "
            "float16 was expected: convert the float checkpoint"
        )


def with_shared_scales(sources: Sequence[Source], device: torch.device | str) -> list[Source]:
    """Return `sources` with the outer scales that siblings share, found in a pass of its own, one weight in memory."""
    layers = {s.change.fqn: (s, s.change) for s in sources if s.change.layer is not None}

    def weight_of(change: Change) -> Tensor:
        return change.kind.matrix(layers[change.fqn][0].read(None).to(device))

    shared = shared_at_once((change for _, change in layers.values()), weight_of)
    return [
        replace(s, change=replace(s.change, scales=scales))
        if s.change.layer is not None and (scales := shared.get(s.change.fqn))
        else s
        for s in sources
    ]
