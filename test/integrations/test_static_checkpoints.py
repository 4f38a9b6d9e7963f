"""Checkpoints of layers with static activation scales: each layer's constant travels as part of its activation format's
name.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import IDS, logits, narrow_llama
from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerTensor
from transformers import LlamaForCausalLM

from aoquant import (
    FP8WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    calibrate,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.calibrate import uncalibrated
from aoquant.integrations import job
from aoquant.recipes import get_recipe

CONFIGS: dict[str, tuple[Any, str]] = {
    "int8": (Int8WeightConfig(activation="int8-tensor-static"), "dynamic"),
    "int8-asym-learned": (Int8WeightConfig(activation="int8-tensor-asym-static"), "learned"),
    "intx4-learned": (IntxWeightConfig(4, 32, activation="int8-tensor-static"), "learned"),
    "fp8": (FP8WeightConfig(activation="fp8-tensor-static"), "static"),
    "nvfp4": (NVFP4WeightConfig(activation="nvfp4-static"), "static"),
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "int8-asym-learned" else [pytest.mark.slow]) for n in CONFIGS]
)


def prepared(name: str) -> LlamaForCausalLM:
    config, scales = CONFIGS[name]
    model = narrow_llama()
    quantize_(model, QATConfig(config, scales=scales))
    calibrate(model, [IDS, {"input_ids": IDS + 40}])
    return model


@EACH
def test_folder_is_bit_equal_and_saves_again(name: str, tmp_path: Path) -> None:
    """Trained, converted, saved, loaded by aoquant and by transformers alone, saved again: the prepared model's
    logits.
    """
    model = prepared(name)
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    want = logits(model)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), want)
    save_pretrained(model, tmp_path / "a")
    loaded = load_pretrained(tmp_path / "a")
    assert torch.equal(logits(loaded), want)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "a")), want)
    save_pretrained(loaded, tmp_path / "b")
    assert torch.equal(logits(load_pretrained(tmp_path / "b")), want)
    names = {n: w.activation for n, w in model.named_parameters() if isinstance(w, PackedTensor)}
    assert names == {n: w.activation for n, w in loaded.named_parameters() if isinstance(w, PackedTensor)}
    assert len(set(names.values())) > 3, "layers see different ranges"


@EACH
def test_torch_save(name: str) -> None:
    """state_dict of the converted model with weights_only, into a skeleton that was calibrated on something else."""
    model = prepared(name)
    quantize_(model, QATConfig(step="convert"))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = narrow_llama()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(logits(other), logits(model))


def test_torchaos_static_tensor_has_no_folder_and_says_what_has(tmp_path: Path) -> None:
    model = narrow_llama()
    quantize_(model, QATConfig(Int8StaticActivationInt8WeightConfig(granularity=PerTensor())))
    calibrate(model, [IDS])
    want = logits(model)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), want)
    with pytest.raises(ValueError, match=r"q_proj: .*act_quant_scale"):
        save_pretrained(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_job_calibrates_on_its_training_text() -> None:
    """Static recipes are calibrated on the first batches, dynamic ones are left alone."""
    blocks = torch.arange(64).view(4, 16)
    static, dynamic = narrow_llama(), narrow_llama()
    job.prepare(static, QATConfig(Int8WeightConfig(activation="int8-tensor-static")), blocks, 2)
    job.prepare(dynamic, QATConfig(Int8WeightConfig(activation="int8-row")), blocks, 2)
    by_hand = narrow_llama()
    quantize_(by_hand, QATConfig(Int8WeightConfig(activation="int8-tensor-static")))
    calibrate(by_hand, [blocks[:2], blocks[2:]])
    assert not uncalibrated(static) and torch.equal(logits(static), logits(by_hand))
    fitted = narrow_llama()
    job.prepare(fitted, get_recipe("nvfp4-wush").prepare(), blocks, 2)
    assert not uncalibrated(fitted) and logits(fitted).isfinite().all()
    assert list(dynamic.state_dict()) == list(narrow_llama().state_dict())
