"""A Hugging Face folder in another library's layout: config.json, safetensors, generation config and tokenizer."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from aoquant._register import version
from aoquant.export import kv_cache
from aoquant.export.contents import Contents, contents_of, values
from aoquant.export.filled_folder import Folder
from aoquant.export.fused_checks import warn_mixed
from aoquant.export.source import Source
from aoquant.export.targets import Description, layout_of
from aoquant.files import checkpoint, checksums
from aoquant.files.atomic import check_free

_NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|ckpt|index\.json)|(config|aoquant_run)\.json"
)


def write(
    source: Source,
    out: Path,
    target: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    skip: Sequence[str],
    max_shard_size: int | str,
) -> Path:
    """Write `source` to the folder `out`: layers and quantization_config as the module of `target` makes them."""
    check_free(out)
    if source.folder is not None:
        checkpoint.side_files(source.folder, _NOT_COPIED)  # raises here, before anything is written
    contents, description = decide(source, target, skip)
    tensors, groups = dict[str, Tensor](), dict[str, list[str]]()
    for module, stored in contents.layers.items():
        parts = {f"{source.in_files(module)}.{part}": t for part, t in stored.tensors.items()}
        tensors |= parts
        groups[module] = list(parts)
    for name, weight in contents.floats.items():
        kept = weight.read(False)
        tensors[weight.name_in_files] = torch.empty(kept.shape, dtype=kept.dtype, device="meta")
        groups[name] = [weight.name_in_files]

    def make(group: str) -> dict[str, Tensor]:
        if group in contents.floats:
            return {contents.floats[group].name_in_files: values(contents.floats[group])}
        stored = layout_of(target).store(source.weights[f"{group}.weight"].read(True))
        return {f"{source.in_files(group)}.{part}": t for part, t in stored.tensors.items()}

    config = {**source.config, "quantization_config": description.config}
    with Folder(out, _identity(source, target, skip, max_shard_size)) as folder:
        folder.fill(tensors, groups, make, max_shard_size, {"config.json": config, **description.files})
        _copy(source, folder.path)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder.path)
        for name, content in (*description.files.items(), ("config.json", config)):
            (folder.path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        folder.publish()
    return out


def decide(source: Source, target: str, skip: Sequence[str]) -> tuple[Contents, Description]:
    """The contents of the folder and its description, nothing written. ValueError: what the target cannot hold."""
    contents = contents_of(source, skip, target)
    scheme = kv_cache.scheme_of(source.modules, target)
    kv_cache.check_layers(contents.layers, scheme, target)
    if scheme is not None:
        contents.floats.update(kv_cache.weights_of(source.modules, source.weights, target))
    description: Description = layout_of(target).describe(source, contents)
    if scheme is not None:
        kv_cache.describe(scheme, description, target)
    warn_mixed(source.linears(), {module: stored.scheme for module, stored in contents.layers.items()})
    return contents, description


def _identity(source: Source, target: str, skip: Sequence[str], size: int | str) -> list[Any] | None:
    """Facts that an interrupted export and its continuation share; None in memory, where values have no name."""
    if source.folder is None:
        return None
    files = [(p.name, checksums.identity(p)) for p in checkpoint.files(source.folder)]
    return [version("aoquant"), str(source.folder.resolve()), files, source.config, target, list(skip), str(size)]


def _copy(source: Source, folder: Path) -> None:
    if source.folder is not None:
        checkpoint.copy_side_files(source.folder, folder, _NOT_COPIED)
        return
    generation = getattr(source.modules[""], "generation_config", None)
    if isinstance(generation, GenerationConfig):
        generation.save_pretrained(folder)
