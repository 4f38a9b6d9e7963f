"""Small float checkpoints for the tests of conversion, and ways to change and compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from aoquant.files import checkpoint

from . import models


def llama(tied: bool, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """One whose generation config is not the default."""
    model = models.llama(tied, dtype)
    model.generation_config.update(temperature=0.7, do_sample=True)
    return model


def write_floats(folder: Path) -> dict[bool, Path]:
    """Float checkpoints in shards below `folder`, with a tied head and without."""
    torch.manual_seed(0)
    folders = {}
    for tied in (True, False):
        folders[tied] = folder / ("tied" if tied else "untied")
        llama(tied).save_pretrained(folders[tied], max_shard_size="150KB")
    return folders


def rewritten(folder: Path, change: Any) -> Path:
    """The folder with its tensors in a single file, after change(tensors)."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / checkpoint.INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / checkpoint.SINGLE, {"format": "pt"})
    return folder


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if "partial" in p.name)


def content(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint: tensors as bytes with dtype and shape, headers and other files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors":
            found[path.name] = path.read_text()
            continue
        with safe_open(path, framework="pt") as file:
            found[path.name] = file.metadata()
            for key in file.keys():  # noqa: SIM118
                t = file.get_tensor(key)
                raw = t.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[f"{path.name}: {key}"] = (t.dtype, t.shape, raw)
    return found


def assert_same_files(a: Path, b: Path) -> None:
    x, y = content(a), content(b)
    assert x.keys() == y.keys()
    assert [k for k in x if x[k] != y[k]] == []
