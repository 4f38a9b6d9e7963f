"""Fine-tuning for the main job: one loop, for one process and for the ranks of a launcher.

By distillation the student follows the float model's next-token distribution. AdamW steps float32 masters and writes
them back rounded, because most updates are smaller than a bf16 weight's ulp. A batch is shared out among ranks; its
text and its rate depend on the arguments alone, whatever the number of ranks. Every rank holds the whole model; while
it trains, a copy sharded by FSDP2 holds each rank's part of the weights, gradients, masters and moments.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import PreTrainedModel

from aoquant.integrations.distributed import full_state_dict
from aoquant.integrations.finetune_checkpoints import Checkpoints, interrupts
from aoquant.integrations.progress_lines import progress

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
    checkpoints: Path | None = None,
    shared: bool = False,
) -> list[float]:
    """Train `model` in place on token blocks for `steps` steps of `batch_size` blocks; returns the loss of every step.

    blocks_BT: int64 token ids (B, T). loss: "ce", or "kl" to `teacher`'s distribution, in nats per token. Runs with
    equal arguments see equal batches. checkpoints: a folder to keep the newest checkpoint in; training goes on from the
    one that is there, and is not repeated when it was complete. shared: the ranks of the default process group train
    one model, which is whole on each; all call it.

    Raises:
        ValueError: unknown loss, or "kl" without a teacher, no steps or blocks, or a batch_size that the ranks cannot
            share out evenly.
        KeyboardInterrupt: Ctrl-C, after the step and its checkpoint.
    """
    if loss not in LOSSES or (loss == "kl" and teacher is None):
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, and kl needs a teacher; got {loss!r}")
    if steps < 1 or blocks_BT.shape[0] == 0:
        raise ValueError(
            f"fine-tuning needs at least one step and one block of text, got {steps} steps, {blocks_BT.shape[0]} blocks"
        )
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    check_batch(batch_size, size)
    trained = shard(copy.deepcopy(model)) if shared else model
    trained.train()
    optimizer = master_adamw(trained, learning_rate)
    losses, first = torch.zeros(steps, device="cpu"), 0
    keeper = None
    if checkpoints is not None:
        keeper = Checkpoints(checkpoints, trained, optimizer, losses)
        first = keeper.load()
    order_SB = order_of_blocks(len(blocks_BT), steps, batch_size, seed)
    mine = slice(rank * batch_size // size, (rank + 1) * batch_size // size)
    with progress(steps, label, "step", show=rank == 0) as bar, interrupts(keeper, echo=2.0 if shared else 0.0):
        if first:
            bar.update(first)
        for step in range(first, steps):
            torch.manual_seed((seed * steps + step) * size + rank)  # dropout's, the same after a stop
            (group,) = optimizer.param_groups
            group["lr"] = rate_at(learning_rate, step, steps)
            value = _loss(trained, teacher, blocks_BT[order_SB[step, mine]].to(model.device), loss)
            value.backward()
            nn.utils.clip_grad_norm_([p for p in trained.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            trained.zero_grad(set_to_none=True)
            # one collective: the mean loss, and whether any rank wants a checkpoint or was interrupted
            wishes = keeper.wishes() if keeper is not None else (False, False)
            told = torch.tensor([float(value.detach()), *map(float, wishes)], device=model.device)
            if shared:
                dist.all_reduce(told)
            summed, due, stop = told.tolist()
            losses[step] = summed / size
            bar.update(1)
            bar.set_postfix(loss=f"{losses[step]:.4f}")
            if keeper is not None and (due or stop or step + 1 == steps):
                keeper.save(step + 1)
            if stop:
                raise KeyboardInterrupt
    if shared:
        model.load_state_dict(full_state_dict(trained))
    model.eval()
    found: list[float] = losses.tolist()
    return found


def check_batch(batch_size: int, ranks: int) -> None:
    """Raise ValueError for a batch that the ranks cannot share out evenly."""
    if batch_size % ranks:
        raise ValueError(f"batch_size must be a multiple of the {ranks} ranks, got {batch_size}")


def check_block(block: int, positions: int) -> None:
    """Raise ValueError for blocks of more tokens than the model's positions; 0: it has no limit."""
    if block > positions > 0:
        raise ValueError(f"block must be at most the model's max_position_embeddings = {positions}, got {block}")


def order_of_blocks(blocks: int, steps: int, batch: int, seed: int) -> Tensor:
    """Indices (steps, batch), int64, of the blocks of a run: every block once before any comes again."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    wanted = steps * batch
    rounds = [torch.randperm(blocks, generator=generator, device="cpu") for _ in range(-(-wanted // blocks))]
    return torch.cat(rounds)[:wanted].view(steps, batch)


def rate_at(peak: float, step: int, steps: int) -> float:
    """Learning rate of a step (0-based): a warm-up of a twentieth, then half a cosine to zero."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """FSDP2 over all ranks: every decoder layer is a unit, and so is the rest. Gradients are reduced in float32."""
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    units = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _loss(model: Any, teacher: Any, ids_BT: Tensor, loss: str) -> Tensor:
    if loss == "ce":
        value: Tensor = model(input_ids=ids_BT, labels=ids_BT).loss
        return value
    with torch.no_grad():
        target = teacher(input_ids=ids_BT).logits
    return distillation_loss(model(input_ids=ids_BT).logits, target)


def distillation_loss(student_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """KL divergence of the student's next-token distribution from the teacher's, in nats a token. Logits."""
    target = F.log_softmax(teacher_BTV.float(), -1).flatten(0, 1)
    student = F.log_softmax(student_BTV.float(), -1).flatten(0, 1)
    return F.kl_div(student, target, log_target=True, reduction="batchmean")


def master_adamw(model: torch.nn.Module, learning_rate: float | Tensor, **options: Any) -> AdamW:
    """AdamW on float32 copies of the trainable parameters, written back rounded after every step.

    The copies are its parameters, in the order of the model's. On a GPU it is fused, without the temporaries of 4 bytes
    a parameter that foreach makes. options: of AdamW, such as capturable.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in parameters]
    options = {"fused": True if masters and masters[0].is_cuda else None, **options}
    optimizer = AdamW(masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, **options)

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
