"""Fine-tuning for the main job: transformers' Trainer with three additions.

Distillation: the student's next-token distribution follows the float model's by KL divergence. QAT has to undo a
rounding, and the float model's whole distribution says more about it than one sampled token does.

Float32 masters: a bf16 weight near 0.02 has an ulp of 1e-4, and most AdamW updates are smaller. Layers compute in the
dtype that is deployed, while AdamW steps float32 copies and writes them back rounded. The copies are part of the
optimizer's state, so a fine-tune that goes on from a checkpoint takes the same steps as one that was never stopped.

Checkpoints, where a folder for them is given: every five minutes, at the end, and on Ctrl-C, which lets the step
finish.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from aoquant.integrations.progress import progress

LOSSES = ("kl", "ce")
CHECKPOINT_SECONDS = 300.0


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
    checkpoints: Path | None = None,
) -> list[float]:
    """Train `model` in place on token blocks for `steps` steps of `batch_size` blocks; returns the loss of every step.

    blocks_BT: int64 token ids (B, T). loss: "ce", or "kl" to `teacher`'s distribution, in nats per token. Blocks are
    drawn by a generator seeded with `seed`, so runs with equal arguments see equal batches. checkpoints: a folder to
    keep the newest checkpoint in; training goes on from the one that is there, and is not repeated when it was
    complete.

    Raises:
        ValueError: unknown loss, or "kl" without a teacher, or no steps or blocks.
        KeyboardInterrupt: Ctrl-C, after the step and its checkpoint.
    """
    check(loss, teacher, steps, blocks_BT)
    before = _newest(checkpoints)
    if before is not None and _state(before)["global_step"] >= steps:
        return _take(model, before)
    arguments = TrainingArguments(
        output_dir=str(checkpoints or tempfile.gettempdir()),  # required, and made if missing
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",  # `Checkpoints` decides
        save_total_limit=1,
        report_to=[],
        seed=seed,
        data_seed=seed,
        use_cpu=model.device.type == "cpu",
        disable_tqdm=True,  # one labelled bar of our own instead
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    optimizer = master_adamw(model, learning_rate)
    keeper = Checkpoints() if checkpoints is not None else None
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in blocks_BT],
        optimizers=(optimizer, None),
        callbacks=[_Bar(label), *([keeper] if keeper else [])],
        teacher=teacher if loss == "kl" else None,
    )
    trainer.remove_callback(PrinterCallback)
    with interrupts(keeper):
        trainer.train(resume_from_checkpoint=str(before) if before else None)
    if keeper is not None and keeper.interrupted:
        raise KeyboardInterrupt
    model.eval()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def check(loss: str, teacher: PreTrainedModel | None, steps: int, blocks_BT: Tensor) -> None:
    """Raise ValueError for an unknown loss, "kl" without a teacher, no steps, or no blocks."""
    if loss not in LOSSES or (loss == "kl" and teacher is None):
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, and kl needs a teacher; got {loss!r}")
    if steps < 1 or blocks_BT.shape[0] == 0:
        raise ValueError(
            f"fine-tuning needs at least one step and one block of text, got {steps} steps, {blocks_BT.shape[0]} blocks"
        )


def _newest(folder: Path | None) -> Path | None:
    """The newest checkpoint that is complete: the Trainer writes its state last."""
    last = get_last_checkpoint(str(folder)) if folder is not None and folder.is_dir() else None
    return Path(last) if last is not None and (Path(last) / "trainer_state.json").is_file() else None


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return state


def _take(model: PreTrainedModel, checkpoint: Path) -> list[float]:
    """Give `model` the weights of a fine-tune that is complete; returns its losses."""
    stored = {k: v for file in sorted(checkpoint.glob("*.safetensors")) for k, v in load_file(file).items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    model.tie_weights()
    assert not unexpected and set(missing) <= set(model.all_tied_weights_keys), (missing, unexpected)
    model.eval()
    return [float(entry["loss"]) for entry in _state(checkpoint)["log_history"] if "loss" in entry]


def distillation_loss(student_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """KL divergence of the student's next-token distribution from the teacher's, in nats a token. Logits."""
    target = F.log_softmax(teacher_BTV.float(), -1).flatten(0, 1)
    student = F.log_softmax(student_BTV.float(), -1).flatten(0, 1)
    return F.kl_div(student, target, log_target=True, reduction="batchmean")


def master_adamw(model: torch.nn.Module, learning_rate: float | Tensor, **options: Any) -> AdamW:
    """AdamW on float32 copies of the trainable parameters, written back rounded after every step.

    The copies are in its state_dict, as "master" of each parameter. options: of AdamW, such as fused and capturable.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in parameters]
    optimizer = AdamW(masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, **options)

    def take_gradients(*_: Any) -> None:
        for p, m in zip(parameters, masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()

    def write_back(*_: Any) -> None:
        with torch.no_grad():
            for p, m in zip(parameters, masters, strict=True):
                p.copy_(m)

    def put_masters_in_state(*_: Any) -> None:
        for m in masters:
            if optimizer.state.get(m):  # AdamW makes its own state at the first step, where there is none
                optimizer.state[m]["master"] = m.detach()

    def take_masters_from_state(*_: Any) -> None:
        with torch.no_grad():
            for m in masters:
                if "master" in optimizer.state.get(m, {}):
                    m.copy_(optimizer.state[m]["master"])

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(write_back)
    optimizer.register_state_dict_pre_hook(put_masters_in_state)
    optimizer.register_load_state_dict_post_hook(take_masters_from_state)
    return optimizer


class _Bar(TrainerCallback):
    """One bar with the loss, or lines of it."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = progress(state.max_steps, self.label, "step")
        if state.global_step:
            self.bar.update(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


class Checkpoints(TrainerCallback):
    """Saves every `CHECKPOINT_SECONDS`, after the last step, and when interrupted, which then ends training."""

    def __init__(self) -> None:
        self.interrupted, self.saved = False, time.monotonic()

    def wishes(self) -> tuple[bool, bool]:
        """(a checkpoint is due, the user wants to stop)."""
        return time.monotonic() - self.saved >= CHECKPOINT_SECONDS, self.interrupted

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(self.wishes()) or state.global_step >= state.max_steps:
            control.should_save, self.saved = True, time.monotonic()
        if self.interrupted:
            control.should_training_stop = True


@contextmanager
def interrupts(keeper: Checkpoints | None, *, echo: float = 0.0) -> Iterator[None]:
    """The first Ctrl-C asks `keeper` to save and stop, the second one interrupts at once.

    echo: seconds in which another signal is the same Ctrl-C: torchrun passes on what its ranks got from the terminal.
    """
    if keeper is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    first = -math.inf

    def ask(*_: Any) -> None:
        nonlocal first
        now = time.monotonic()
        if keeper.interrupted and now - first >= echo:
            raise KeyboardInterrupt
        if not keeper.interrupted:
            keeper.interrupted, first = True, now
            print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
            target = self.teacher(input_ids=inputs["input_ids"]).logits
        value = distillation_loss(outputs.logits, target)
        return (value, outputs) if return_outputs else value
