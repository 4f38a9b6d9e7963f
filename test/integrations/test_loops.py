"""Training loops of others run unmodified on prepared and on adapted models: accelerate's, and TRL's SFTTrainer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from support.models import IDS, llama, llama_config, logits
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaForCausalLM

from aoquant import Int4WeightConfig, NVFP4WeightConfig, QATConfig, quantize_
from aoquant.integrations.peft import PackedLoraLinear, QATLoraLinear
from aoquant.integrations.text import assets

TEXT = ["the quick brown fox jumps over the lazy dog " * 4, "a prepared layer computes what is deployed " * 4] * 4


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the device and the precision of the first Accelerator of a process, another test's too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare_all(model: nn.Module) -> None:
    quantize_(
        model, QATConfig(NVFP4WeightConfig(), step="prepare"), lambda m, fqn: isinstance(m, nn.Linear | nn.Embedding)
    )


def run(folder: Path, precision: str, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The ordinary loop over steps start..stop, from the saved state of `start` if that is not 0, saving the state at
    the end.
    """
    torch.manual_seed(0)
    model = llama(tied=True, dtype=torch.float32)
    prepare_all(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    rows = DataLoader([{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1).roll(1, 1)], batch_size=2)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer, rows, scheduler = accelerator.prepare(model, optimizer, rows, scheduler)
    if start:
        accelerator.load_state(str(folder / f"at{start}"))
        rows = accelerator.skip_first_batches(rows, start)
    model.train()
    for _, batch in zip(range(start, stop), rows, strict=False):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / f"at{stop}"))
    return {n: t.clone() for n, t in accelerator.unwrap_model(model).state_dict().items()}


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_accelerate_resumes_a_prepared_model_bit_for_bit(precision: str, tmp_path: Path) -> None:
    halfway = run(tmp_path / "parts", precision, 0, 2)
    resumed = run(tmp_path / "parts", precision, 2, 4)
    whole = run(tmp_path / "whole", precision, 0, 4)
    assert all(torch.equal(resumed[name], t) for name, t in whole.items())
    assert not torch.equal(halfway["lm_head.weight"], whole["lm_head.weight"])


def sft(model: LlamaForCausalLM, folder: Path, **options: Any) -> Any:
    trl = pytest.importorskip("trl", reason="the trl extra is not installed")
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=3,
        learning_rate=1e-2,
        max_length=32,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    tokenizer = AutoTokenizer.from_pretrained(assets())
    data = Dataset.from_dict({"text": TEXT})
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    return trainer.model


def small() -> LlamaForCausalLM:
    """With the demo model's vocabulary."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = llama_config(vocab_size=8192, tie_word_embeddings=True, **size)
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def test_trl_fine_tunes_a_prepared_model(tmp_path: Path) -> None:
    model = small()
    prepare_all(model)
    before = logits(model)
    trained = sft(model, tmp_path)
    trained.eval()
    assert trained.lm_head.weight is trained.model.embed_tokens.weight
    y = logits(trained)
    assert not torch.equal(y, before)
    assert "forward" in vars(trained)  # SFTTrainer replaces it: a copy would run the layers of the original
    copied = copy.deepcopy(trained)
    with pytest.raises(ValueError, match="forward"):
        quantize_(copied, QATConfig(step="convert"))
    del copied.forward
    quantize_(copied, QATConfig(step="convert"))
    quantize_(trained, QATConfig(step="convert"))
    assert torch.equal(logits(trained), y)
    assert torch.equal(logits(copied), y)


@pytest.mark.parametrize("kind", [QATLoraLinear, pytest.param(PackedLoraLinear, marks=pytest.mark.slow)])
def test_trl_fine_tunes_adapters(kind: type, tmp_path: Path) -> None:
    model, config = small(), Int4WeightConfig(32)
    quantize_(model, QATConfig(config, step="prepare") if kind is QATLoraLinear else config)
    base = copy.deepcopy(model.state_dict())
    trained = sft(model, tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear")).eval()
    assert sum(type(m) is kind for m in trained.modules()) == 7
    assert any(p.any() for n, p in trained.named_parameters() if "lora_B" in n)
    y = logits(trained)
    with trained.disable_adapter():
        assert not torch.equal(logits(trained), y)
    if kind is QATLoraLinear:
        merged = trained.merge_and_unload()
        assert not torch.equal(
            merged.state_dict()["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"]
        )
        quantize_(merged, QATConfig(step="convert"))
        assert torch.equal(logits(merged), y)
