"""Fine-tuning for the main job on several GPUs: FSDP2, with the loss and the float32 masters of `finetune`.

Every rank holds the whole model in its own dtype, before and after; while it trains, a sharded copy holds each rank's
part of the weights, gradients, masters and moments. A batch is shared out, so its size is that of all ranks together,
and its text that of `schedule.order_of_blocks`, whatever the number of ranks.

Checkpoints are torch.distributed.checkpoint's: masters and moments under the names of their parameters, as DTensors,
which load into any number of ranks. Another number of ranks adds gradients in another order, so the last bits of a run
that goes on with it differ; with the same number they do not.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from aoquant.integrations import finetune as single
from aoquant.integrations.distributed import full_state_dict
from aoquant.integrations.finetune import Checkpoints, distillation_loss, interrupts, master_adamw
from aoquant.integrations.progress import progress
from aoquant.integrations.schedule import order_of_blocks, rate_at

NEWEST = "newest.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def finetune_sharded(
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
    """Train `model`, whole on every rank, for `steps` steps of `batch_size` blocks over all ranks of the default
    process group; returns the mean loss of every step. A collective. The arguments are those of `finetune`.

    Raises:
        ValueError: as `finetune`, and a batch_size that the ranks cannot share out evenly.
        KeyboardInterrupt: Ctrl-C, after the step and its checkpoint.
    """
    single.check(loss, teacher, steps, blocks_BT)
    rank, size = dist.get_rank(), dist.get_world_size()
    if batch_size % size:
        raise ValueError(f"batch_size must be a multiple of the {size} ranks, got {batch_size}")
    sharded = shard(copy.deepcopy(model).train())
    optimizer = master_adamw(sharded, learning_rate)
    keeper = Checkpoints() if checkpoints is not None else None
    losses, first = torch.zeros(steps), 0
    if checkpoints is not None and (checkpoints / NEWEST).is_file():
        first = json.loads((checkpoints / NEWEST).read_text(encoding="utf-8"))["step"]
        _load(sharded, optimizer, losses, checkpoints / f"step-{first}")
    order_SB = order_of_blocks(len(blocks_BT), steps, batch_size, seed)
    mine = slice(rank * batch_size // size, (rank + 1) * batch_size // size)
    with progress(steps, label, "step", show=rank == 0) as bar, interrupts(keeper, echo=2.0):
        bar.update(first)
        for step in range(first, steps):
            torch.manual_seed((seed * steps + step) * size + rank)  # dropout's, the same after a stop
            (group,) = optimizer.param_groups
            group["lr"] = rate_at(learning_rate, step, steps)
            ids_BT = blocks_BT[order_SB[step, mine]].to(model.device)
            value = _loss(sharded, teacher, ids_BT, loss)
            value.backward()
            nn.utils.clip_grad_norm_([p for p in sharded.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sharded.zero_grad(set_to_none=True)
            # one collective: the mean loss, and whether any rank wants a checkpoint or was interrupted
            wishes = keeper.wishes() if keeper is not None else (False, False)
            told = torch.tensor([float(value.detach()), *map(float, wishes)], device=model.device)
            dist.all_reduce(told)
            summed, due, stop = told.tolist()
            losses[step] = summed / size
            bar.update(1)
            bar.set_postfix(loss=f"{losses[step]:.4f}")
            if checkpoints is not None and keeper is not None and (due or stop or step + 1 == steps):
                _save(sharded, optimizer, losses, step + 1, checkpoints)
                keeper.saved = time.monotonic()
            if stop:
                raise KeyboardInterrupt
    state = full_state_dict(sharded)
    del sharded, optimizer
    model.load_state_dict(state)
    model.eval()
    found: list[float] = losses.tolist()
    return found


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


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor) -> dict[str, Any]:
    """Everything that a step changes, by name: views, which DCP reads from and loads into."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    masters = dict(zip(names, optimizer.param_groups[0]["params"], strict=True))
    state: dict[str, Any] = {"losses": losses, "buffers": dict(model.named_buffers())}
    state["masters"] = {name: master.data for name, master in masters.items()}
    for moment in _MOMENTS:
        state[moment] = {name: optimizer.state[master][moment] for name, master in masters.items()}
    return state


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor, step: int, folder: Path) -> None:
    """The checkpoint of a step, then the note that it is complete, then the older ones go."""
    save(_state(model, optimizer, losses), checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        partial = folder / f"{NEWEST}.partial"
        partial.write_text(json.dumps({"step": step}), encoding="utf-8")
        partial.replace(folder / NEWEST)
        for old in folder.glob("step-*"):
            if old.name != f"step-{step}":
                shutil.rmtree(old)
    dist.barrier()


@torch.no_grad()
def _load(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor, checkpoint: Path) -> None:
    (group,) = optimizer.param_groups
    trained = [p for p in model.parameters() if p.requires_grad]
    for master in group["params"]:  # AdamW makes its moments at the first step
        zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[master] = {"step": torch.tensor(0.0), **zeros}
    load(_state(model, optimizer, losses), checkpoint_id=checkpoint)
    for p, master in zip(trained, group["params"], strict=True):
        p.copy_(master)
