"""After TRL's SFTTrainer, which replaces `model.forward` on the instance, a copy of the model runs the original's
layers: it is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from aoquant import Int8WeightConfig, QATConfig, quantize_, verify
from aoquant.integrations.text import assets

IDS = torch.arange(8).view(1, 8)


def test_a_copy_of_a_trained_model_is_refused_until_its_forward_is_its_own(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(assets()))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer)))
    quantize_(model, QATConfig(Int8WeightConfig(), step="prepare"))
    arguments: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
    }
    data = Dataset.from_dict({"text": ["Once upon a time."] * 2})
    SFTTrainer(
        model, SFTConfig(str(tmp_path), max_length=16, **arguments), train_dataset=data, processing_class=tokenizer
    ).train()
    assert "forward" in vars(model)  # what this test is about
    converted = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"calls another LlamaForCausalLM.*\(del model.forward\)"):
        quantize_(converted, QATConfig(step="convert"))
    del converted.forward
    quantize_(converted, QATConfig(step="convert"))
    del model.forward
    verify(model, converted, {"input_ids": IDS})
