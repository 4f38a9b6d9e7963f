"""Check a checkpoint folder by its headers alone, before a model is built from it.

`config.json` names the PTQ configs, the safetensors header describes the tensor subclass of every parameter, and the
data holds its codes and scales under names of their own ("...q_proj._weight_qdata"). Loaders check each by itself, so a
missing part would surface far away; here it is a ValueError that names the file and says what to do.
"""

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torchao.core.config import config_from_dict
from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao, object_from_dict

from aoquant._messages import some
from aoquant.files import checksums
from aoquant.files.atomic import POINTER
from aoquant.files.safetensors_file import MALFORMED, StoredTensor, header, read_json, reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255  # of a file, in bytes, on every usual file system
NO_MODEL = (OSError, RuntimeError, StrictDataclassError, *MALFORMED)  # what a config raises that describes no model


def check(directory: Path) -> dict[str, str]:
    """Return the quantised parameters of a checkpoint, each with the name of its tensor subclass.

    Raises:
        ValueError: the folder holds no complete quantised checkpoint that this version can read.
    """
    _check_config(directory)
    stored: set[str] = set()
    tensors: dict[str, Any] = {}
    for path in files(directory):
        described, inside = header(path)
        checksums.check_names(path)
        if not _is_torchao(described):
            raise ValueError(
                f"{path}: holds no torchao metadata, so its quantised weights cannot be rebuilt: it was written by "
                "another library, or without a quantizer; write it with aoquant.save_pretrained"
            )
        stored |= inside.keys()
        found = _described(path, described)
        _check_parts(path, found, inside)
        tensors |= found
    quantised = {name: t for name, t in tensors.items() if t["_type"] != "Tensor"}
    wanted = {_part(name, part) for name, t in quantised.items() for part in t["_tensor_data_names"]}
    if lost := _lost(wanted, stored - tensors.keys()):
        raise ValueError(f"{directory}: the checkpoint is incomplete, {some(lost)} missing: copy or save it again")
    if not quantised and "KVCacheConfig" not in json.dumps(_quantization(directory)):
        raise ValueError(
            f"{directory}: config.json promises quantised weights and all of them are float: quantise, then "
            "aoquant.save_pretrained"
        )
    return {name: t["_type"] for name, t in quantised.items()}


def method(directory: Path) -> str | None:
    """Return the library whose layout config.json names; None for a float checkpoint, or without a config.json."""
    if not (directory / "config.json").is_file():
        return None
    return (_quantization(directory) or {}).get("quant_method")


def _quantization(directory: Path) -> dict[str, Any] | None:
    """Return the quantisation config of config.json; None for a float checkpoint."""
    path = directory / "config.json"
    found: dict[str, Any] | None = read_json(path).get("quantization_config")
    if found is not None and not (isinstance(found, dict) and isinstance(found.get("quant_method"), str)):
        raise ValueError(f"{path}: quantization_config must be an object with a quant_method, got {found!r:.80}")
    return found


def _is_torchao(metadata: dict[str, str]) -> bool:
    try:
        return bool(is_metadata_torchao(metadata))
    except MALFORMED:  # JSON of other types than it expects
        return False


def _described(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Return the descriptions of a file's tensors, by name: the class, and the parts of a tensor subclass."""
    try:
        found = {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])}
        for name, t in found.items():
            if t["_type"] != "Tensor" and not all(isinstance(part, str) for part in t["_tensor_data_names"]):
                raise ValueError(f"{name} names no parts")
    except MALFORMED as error:
        raise ValueError(
            f"{path}: the description of its tensors is damaged ({error}): copy or save the checkpoint again"
        ) from error
    return found


def _check_parts(path: Path, tensors: Mapping[str, Any], inside: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError for a quantised tensor whose parts do not fit, by their shapes and dtypes in a file's header.

    Tensors with parts in another file, or under names that transformers changes, are checked when they are built.
    """
    for name, described in tensors.items():
        if described["_type"] == "Tensor":
            continue
        places = {part: inside.get(_part(name, part)) for part in described["_tensor_data_names"]}
        parts = {part: torch.empty(s.shape, dtype=s.dtype, device="meta") for part, s in places.items() if s}
        if len(parts) == len(places):
            try:
                object_from_dict({**described, "_data": {**described["_data"], **parts}})
            except MALFORMED as error:
                raise ValueError(f"{path}: {name}: {error}: copy or save the checkpoint again") from error


def _lost(wanted: set[str], stored: set[str]) -> list[str]:
    """The parts that are not there. Headers use the model's names and files may use older ones, when transformers
    renames an architecture's tensors; which becomes which only the model knows, so parts under strange names are
    counted, kind by kind.
    """
    strange = Counter(name.rpartition(".")[2] for name in stored - wanted)
    lost = []
    for kind in sorted({name.rpartition(".")[2] for name in wanted}):
        absent = sorted(name for name in wanted - stored if name.endswith(f".{kind}"))
        if strange[kind] == 0:
            lost += absent
        elif strange[kind] < len(absent):
            lost.append(f"{len(absent) - strange[kind]} of the tensors called *.{kind}")
    return lost


def _part(name: str, part: str) -> str:
    """Return where torchao's flattening keeps a tensor subclass's part."""
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}_{part}"


def check_shard_size(size: int | str) -> None:
    """Raise ValueError for shards that hold nothing: Hugging Face would write a file for every tensor then."""
    if str(size).strip().startswith("-") or not re.search("[1-9]", str(size)):
        raise ValueError(f"max_shard_size is a size above 0, in bytes or like '5GB', got {size!r}")


def _check_config(directory: Path) -> None:
    """config.json names torchao as the quantisation method, and configs that this version knows."""
    if not (directory / "config.json").is_file():
        if (directory / "checkpoint" / "config.json").is_file():
            raise ValueError(f"{directory} holds the results of aoquant run: use {directory / 'checkpoint'}")
        raise ValueError(
            f"{directory}: not a checkpoint folder, it has no config.json; give the folder that save_pretrained wrote"
        )
    quantization = _quantization(directory)
    if quantization is None:
        raise ValueError(
            f"{directory}: a float checkpoint (config.json has no quantization_config): load it with transformers, "
            "quantise it, and write it with aoquant.save_pretrained"
        )
    if quantization.get("quant_method") == "modelopt":
        raise ValueError(
            f"{directory}: ModelOpt's layout is for vLLM, SGLang and TensorRT-LLM; transformers would read wrong weights. aoquant reads "
            "compressed-tensors folders and its own checkpoints"
        )
    if quantization.get("quant_method") in ("compressed-tensors", "fp_quant", "mxfp4"):
        raise ValueError(
            f"{directory}: is a {quantization['quant_method']} folder and no checkpoint of aoquant's: aoquant.load_pretrained reads "
            "it, and aoquant.save_pretrained or aoquant.export write the model"
        )
    if quantization.get("quant_method") != "torchao":
        raise ValueError(
            f"{directory / 'config.json'}: was quantised by {quantization.get('quant_method')!r}, and aoquant reads checkpoints of "
            "'torchao' (aoquant's and torchao's tensors): load it with transformers"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchao warns of any other version; ours raise
            config_from_dict(quantization["quant_type"]["default"])
    except MALFORMED as error:
        raise ValueError(f"{directory / 'config.json'}: quantization_config cannot be read: {error}") from error


def files(directory: Path) -> list[Path]:
    """Return the safetensors files, all there, each with the tensors that the index promises."""
    single, index = directory / SINGLE, directory / INDEX
    if (staged := _staged(directory)) is not None:
        single, index = (staged, directory) if staged.suffix == ".safetensors" else (directory, staged)
    if single.is_file() and index.is_file():
        raise ValueError(
            f"{directory}: holds both {SINGLE} and {INDEX}; one is left from an earlier save: delete the stale one"
        )
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{directory}: holds neither {SINGLE} nor {INDEX}; aoquant reads safetensors: save the model again"
        )
    weight_map = _weight_map(index)
    paths = [directory / name for name in sorted(set(weight_map.values()))]
    if lost := [p.name for p in paths if not p.is_file()]:
        raise ValueError(f"{index}: the checkpoint is incomplete, {some(lost)} missing: copy or save it again")
    for path in paths:
        promised = {key for key, file in weight_map.items() if directory / file == path}
        if lost := sorted(promised - header(path).tensors.keys()):
            raise ValueError(f"{path}: {some(lost)} missing, which {INDEX} promises: copy or save the checkpoint again")
    return paths


def _staged(directory: Path) -> Path | None:
    """Return the weights of a save that was committed and not finished (see `atomic.py`), or of another name."""
    if not (directory / "config.json").is_file():
        return None
    pointer = read_json(directory / "config.json").get(POINTER)
    if pointer is None:
        return None
    if not isinstance(pointer, str) or PurePosixPath(pointer).is_absolute() or ".." in PurePosixPath(pointer).parts:
        raise ValueError(
            f"{directory / 'config.json'}: {POINTER} must name a file of this folder, got {pointer!r}: save the model again"
        )
    return directory / pointer


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor, by the names in an index.

    The names themselves have to stay in the folder. Where they lead does not matter: in the hub's cache each file is a
    link to another folder.
    """
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{index}: must map tensors to files in weight_map: copy or save the checkpoint again")
    for name in sorted(set(found.values())):
        parts = re.split(r"[/\\]", name)
        if ":" in parts[0] or not set(parts).isdisjoint({"", ".", ".."}) or max(map(len, parts)) > _LONGEST_NAME:
            raise ValueError(f"{index}: names {name!r:.80}, which is no file of its folder: do not use this checkpoint")
    return found


def side_files(folder: Path, weights: re.Pattern[str]) -> list[Path]:
    """Return the files of a model's folder that are copied beside other weights. weights: names of those that are not.

    Raises:
        ValueError: one is a link out of the folder, and a copy would publish what it leads to. Links of the hub's
            cache lead to the model's own blobs.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and not weights.fullmatch(path.name)]
    for path in found:
        target = path.resolve()
        if path.is_symlink() and not (target.is_relative_to(home) or target.is_relative_to(blobs)):
            raise ValueError(
                f"{path}: is a link to {target}, outside of the folder, and would be copied: put the file in its place, or remove "
                "the link"
            )
    return found


def copy_side_files(folder: Path, out: Path, weights: re.Pattern[str]) -> None:
    """Copy the `side_files` of a model's folder to `out`. Raises ValueError: as it does, or one cannot be read."""
    for path in side_files(folder, weights):
        with reading(path):
            path.open("rb").close()
        shutil.copyfile(path, out / path.name)


@contextmanager
def understood(directory: Path) -> Iterator[None]:
    """Name the folder in what transformers and others raise over a file of it that says what no model has."""
    try:
        yield
    except NO_MODEL as error:
        device = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)
        if device or (isinstance(error, ValueError) and str(directory) in str(error)):
            raise
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{directory}: cannot be loaded: {reason}") from error
