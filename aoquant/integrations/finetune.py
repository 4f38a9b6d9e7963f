"""Fine-tuning for the main job: one loop, for one process and for the ranks of a launcher.

By distillation the student follows the float model's next-token distribution. AdamW steps float32 masters and writes
them back rounded, because most updates are smaller than a bf16 weight's ulp. A batch is shared out among ranks; its
text and its rate depend on the arguments alone, whatever the number of ranks. While several ranks train, FSDP2 gives
each its part of weights, gradients, masters and moments, and no rank holds the whole model; afterwards each does again.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from aoquant._messages import progress
from aoquant.distributed.fsdp import reshard
from aoquant.integrations.finetune_checkpoints import Checkpoints, interrupts
from aoquant.integrations.losses import (
    IGNORED,
    chunked_loss,
    cross_entropy,
    hidden_states,
    kl_divergence,
    logits_of,
    next_tokens,
    sent_to,
)
from aoquant.integrations.teacher_cache import TeacherCache, TopK, top_k_loss
from aoquant.integrations.text import ONE_TEXT, Documents
from aoquant.linear.fixed_weights import fixed_weights
from aoquant.linear.switches import set_fake_quant

LOSSES = ("kl", "ce")
LOOKS = 20  # at the clock of a run: whether it is good enough


def finetune(
    model: PreTrainedModel,
    blocks_BT: Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    loss: str,
    teacher: PreTrainedModel | TeacherCache | None,
    seed: int,
    label: str,
    checkpoints: Path | None = None,
    shared: bool = False,
    final_learning_rate: float = 0.0,
    fake_quant_after_n_steps: int = 0,
    enough: Callable[[nn.Module], bool] | None = None,
    micro_batch: int | None = None,
    documents: Documents = ONE_TEXT,
    times: list[float] | None = None,
) -> list[float]:
    """Train `model` in place on token blocks for `steps` steps of `batch_size` blocks; returns the loss of every step.

    blocks_BT: int64 token ids (B, T). loss: "ce", or "kl" to the distribution of `teacher`, a model or a cache of one
    (`teacher_cache`), in nats per token. Runs with equal arguments see equal batches. checkpoints: a folder to keep
    the newest checkpoint in; training goes on from the one that is there, and is not repeated when it was complete.
    shared: the ranks of the default process group train one model, which is whole on each; all call it. While they
    train, the parameters of `model` are empty. final_learning_rate: where the cosine ends. fake_quant_after_n_steps:
    steps of a prepared model in high precision before its fake quantisation begins. enough: asked of the model after
    every twentieth of the steps, on all ranks; training ends when it returns True. micro_batch: blocks in one forward
    of a rank. Gradients of a batch are summed in float32 and weighted by tokens, so they are those of one forward up to
    the order of sums (in formats that share scales among tokens, up to those scales). documents: how `blocks_BT` holds
    documents. times: gets the seconds of each step, on a GPU from the end of the one before.

    Raises:
        ValueError: unknown loss, or "kl" without a teacher, no steps or blocks, no step with fake quantisation, or a
            batch_size that the ranks cannot share out evenly.
        KeyboardInterrupt: Ctrl-C, after the step (among ranks on GPUs, the next one) and its checkpoint.
    """
    if loss not in LOSSES or (loss == "kl" and teacher is None):
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, and kl needs a teacher; got {loss!r}")
    if steps < 1 or blocks_BT.shape[0] == 0:
        raise ValueError(
            f"fine-tuning needs at least one step and one block of text, got {steps} steps, {blocks_BT.shape[0]} blocks"
        )
    check_switch(fake_quant_after_n_steps, steps)
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    check_batch(batch_size, size)
    trained = shard(model) if shared else model
    trained.train()
    optimizer = master_adamw(trained, learning_rate)
    losses, first = torch.zeros(steps, device="cpu"), 0
    keeper = None
    if checkpoints is not None:
        keeper = Checkpoints(checkpoints, trained, optimizer, losses)
        first = keeper.load()
    order_SB = order_of_blocks(len(blocks_BT), steps, batch_size, seed)
    mine = slice(rank * batch_size // size, (rank + 1) * batch_size // size)
    every, done, saved = max(1, steps // LOOKS), first, first

    def is_enough() -> bool:
        if enough is None or not 0 < done < steps or done % every:
            return False
        results.read()
        return enough(trained)

    with progress(steps, label, "step", show=rank == 0) as bar, interrupts(keeper, echo=2.0 if shared else 0.0):
        if first:
            bar.update(first)
        results = _Results(losses[first:], size, bar, times)
        while done < steps and not results.stop and not is_enough():
            results.begin()
            if fake_quant_after_n_steps:
                set_fake_quant(trained, done >= fake_quant_after_n_steps)
            torch.manual_seed((seed * steps + done) * size + rank)  # dropout's, the same after a stop
            (group,) = optimizer.param_groups
            group["lr"] = rate_at(learning_rate, done, steps, final_learning_rate)
            rows = order_SB[done]
            # FSDP takes the mean of the ranks' gradients
            weight = size / scored_tokens(blocks_BT[rows], loss, documents)

            def loss_of(part: Tensor, weight: float = weight) -> Tensor:
                return block_loss(trained, teacher, blocks_BT, part, loss, weight=weight, documents=documents)

            value = accumulate(trained, rows[mine].split(micro_batch or len(rows)), loss_of)
            nn.utils.clip_grad_norm_([p for p in trained.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            trained.zero_grad(set_to_none=True)
            results.send(value, *(keeper.wishes() if keeper is not None else (False, False)))
            done += 1
            results.read(newest=False)
            if results.due or results.stop or done == steps:
                results.read()
                if keeper is not None:
                    keeper.save(done)
                    saved = done
        results.read()
        if keeper is not None and saved < done:
            keeper.save(done)
    if fake_quant_after_n_steps:
        set_fake_quant(trained, True)
    if shared:
        unshard(trained, model)
    if results.stop:
        raise KeyboardInterrupt
    model.eval()
    return losses[:done].tolist()


class _Results:
    """Read what each step gave, in order. A GPU's is read when the next step was issued, so the host never waits for
    the newest.

    losses: take the steps' losses. size: of the ranks that train together, or 1. times: takes their seconds.
    due, stop: whether a checkpoint is due since the last `begin`, and whether training was interrupted.
    """

    def __init__(self, losses: Tensor, size: int, bar: Any, times: list[float] | None) -> None:
        self.due = self.stop = False
        self._losses, self._size, self._bar, self._times = losses, size, bar, times
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._steps, self._began = 0, 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.due = False
        if not self._sent:
            self._began = time.monotonic()

    def send(self, loss: Tensor, due: bool, stop: bool) -> None:
        """Send a step's loss to the host; among ranks the mean, and what any of them wants, in one collective."""
        told = loss[None]
        if self._size > 1:
            told = sent_to(loss.device, torch.tensor([0.0, due, stop], device="cpu"))
            told[0] = loss
            dist.all_reduce(told)
        else:
            self.due, self.stop = due, stop
        self._sent.append(_to_host(told))

    def read(self, newest: bool = True) -> None:
        """Read what was sent. newest: of the last step, too, if a GPU has yet to write it."""
        while self._sent and (newest or len(self._sent) > 1 or self._sent[0][1] is None):
            told, written = self._sent.popleft()
            if written is not None:
                written.synchronize()
            loss, *wishes = told.tolist()
            due, stop = map(bool, wishes or (False, False))
            self.due, self.stop = self.due or due, self.stop or stop
            self._losses[self._steps] = loss / self._size
            self._steps += 1
            now = time.monotonic()
            if self._times is not None:
                self._times.append(max(now - self._began, 1e-6))  # some clocks stand still for milliseconds
            self._began = now
            self._bar.set_postfix(loss=f"{loss / self._size:.4f}")
            self._bar.update(1)


def _to_host(t: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy of `t` for the host and, where a GPU has yet to write it, the event that comes after."""
    if not t.is_cuda:
        return t, None
    return t.to("cpu", non_blocking=True), torch.cuda.current_stream(t.device).record_event()


def check_switch(after: int, steps: int) -> None:
    """Raise ValueError where fake quantisation would begin after the last step, or before the first."""
    if not 0 <= after < steps:
        raise ValueError(
            f"fake_quant_after_n_steps must be in 0 .. {steps - 1}, below the {steps} steps of training, got {after}"
        )


def check_batch(batch_size: int, ranks: int) -> None:
    """Raise ValueError for a batch that the ranks cannot share out evenly."""
    if batch_size % ranks:
        raise ValueError(f"batch_size must be a multiple of the {ranks} ranks, got {batch_size}")


def order_of_blocks(blocks: int, steps: int, batch: int, seed: int) -> Tensor:
    """Return indices (steps, batch), int64, of the blocks of a run: every block once before any comes again."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    wanted = steps * batch
    rounds = [torch.randperm(blocks, generator=generator, device="cpu") for _ in range(-(-wanted // blocks))]
    return torch.cat(rounds)[:wanted].view(steps, batch)


def rate_at(peak: float, step: int, steps: int, final: float = 0.0) -> float:
    """Return the learning rate of a step (0-based): a warm-up of a twentieth, then half a cosine to `final`."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def alias(model: PreTrainedModel, *, frozen: bool = False) -> PreTrainedModel:
    """Copy a model, but not its parameters: those of the copy have the same memory. Buffers are copied.

    frozen: share the parameters that do not train, and copy the others.
    """
    shared = [p for p in model.parameters() if not (frozen and p.requires_grad)]
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in shared})


@torch.no_grad()
def shard(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` sharded by FSDP2 over all ranks. Its parameters move there: those of `model` are empty then.

    Every decoder layer is a unit, and so is the rest. Gradients are reduced in float32. Parameters that do not train
    stay in `model` as well, because its teacher may share them.
    """
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    units = set(model._no_split_modules or ())
    sharded = alias(model)  # no rank holds two whole models, not even for a moment
    for module in sharded.modules():
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.new_empty(0)
    return sharded


@torch.no_grad()
def unshard(sharded: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give `model` the weights and buffers of its shards, whole on every rank. A collective."""
    reshard(sharded)
    trained = dict(sharded.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad:
            shards = trained[name]
            p.data = torch.empty(shards.shape, dtype=p.dtype, device=p.device)
            p.copy_(shards.full_tensor() if isinstance(shards, DTensor) else shards)  # moves the version
    buffers = dict(sharded.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def scored_tokens(ids_BT: Tensor, loss: str, documents: Documents) -> int:
    """Return how many predictions of token blocks the loss is a mean of."""
    if loss != "ce":
        return ids_BT.numel()
    if documents.unscored is None:
        return len(ids_BT) * (ids_BT.shape[1] - 1)
    return int((next_tokens(ids_BT, documents.unscored) != IGNORED).sum())


def accumulate(model: nn.Module, parts: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Run backward of the loss of each part; returns the sum of the losses. Their gradients add up in `.grad`.

    The sum over parts is in float32 and rounded once, as in the GEMM of all parts together.
    """
    if len(parts) == 1:
        value = loss_of(parts[0])
        value.backward()
        return value.detach()
    trained = [p for p in model.parameters() if p.requires_grad]
    summed: list[Tensor | None] = [None] * len(trained)
    values = []
    with fixed_weights(model):
        for part in parts:
            value = loss_of(part)
            value.backward()
            values.append(value.detach())
            for i, p in enumerate(trained):
                if p.grad is not None:
                    before = summed[i]
                    summed[i] = p.grad.float() if before is None else before.add_(p.grad)
                    p.grad = None
    for p, total in zip(trained, summed, strict=True):
        p.grad = None if total is None else total.to(p.dtype)
    return torch.stack(values).sum()


def block_loss(
    model: Any,
    teacher: Any,
    blocks_BT: Tensor,
    rows: Tensor,
    loss: str,
    *,
    weight: float | None = None,
    documents: Documents = ONE_TEXT,
) -> Tensor:
    """Return the loss of the blocks whose indices `rows` holds, in nats a token. loss, teacher: of `finetune`.

    weight: of a token; by default the result is the mean. The logits are made a chunk of tokens at a time.
    """
    ids_BT = sent_to(model.device, blocks_BT[rows])
    inputs = documents.inputs(ids_BT)
    targets_N = next_tokens(ids_BT, documents.unscored).flatten()
    if weight is None:
        weight = 1 / scored_tokens(ids_BT, loss, documents)
    hidden_BTD = hidden_states(model, **inputs)
    if loss == "ce":
        return chunked_loss(model, hidden_BTD, lambda logits, at: cross_entropy(logits, targets_N[at], weight))
    if isinstance(teacher, TeacherCache):
        known = teacher.read(rows, ids_BT.device)

        def to_known(logits_NV: Tensor, at: slice) -> Tensor:
            return top_k_loss(logits_NV, TopK(*(t[at] for t in known))) * (len(logits_NV) * weight)

        return chunked_loss(model, hidden_BTD, to_known)
    with torch.no_grad():
        teacher_ND = hidden_states(teacher, **inputs).flatten(0, 1)

    def to_teacher(logits_NV: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            target_NV = logits_of(teacher, teacher_ND[at])
        return kl_divergence(logits_NV, target_NV, weight)

    return chunked_loss(model, hidden_BTD, to_teacher)


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
