"""A GGUF file: metadata, tokenizer and tensors in llama.cpp's names and order, written one layer at a time.

Quantised layers and embeddings are ggml blocks (`ggml_types`); what is left out keeps its dtype, F16, BF16 or F32;
vectors are F32, as llama.cpp wants them. The file appears under its name when it is complete. It is written
from its start to its end by the `gguf` library, so an interrupted export starts anew.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aoquant._messages import bar
from aoquant.export import gguf_arch, gguf_checksum, gguf_tokenizer, kv_cache
from aoquant.export.advice import other_formats
from aoquant.export.contents import Contents, contents_of, values
from aoquant.export.ggml_types import store
from aoquant.export.gguf_arch import Architecture
from aoquant.export.source import Source
from aoquant.files.atomic import Staged, check_free

_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file. source: the model's name for it, "" where it is made here. part: of a packed layer."""

    name: str
    source: str
    part: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // block * size


def write(source: Source, out: Path, *, tokenizer: PreTrainedTokenizerBase | None, skip: Sequence[str]) -> Path:
    """Write `source` as OUT/model.gguf; returns the file.

    Raises:
        ValueError: layers that no ggml type holds, an unknown architecture or tokenizer, or a folder in use.
    """
    check_free(out)
    name = "model.gguf"
    architecture, contents, entries, writer = _decide(source, tokenizer, skip)
    with Staged(out, fresh=True) as staged:
        staged.begin(sum(entry.nbytes for entry in entries))
        path = staged.path / name
        try:
            for entry in entries:
                raw = None if entry.type == GGMLQuantizationType.F32 else entry.type
                writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=raw)
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _fill(writer, entries, source, contents, architecture)
        finally:
            writer.close()
        gguf_checksum.write(path)
        staged.publish()
    return out / name


def check(source: Source, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ValueError for what `write` would refuse, nothing written."""
    _decide(source, tokenizer, ())


def _decide(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, skip: Sequence[str]
) -> tuple[Architecture, Contents, list[_Entry], gguf.GGUFWriter]:
    """Return the contents, the file's tensors, and a writer that has the metadata and no file yet."""
    architecture = _architecture(source)
    scheme = kv_cache.scheme_of(source.modules, "gguf")
    contents = contents_of(source, skip, "gguf")
    kv_cache.check_layers(contents.layers, scheme, "gguf")
    entries = _entries(source, contents, architecture)
    writer = gguf.GGUFWriter(None, architecture.name)  # the file is named when it is written
    writer.add_string(*gguf_checksum.PLACEHOLDER)
    gguf_arch.add_metadata(writer, architecture, source.config)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_file_type(entries))
    with tempfile.TemporaryDirectory() as made:
        if tokenizer is not None and source.folder is None:
            tokenizer.save_pretrained(made)
        owner = source.folder or ("the model in memory" if tokenizer is None else type(tokenizer).__name__)
        gguf_tokenizer.add(writer, source.folder or Path(made), source.config["vocab_size"], str(owner))
    return architecture, contents, entries, writer


def _architecture(source: Source) -> Architecture:
    """The model's; where none is known, the error advises another format that takes every layer."""
    try:
        return gguf_arch.find(source.config)
    except ValueError as error:
        packed = (w for w in source.weights.values() if w.tensor_class != "Tensor")
        raise ValueError(f"{error}{other_formats(source, 'gguf')(packed)}") from None


def _entries(source: Source, contents: Contents, architecture: Architecture) -> list[_Entry]:
    names = architecture.names(source.config["num_hidden_layers"])
    entries, unknown = [], []
    # files and models list their tensors in orders of their own, which change with transformers' versions
    for name, weight in sorted(source.weights.items(), key=lambda item: _by_number(item[0])):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            unknown.append(name)
            continue
        kept = weight.read(False)
        if weight.module in contents.layers and name.endswith(".weight"):
            stored = contents.layers[weight.module]
            entries.append(_Entry(new, name, "weight", tuple(kept.shape), stored.scheme))
            if "scale" in stored.tensors:
                entries.append(
                    _Entry(f"{new.removesuffix('.weight')}.scale", name, "scale", (1,), GGMLQuantizationType.F32)
                )
        else:
            type = _TYPES[kept.dtype] if kept.dim() > 1 else GGMLQuantizationType.F32
            entries.append(_Entry(new, name, "", tuple(kept.shape), type))
    if unknown:
        raise ValueError(
            f"gguf: {architecture.name} has no tensors for {', '.join(unknown[:3])}"
            + (" ..." if len(unknown) > 3 else "")
        )
    if (factors := gguf_arch.rope_factors(source.config)) is not None:
        entries.append(_Entry("rope_freqs.weight", "", "", tuple(factors.shape), GGMLQuantizationType.F32))
    return entries


def _by_number(name: str) -> list[str | int]:
    """Return a key that sorts layers by their numbers and not by their digits."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _fill(
    writer: gguf.GGUFWriter, entries: list[_Entry], source: Source, contents: Contents, architecture: Architecture
) -> None:
    config = source.config
    parts: dict[str, Tensor] = {}
    data: Any
    with bar(sum(e.nbytes for e in entries), "export") as shown:
        for entry in entries:
            if not entry.source:
                data = gguf_arch.rope_factors(config)
            elif entry.part:
                if entry.part == "weight":
                    parts = store(source.weights[entry.source].read(True)).tensors
                data = parts[entry.part]
                data = architecture.rows(entry.source, data, config) if entry.part == "weight" else data
            else:
                data = _float(entry, values(source.weights[entry.source]), architecture, config)
            data = data.detach().contiguous()  # numpy knows no bfloat16, and the file only bytes
            writer.write_tensor_data((data.view(torch.uint8) if data.dtype == torch.bfloat16 else data).numpy())
            shown.set_postfix(tensor=entry.name)
            shown.update(entry.nbytes)


def _float(entry: _Entry, t: Tensor, architecture: Architecture, config: dict[str, Any]) -> Tensor:
    """A tensor that is no codes, as the file holds it."""
    t = architecture.rows(entry.source, t, config)
    if t.dim() > 1:
        return t
    t = t.float()
    return t + 1 if architecture.norms_plus_one and entry.source.endswith("norm.weight") else t


def _file_type(entries: list[_Entry]) -> int:
    """llama.cpp's name for the mixture: that of most of the blocks' bytes, whatever embedding and head are."""
    sizes: dict[str, int] = {}
    for entry in [e for e in entries if e.name.startswith("blk.")] or entries:
        sizes[entry.type.name] = sizes.get(entry.type.name, 0) + entry.nbytes
    most = max((name for name in sizes if name not in ("F32", "F16", "BF16")), key=lambda name: sizes[name])
    known = {t.name: t.value for t in gguf.LlamaFileType}
    return int(known.get(f"MOSTLY_{most}", known.get(f"MOSTLY_{most}_MOE", gguf.LlamaFileType.GUESSED.value)))
