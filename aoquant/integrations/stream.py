"""Convert a checkpoint on disk, with one layer in memory at a time, and of stacked experts one expert.

`skeleton` knows every tensor that will be written and where, so the rest is filling in: read a weight, encode it, write
codes and scales into their places, forget it. The bits are those of loading the model whole, `aoquant.quantize_` and
`aoquant.save_pretrained`. The folder appears under its name when it is complete and checked (`atomic.py`).
"""

import dataclasses
import json
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from transformers import PreTrainedModel

from aoquant._messages import check_path, progress
from aoquant.config import QATConfig, named
from aoquant.export import check as check_fits
from aoquant.export import foresee
from aoquant.files import checkpoint, checksums
from aoquant.files.atomic import Staged, check_free
from aoquant.files.safetensors_file import StoredTensor, header, replace_metadata, reserve
from aoquant.integrations.plans import checked_plan, ptq_plan
from aoquant.integrations.skeleton import Skeleton, Source, build, empty_model, quantise_caches, with_shared_scales
from aoquant.planning.coverage import Coverage
from aoquant.tools.doctor import check_device

# weights, in any format, and what is written anew; all other files (tokenizer, chat template, licence) are copied
_NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|ckpt|index\.json)|(generation_)?config\.json"
)


@dataclass(frozen=True)
class Converted:
    """Record of `convert_checkpoint`. read, written: bytes of tensors. verified: layers read back and compared.

    skipped: layers that stay float because they cannot take their config, and why. coverage: the quantised
    and the float parameters of `out`.
    """

    out: Path
    layers: int
    files: int
    read: int
    written: int
    verified: int
    seconds: float
    skipped: Mapping[str, str]
    coverage: Coverage

    def __str__(self) -> str:
        left = "".join(f"left out: {reason}\n" for reason in self.skipped.values())
        return left + (
            f"{self.layers} layers quantised, {self.read / 1e6:.1f} MB -> {self.written / 1e6:.1f} MB in {self.files} "
            f"file(s), {self.seconds:.1f} s; {self.verified} layer(s) read back, bit-equal; written to {self.out}/\n"
            f"{self.coverage.problem or self.coverage}"
        )


def convert_checkpoint(
    model: str | Path,
    config: Any,
    out: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    verify: int = 4,
    skip_incompatible: bool = False,
) -> Converted:
    """Quantise the float checkpoint in folder `model` into folder `out`, one layer, or one expert, in memory at a time.

    config: a PTQ config of torchao's or ours, the name of a recipe, or torchao's `FqnToConfig` of them.
    max_shard_size: of the files that are written, in bytes or like "5GB".
    device: where layers are quantised, one at a time.
    dtype: of the model, as in `from_pretrained`: "auto" is config.json's, or the stored one.
    verify: how many layers, spread over the model, are read back and compared with a new encoding.
    skip_incompatible: leave layers float that cannot take their config, instead of raising; see `Converted.skipped`.

    Raises:
        ValueError: `model` is no complete float checkpoint of a model that transformers knows, a layer cannot take its
            config or holds NaN or Inf, `out` exists, or the disk is too small. Nothing is left behind then.
    """
    check_path(model, "model", "a model folder")
    check_path(out, "out", "the folder to write")
    began = time.monotonic()
    source, out = Path(model), Path(out)
    stored = _stored(source)
    check_free(out)
    if verify < 0:
        raise ValueError(f"verify is a number of layers, at least 0, got {verify}")
    checkpoint.check_shard_size(max_shard_size)
    check_device(device)
    if torch.device(device).type == "meta":
        raise ValueError("device must hold values, got 'meta'")
    skeleton = build(source, stored, named(config), max_shard_size, dtype, skip_incompatible=skip_incompatible)
    skeleton = dataclasses.replace(skeleton, layers=with_shared_scales(skeleton.layers, device))
    with Staged(out, fresh=True) as staged:
        staged.begin(skeleton.size)
        folder = staged.path
        places: dict[str, StoredTensor] = {}
        for file, tensors in skeleton.files.items():
            places |= reserve(folder / file, tensors, skeleton.metadata)
        places |= {name: places[written] for name, written in skeleton.parts.items()}
        sums: dict[str, int] = {}
        read = _fill(skeleton, places, sums, device)
        checked = {**skeleton.metadata, checksums.KEY: checksums.encoded(sums, skeleton.metadata)}
        for file in skeleton.files:
            replace_metadata(folder / file, checked)
        n = min(verify, len(skeleton.layers))
        for layer in [skeleton.layers[i * (len(skeleton.layers) - 1) // max(1, n - 1)] for i in range(n)]:
            _verify(layer, skeleton, places, device)
        checkpoint.copy_side_files(source, folder, _NOT_COPIED)
        skeleton.save_configs(folder, source)
        checkpoint.check(folder)
        staged.publish()
    seconds = time.monotonic() - began
    counts = len(skeleton.layers), len(skeleton.files), read, skeleton.size, n
    return Converted(out, *counts, seconds, skeleton.skipped, skeleton.coverage)


def model_on_meta(model: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Return the model of a float checkpoint without its values, which `convert_checkpoint` plans.

    Raises:
        ValueError: the folder holds no float checkpoint of a model that transformers knows.
    """
    return empty_model(model, _stored(model), dtype)


def check_export(
    model: Path, config: Any, layout: str, *, dtype: str, calibrated: bool, skip_incompatible: bool
) -> None:
    """Raise what `aoquant.export` would raise for a checkpoint that is not converted yet, where values do not decide.

    calibrated: calibration will find static scales, so layers are planned as they are prepared.

    Raises:
        ValueError: the folder cannot be converted, or its tokenizer or a layer does not fit the layout.
    """
    empty = model_on_meta(model, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # conversion and export repeat them
        if calibrated:
            asked = QATConfig(config, step="prepare")
            found = checked_plan(empty, asked, skip_incompatible=skip_incompatible)
        else:
            found = ptq_plan(empty, config, skip_incompatible=skip_incompatible)
        quantise_caches(empty, config, skip_incompatible=skip_incompatible)
        check_fits(foresee.planned(empty, [*found.layers, *found.experts], model), layout)


def _stored(source: Path) -> dict[str, StoredTensor]:
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}: not a model folder, it has no config.json")
    checkpoint.side_files(source, _NOT_COPIED)  # raises here, before hours of work
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint.files(source):
        tensors = header(path).tensors
        if twice := sorted(stored.keys() & tensors.keys()):
            raise ValueError(f"{path}: {twice[0]} is in {stored[twice[0]].path.name} too: copy the checkpoint again")
        stored |= tensors
    return stored


def _fill(skeleton: Skeleton, places: dict[str, StoredTensor], sums: dict[str, int], device: torch.device | str) -> int:
    """Read every tensor in the order in which it is stored, and write what becomes of it; returns the bytes read.

    sums: gets the checksum of every tensor, by its name in the files, of the values as they leave memory.
    """
    for a, b in skeleton.twins:
        if not all(torch.equal(x, y) for x, y in zip(a.pieces(), b.pieces(), strict=True)):
            raise ValueError(
                f"{a.path.parent}: config.json ties two weights that are stored with different values ({a.path.name} "
                f"and {b.path.name}): set tie_word_embeddings to false"
            )
    work: list[tuple[StoredTensor | Source, str]] = [(source, n) for n, source in skeleton.copies.items()]
    work += [(layer, layer.names[0]) for layer in skeleton.layers]
    work.sort(key=lambda w: (w[0].path, w[0].start) if isinstance(w[0], StoredTensor) else w[0].place)
    total = sum(source.size for source, _ in work)
    for name, scale in skeleton.scales.items():
        _write(scale, places[name], 0, sums)
    with progress(total, "convert", "byte") as bar:
        for source, name in work:
            bar.set_postfix(tensor=name)
            if isinstance(source, StoredTensor):
                _copy(source, places[name], sums)
                bar.update(source.size)
            else:
                for unit in source.units:
                    for part, values in source.encode(unit, device).items():
                        whole = unit is None
                        assert values.shape == (places[part].shape if whole else (1, *places[part].shape[1:]))
                        _write(values, places[part], (unit or 0) * values.nbytes, sums)
                    bar.update(source.size // len(source.units))  # experts are of one size
    return total


def _copy(source: StoredTensor, place: StoredTensor, sums: dict[str, int]) -> None:
    """Copy a tensor piece by piece, in the dtype that the model would load it in."""
    # a tensor without values has a checksum too
    done = _write(torch.empty(0, dtype=place.dtype, device="cpu"), place, 0, sums)
    for piece in source.pieces():
        done += _write(piece.to(place.dtype), place, done, sums)


def _write(values: Tensor, place: StoredTensor, offset: int, sums: dict[str, int]) -> int:
    """Write the next values of a tensor and extend its checksum; returns how many bytes they are."""
    before = sums.get(place.name, checksums.start(place.dtype, place.shape))
    sums[place.name] = checksums.extend(before, values)
    return place.write(values, offset)


def _verify(layer: Source, skeleton: Skeleton, places: dict[str, StoredTensor], device: torch.device | str) -> None:
    """Read a layer back, rebuild it with the loaders' code, and compare its bytes with a new encoding."""
    for unit in layer.units:
        wanted = layer.encode(unit, device)
        found = {p: places[p].read() if unit is None else places[p].rows(unit, unit + 1) for p in wanted}
        metadata = {"tensor_names": json.dumps(layer.names), **{name: skeleton.metadata[name] for name in layer.names}}
        again, left = unflatten_tensor_state_dict(found, metadata)
        same = not left and all(type(again[name]) is layer.rebuilt() for name in layer.names)
        for part, values in flatten_tensor_state_dict(again)[0].items():
            same = same and torch.equal(
                values.view(-1).view(torch.uint8), wanted[part].cpu().view(-1).view(torch.uint8)
            )
        if not same:
            raise ValueError(
                f"{layer.names[0]}: reads back different from what was written: check the disk and the memory of this "
                "machine"
            )
