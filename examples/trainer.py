"""Hugging Face's Trainer: fine-tune a Llama for int4 weights, save a checkpoint folder, load it again.

    python examples/trainer.py [FOLDER]

The model is tiny, with random weights: put `AutoModelForCausalLM.from_pretrained(...)` in its place. The Trainer needs
no change. The callback keeps the first steps in high precision and logs how far weights are from their codes.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import aoquant
from aoquant import Int4WeightConfig, QATConfig, quantize_
from aoquant.integrations.trainer import QATCallback


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))

    rows = [(torch.arange(16) * (1 + i % 5)) % 64 for i in range(64)]  # counting in steps of 1 to 5
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    QATCallback(fake_quant_after_n_steps=4).attach(trainer)
    trainer.train()

    ids = torch.stack(rows[:2])
    model.eval()
    with torch.no_grad():
        prepared = model(ids).logits
        quantize_(model, QATConfig(step="convert"))
        aoquant.save_pretrained(model, folder / "int4")
        loaded = aoquant.load_pretrained(folder / "int4")
        assert torch.equal(loaded(ids).logits, prepared)
    print(f"saved to {folder / 'int4'}; it computes what was trained, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
