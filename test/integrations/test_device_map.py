"""Hugging Face's `device_map`: however accelerate places a model, it computes the same bits, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.convert_cases import llama
from support.models import logits
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, TorchAoConfig

from aoquant import (
    IntxWeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
    unprepare,
)

CONFIG = NVFP4WeightConfig()
PLACES = {
    "auto": "auto",
    "modules": {"model": "cpu", "lm_head": "cpu"},
}
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
DISK = dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders with a float and a quantised checkpoint, in shards, and logits of each stage of a model loaded
    plainly.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    llama(False).save_pretrained(folder / "float", max_shard_size="150KB")
    model = AutoModelForCausalLM.from_pretrained(folder / "float")
    found: dict[str, Any] = {"float": logits(model)}
    quantize_(model, QATConfig(CONFIG))
    found["prepared"] = logits(model)
    quantize_(model, QATConfig(step="convert"))
    found["converted"] = logits(model)
    save_pretrained(model, folder / "packed", max_shard_size="60KB")
    assert len(list((folder / "packed").glob("*.safetensors"))) > 2
    return found | {"folder": folder}


@pytest.mark.parametrize("device_map", PLACES.values(), ids=PLACES)
def test_a_packed_checkpoint_loads_anywhere(device_map: Any, saved: dict[str, Any]) -> None:
    for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(saved["folder"] / "packed", device_map=device_map)
        assert sum(isinstance(p, PackedTensor) for p in model.parameters()) == 14
        assert torch.equal(logits(model), saved["converted"])


@pytest.mark.parametrize("device_map", PLACES.values(), ids=PLACES)
def test_a_float_checkpoint_is_prepared_and_converted(device_map: Any, saved: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved["folder"] / "float", device_map=device_map)
    quantize_(model, QATConfig(CONFIG))
    assert torch.equal(logits(model), saved["prepared"])
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), saved["converted"])


@pytest.mark.parametrize(
    ("device_map", "config"),
    [("auto", CONFIG), (PLACES["modules"], IntxWeightConfig(3))],
    ids=["auto-nvfp4", "modules-intx3"],
)
def test_quantising_on_the_fly(config: Any, device_map: Any, saved: dict[str, Any]) -> None:
    source = saved["folder"] / "float"
    model = AutoModelForCausalLM.from_pretrained(
        source, device_map=device_map, quantization_config=TorchAoConfig(config)
    )
    plain = AutoModelForCausalLM.from_pretrained(source)
    quantize_(plain, config)
    assert sum(isinstance(p, TorchAOBaseTensor) for p in model.parameters()) == 14
    assert torch.equal(logits(model), logits(plain))


def test_layers_on_disk_compute_prepared_and_are_not_converted(saved: dict[str, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved["folder"] / "float", device_map=DISK, offload_folder=tmp_path)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(model), saved["float"])
    with pytest.raises(ValueError, match=r"7 layer\(s\)(.|\n)*layers.1.self_attn.q_proj.*keeps its weight offloaded"):
        quantize_(model, CONFIG)
    quantize_(model, QATConfig(CONFIG))
    assert torch.equal(logits(model), saved["prepared"])
    with pytest.raises(ValueError, match=r"keeps its weight offloaded.*`aoquant convert`"):
        quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), saved["prepared"])
    assert unprepare(model) == 14
    assert torch.equal(logits(model), saved["float"])


def test_packed_layers_on_disk_are_refused(saved: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk offload with a pre-quantized torchao model"):  # transformers' own words
        load_pretrained(saved["folder"] / "packed", device_map=DISK, offload_folder=tmp_path)
