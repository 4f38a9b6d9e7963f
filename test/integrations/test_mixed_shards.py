"""Shards of two checkpoints in one folder are an error, although every file is intact by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.convert_cases import llama
from transformers import AutoModelForCausalLM

import aoquant
from aoquant import NVFP4WeightConfig, convert_checkpoint, load_pretrained, quantize_, save_pretrained
from aoquant.export import export
from aoquant.export.verify import verify
from aoquant.files import checkpoint, checksums
from aoquant.files.safetensors_file import header

SIZE = "60KB"
KINDS = ("saved", "converted", "compressed-tensors", "modelopt")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Folders of two models of one shape, by the function that wrote them."""
    root = tmp_path_factory.mktemp("mixed")
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = llama(tied=False)
        model.save_pretrained(root / f"float{seed}")
        convert_checkpoint(root / f"float{seed}", NVFP4WeightConfig(), root / f"converted{seed}", max_shard_size=SIZE)
        quantize_(model, aoquant.config.named("vllm-nvfp4-weight"))
        save_pretrained(model, root / f"saved{seed}", max_shard_size=SIZE)
        for layout in ("compressed-tensors", "modelopt"):
            export(root / f"saved{seed}", root / f"{layout}{seed}", layout, max_shard_size=SIZE)
    return {kind: (root / f"{kind}0", root / f"{kind}1") for kind in KINDS}


def loaders(kind: str) -> list[Any]:
    own = [AutoModelForCausalLM.from_pretrained] if kind in ("saved", "converted") else []
    return [verify, *([] if kind == "modelopt" else [load_pretrained]), *own]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_another_checkpoint_is_named(kind: str, pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    one, other = pairs[kind]
    files = checkpoint.files(one)
    assert len(files) > 1
    assert [f.name for f in files] == [f.name for f in checkpoint.files(other)]
    for load in loaders(kind):
        load(one)
    for file in (files[0], files[-1]):
        mixed = shutil.copytree(one, tmp_path / file.stem)
        shutil.copyfile(other / file.name, mixed / file.name)
        for load in loaders(kind):
            with pytest.raises(ValueError, match=rf"model-0000\d-of.*was not written with {files[0].name}"):
                load(mixed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_without_checksums_is_named(kind: str, pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Another library's file beside aoquant's has the names and shapes, and nothing to compare."""
    from safetensors.torch import load_file, save_file

    mixed = shutil.copytree(pairs[kind][0], tmp_path / "mixed")
    last = checkpoint.files(mixed)[-1]
    keep = {k: v for k, v in header(last).metadata.items() if k not in (checksums.KEY,)}
    save_file(load_file(last), last, {k: v for k, v in keep.items() if k not in checksums.ENTRIES})
    with pytest.raises(ValueError, match=r"was not written with|holds no checksums"):
        verify(mixed)
    if kind != "modelopt":
        with pytest.raises(ValueError, match=rf"{last.stem}.*was not written with"):
            load_pretrained(mixed)


def test_an_export_of_an_earlier_version_still_loads(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Its shards hold the checksums of their own tensors and nothing that binds them."""
    from safetensors.torch import load_file, save_file

    old = shutil.copytree(pairs["compressed-tensors"][0], tmp_path / "old")
    for path in checkpoint.files(old):
        metadata = {k: v for k, v in header(path).metadata.items() if k not in (checksums.KEY, checksums.FOLDER)}
        tensors = load_file(path)
        save_file(tensors, path, {**metadata, checksums.KEY: checksums.table(tensors, metadata)})
    verify(old)
    load_pretrained(old)
