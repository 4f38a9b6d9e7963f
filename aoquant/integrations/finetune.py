"""Fine-tuning for the main job: transformers' Trainer with two additions.

Distillation: the student's next-token distribution follows the float model's by KL divergence. QAT has to undo a rounding, and the
float model's whole distribution says more about it than one sampled token does.

Float32 masters: a bf16 weight near 0.02 has an ulp of 1e-4, and most AdamW updates are smaller. Layers compute in the
dtype that is deployed, while AdamW steps float32 copies and writes them back rounded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from tqdm import tqdm
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

LOSSES = ("kl", "ce")


def finetune(
    model: PreTrainedModel,
    blocks_BT: Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    loss: str,
    teacher: PreTrainedModel | None,
    seed: int,
    label: str,
) -> list[float]:
    """Train `model` in place on token blocks for `steps` steps of `batch_size` blocks; returns the loss of every step.

    blocks_BT: int64 token ids (B, T). loss: "ce", or "kl" to `teacher`'s distribution, in nats per token. Blocks are drawn by a
    generator seeded with `seed`, so runs with equal arguments see equal batches.

    Raises:
        ValueError: unknown loss, or "kl" without a teacher, or no steps or blocks.
    """
    if loss not in LOSSES or (loss == "kl" and teacher is None):
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, and kl needs a teacher; got {loss!r}")
    if steps < 1 or blocks_BT.shape[0] == 0:
        raise ValueError(
            f"fine-tuning needs at least one step and one block of text, got {steps} steps, {blocks_BT.shape[0]} blocks"
        )
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # required, and made if missing; nothing is written (save_strategy)
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=seed,
        data_seed=seed,
        use_cpu=model.device.type == "cpu",
        disable_tqdm=True,  # one labelled bar of our own instead
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    optimizer = master_adamw(model, learning_rate)
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in blocks_BT],
        optimizers=(optimizer, None),
        callbacks=[_Bar(label)],
        teacher=teacher if loss == "kl" else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.eval()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def master_adamw(model: torch.nn.Module, learning_rate: float) -> AdamW:
    """AdamW on float32 copies of the trainable parameters, written back rounded after every step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in parameters]
    optimizer = AdamW(masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def take_gradients(*_: Any) -> None:
        for p, m in zip(parameters, masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()

    def write_back(*_: Any) -> None:
        with torch.no_grad():
            for p, m in zip(parameters, masters, strict=True):
                p.copy_(m)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_back)
    return optimizer


class _Bar(TrainerCallback):
    """One progress bar with the loss; none when nobody watches."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, desc=self.label, unit="step", disable=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


class _Trainer(Trainer):
    """Trainer with KL to a teacher; without one, the model's own cross entropy."""

    def __init__(self, *args: Any, teacher: PreTrainedModel | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if self.teacher is None:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            target = F.log_softmax(self.teacher(input_ids=inputs["input_ids"]).logits.float(), -1)
        student = F.log_softmax(outputs.logits.float(), -1)
        value = F.kl_div(student.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")
        return (value, outputs) if return_outputs else value
