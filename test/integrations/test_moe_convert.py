"""Converting the stacked experts of a checkpoint on disk: the files of the whole model, with one expert in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_cases import assert_same_files
from support.moe_models import IDS, model_of
from torchao.quantization import FqnToConfig
from transformers import AutoModelForCausalLM

from aoquant import (
    Int4WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    convert_checkpoint,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.config import named
from aoquant.experts.packed_experts import PackedExperts
from aoquant.files import checkpoint
from aoquant.files.safetensors_file import StoredTensor

CONFIGS: dict[str, Any] = {
    "mixtral": "int4-g32-experts",
    "gpt-oss": NVFP4WeightConfig(),
    "deepseek-v3": FqnToConfig(
        {
            r"re:.*\.experts\.down_proj": None,
            r"re:.*\.experts": IntxWeightConfig(3, 32),
            "_default": Int4WeightConfig(32),
        }
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_on_disk_become_the_files_of_the_whole_model(family: str, tmp_path: Path) -> None:
    """Experts that files keep one by one, and as one stack; all of a layer's, and one parameter of it."""
    config = CONFIGS[family]
    # transformers keeps float experts, views of one stack, in one file, which on meta it cannot know
    size = "5GB" if isinstance(config, FqnToConfig) else "100KB"
    model_of(family).save_pretrained(tmp_path / "float", max_shard_size="100KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float").eval()
    quantize_(model, named(config))
    save_pretrained(model, tmp_path / "whole", max_shard_size=size)
    done = convert_checkpoint(tmp_path / "float", config, tmp_path / "out", max_shard_size=size, verify=99)
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    assert done.verified == done.layers and done.read > done.written
    loaded = load_pretrained(tmp_path / "out").eval()
    assert isinstance(loaded.model.layers[1].mlp.experts.gate_up_proj.data, PackedExperts)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_one_expert_is_read_at_a_time(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path / "float")
    one = model.model.layers[0].mlp.experts.gate_up_proj[0].numel() * 2
    sizes: list[int] = []
    real, real_rows = StoredTensor.read, StoredTensor.rows

    def read(self: StoredTensor) -> torch.Tensor:
        sizes.append(self.size)
        return real(self)

    def rows(self: StoredTensor, start: int, end: int) -> torch.Tensor:
        found = real_rows(self, start, end)
        sizes.append(found.nbytes)
        return found

    with mock.patch.object(StoredTensor, "read", read), mock.patch.object(StoredTensor, "rows", rows):
        convert_checkpoint(tmp_path / "float", "mxfp4-experts", tmp_path / "out", verify=0)
    assert max(sizes) <= one


def test_a_damaged_expert_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("mixtral").save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / checkpoint.SINGLE)
    tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"][3, 3] = torch.nan
    save_file(tensors, tmp_path / "float" / checkpoint.SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj, expert 5 \(128, 64\): .*NaN"):
        convert_checkpoint(tmp_path / "float", "int4-g32-experts", tmp_path / "out")
    tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"][3, 3] = 0
    save_file(tensors, tmp_path / "float" / checkpoint.SINGLE, {"format": "pt"})
    real = StoredTensor.write

    def write(self: StoredTensor, values: torch.Tensor, offset: int = 0) -> int:
        if values.dtype == torch.uint8 and offset:
            values = values ^ 1
        return real(self, values, offset)

    monkeypatch.setattr(StoredTensor, "write", write)
    with pytest.raises(ValueError, match="reads back different from what was written"):
        convert_checkpoint(tmp_path / "float", "int4-g32-experts", tmp_path / "out", verify=1)
    assert [p.name for p in tmp_path.iterdir()] == ["float"]
