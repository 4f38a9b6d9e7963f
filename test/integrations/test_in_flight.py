"""`from_pretrained` with a config that trains gives the model that `aoquant.quantize_` gives: prepared, trainable, and
saved as a float checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig, PerGroup
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from transformers import (
    AutoModelForCausalLM,
    FPQuantConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)

import aoquant
from aoquant import AoquantWarning, Int4WeightConfig, NVFP4WeightConfig, QATConfig, quantize_
from aoquant.integrations import hf_quantizer
from aoquant.integrations.fp_quant import from_fp_quant
from aoquant.linear.prepared import QATLayer
from aoquant.recipes import get_recipe

IDS = torch.arange(16).view(2, 8)
BASE = IntxWeightOnlyConfig(torch.int4, PerGroup(32))
CONFIGS: dict[str, Any] = {
    "aoquant": QATConfig(Int4WeightConfig(32)),
    "by name": QATConfig("nvfp4"),
    "hybrid": get_recipe("fp8-hybrid").prepare(),
    "torchao's base": QATConfig(BASE),
    "torchao's": TorchaoQATConfig(BASE, step="prepare"),
    "some layers": FqnToConfig({r"re:.*mlp.*": QATConfig(NVFP4WeightConfig())}),
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, tie_word_embeddings=request.param)
    path: Path = tmp_path_factory.mktemp("float")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def load(folder: Path, config: Any = None) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def prepared(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, QATLayer)}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_quantize_gives(name: str, folder: Path, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model, want = load(folder, TorchAoConfig(config)), load(folder)
    quantize_(want, config)
    assert prepared(model) == prepared(want) != set()
    assert torch.equal(model(IDS).logits, want(IDS).logits)
    assert all(p.requires_grad for p in model.parameters())
    assert not getattr(model, "hf_quantizer", None) and not model.is_quantized
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = load(tmp_path)
    float_ = load(folder)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), float_.parameters(), strict=True))


def test_transformers_trainer_trains_it(folder: Path, tmp_path: Path) -> None:
    model = load(folder, TorchAoConfig(QATConfig(Int4WeightConfig(32))))
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[no-untyped-call]
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
    y = model.eval()(IDS).logits
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(IDS).logits, y)


@pytest.mark.parametrize("emulated", [True, False])  # where the package fp_quant is missing, both are ours
@pytest.mark.parametrize("master", [True, False], ids=["trains", "packed"])
def test_fp_quant_on_a_cpu(master: bool, emulated: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_quantizer, "is_fp_quant_available", lambda: False)
    config = FPQuantConfig(forward_dtype="mxfp4", store_master_weights=master, pseudoquantization=emulated)
    model, want = load(folder, config), load(folder)
    quantize_(want, *from_fp_quant(config))
    assert torch.equal(model(IDS).logits, want(IDS).logits)
    packed = [m for m in model.modules() if isinstance(getattr(m, "weight", None), aoquant.PackedTensor)]
    assert bool(prepared(model)) == master and bool(packed) != master


@pytest.mark.parametrize("base", [Int4WeightConfig(32), "mxfp4", BASE], ids=["int4", "mxfp4", "torchao's"])
def test_stacked_experts_are_prepared_or_refused_as_by_quantize(base: Any, tmp_path: Path) -> None:
    """Experts are no nn.Linear: a filter of linear layers would leave them float without a word."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=4, vocab_size=64))
    model.bfloat16().save_pretrained(tmp_path)
    with pytest.warns(AoquantWarning, match=r"layers\.0.*stay float"):
        load(tmp_path, TorchAoConfig(base if base is BASE else QATConfig(base).base_config))
    want = load(tmp_path)
    try:
        quantize_(want, QATConfig(base))
    except ValueError:
        with pytest.raises(ValueError, match="experts"):
            load(tmp_path, TorchAoConfig(QATConfig(base)))
        return
    found = load(tmp_path, TorchAoConfig(QATConfig(base)))
    assert {n: type(m) for n, m in found.named_modules()} == {n: type(m) for n, m in want.named_modules()}
    assert torch.equal(found(IDS).logits, want(IDS).logits)
