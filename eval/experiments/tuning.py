"""Fine-tuning a student, as often as there are seeds and learning rates, in one process.

A step is AdamW on float32 copies of the bf16 weights that are deployed, cosine learning rate after a warm-up, gradients
clipped at norm 1. On a GPU it is one CUDA graph with compiled decoder layers, where the row allows both: a model of
25 M parameters is bound by launches otherwise. The graph is captured once and the weights are put back in place before
every run, so runs after the first pay neither compilation nor capture.

The batches of a run are a function of its seed alone. A run that meets its deadline leaves a checkpoint and goes on
from it with the same bits (on CUDA up to the order in which a backward pass adds).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graphed import graphed
from torch import Tensor
from transformers import AttentionInterface

from aoquant.integrations.finetune import master_adamw, order_of_blocks, rate_at
from experiments.tricks import FEATURES, MADE, feature_loss

ATTENTION = "experiments_causal"
LOOK = 20  # steps between two looks at the clock


@dataclass(frozen=True)
class Budget:
    """steps of `batch` blocks each."""

    steps: int
    batch: int
    block: int

    @property
    def tokens(self) -> int:
        """Read in a run."""
        return self.steps * self.batch * self.block


def causal_attention(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """SDPA, causal by flag: transformers' own makes a mask while a graph is captured, which rules flash attention
    out.
    """
    assert mask is None
    # one token after others (generate's later steps) sees all of them
    causal = q.shape[2] > 1
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, causal_attention)  # not in the mask registry: no mask is made for it


def distillation_loss(student_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """Return KL divergence of the student's next-token distribution from the teacher's, in nats a token. Logits."""
    target = F.log_softmax(teacher_BTV.float(), -1).flatten(0, 1)
    student = F.log_softmax(student_BTV.float(), -1).flatten(0, 1)
    return F.kl_div(student, target, log_target=True, reduction="batchmean")


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Cross entropy in nats a token."""
    return F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten())


class FineTune:
    """A student with its optimizer and its step."""

    def __init__(
        self,
        student: Any,
        teacher: Any | None,
        blocks_BT: Tensor,
        budget: Budget,
        *,
        compile: bool,
        graph: bool,
        trick: str = "",
    ) -> None:
        """student: trained in place. teacher: the float model, or None for cross entropy. blocks_BT: on the CPU."""
        features = trick == "features"
        if features and teacher is None:
            raise ValueError("the trick features needs a teacher: losses = ['kl']")
        device = next(student.parameters()).device
        self.student, self.blocks_BT, self.budget = student.train(), blocks_BT.to(device), budget
        rate: Any = torch.tensor(0.0, device=device) if graph else 0.0
        self.optimizer = master_adamw(student, rate, capturable=graph)
        (group,) = self.optimizer.param_groups
        self.group, self.trained = group, [p for p in student.parameters() if p.requires_grad]
        self.progress = torch.zeros((), device=device)
        self.trick = MADE[trick](student, self.trained, group["params"], self.progress)
        distil: Callable[..., Tensor] = distillation_loss
        predict: Callable[..., Tensor] = next_token_loss
        if compile:
            for model in [student] if teacher is None else [student, teacher]:
                for layer in model.get_decoder().layers:
                    layer.compile(dynamic=False)
            distil, predict = (torch.compile(f, dynamic=False) for f in (distil, predict))

        def step(ids_BT: Tensor) -> Tensor:
            made = student(input_ids=ids_BT, use_cache=False, output_hidden_states=features)
            if teacher is None:
                loss = predict(made.logits, ids_BT)
            else:
                with torch.no_grad():
                    target = teacher(input_ids=ids_BT, use_cache=False, output_hidden_states=features)
                loss = distil(made.logits, target.logits)
                if features:
                    loss = loss + FEATURES * feature_loss(made, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            student.zero_grad(set_to_none=True)
            self.trick.step()
            return loss.detach()

        self.step: Callable[[Tensor], Tensor] = step
        self.how = {"compile": compile, "graph": graph}
        if graph:
            self.step = graphed(step, student, self.optimizer, self.blocks_BT[: budget.batch])

    @torch.no_grad()
    def _begin(self, weights: dict[str, Tensor]) -> None:
        self.student.load_state_dict(weights)
        for p, master in zip(self.trained, self.group["params"], strict=True):
            master.copy_(p)
            for value in self.optimizer.state.get(master, {}).values():
                value.zero_()
        self.trick.begin()

    def _state(self) -> dict[str, Any]:
        masters = self.group["params"]
        moments = [dict(self.optimizer.state[master]) for master in masters]
        state = {"masters": [m.data for m in masters], "moments": moments, "trick": self.trick.state()}
        return {"model": self.student.state_dict(), **state}

    @torch.no_grad()
    def _take(self, saved: dict[str, Any]) -> None:
        """Every tensor in place, as a captured graph wants it."""
        self.student.load_state_dict(saved["model"])
        for mine_now, value in zip(self.trick.state(), saved["trick"], strict=True):
            mine_now.copy_(value)
        for master, value, moments in zip(self.group["params"], saved["masters"], saved["moments"], strict=True):
            master.copy_(value)
            mine = self.optimizer.state[master]
            for name, moment in moments.items():
                if name in mine:
                    mine[name].copy_(moment)
                else:  # AdamW makes its moments at the first step
                    mine[name] = moment

    def run(
        self,
        weights: dict[str, Tensor],
        seed: int,
        rate: float,
        *,
        steps: int | None = None,
        kept: Path | None = None,
        until: float = math.inf,
    ) -> list[float] | None:
        """Train from `weights`; the loss of every step, in nats a token. None when `until` (of time.time()) came
        first: the checkpoint `kept` holds what is done, and the same call goes on from it.

        steps: the whole of the run, schedule included; the budget's by default. Raises ValueError where `kept` is of a
        run of another length.
        """
        device, steps = self.blocks_BT.device, steps or self.budget.steps
        self._begin(weights)
        losses, first = torch.zeros(steps, device=device), 0
        if kept is not None and kept.exists():
            saved = torch.load(kept, map_location=device, weights_only=True)
            if len(saved["losses"]) != steps:
                raise ValueError(f"{kept} must be of a run of {steps} steps, got {len(saved['losses'])}: remove it")
            self._take(saved)
            losses, first = saved["losses"], saved["step"]
        order_SB = order_of_blocks(len(self.blocks_BT), steps, self.budget.batch, seed).to(device)
        for step in range(first, steps):
            self.progress.fill_((step + 1) / steps)
            now = rate_at(rate, step, steps)
            if isinstance(self.group["lr"], Tensor):
                self.group["lr"].fill_(now)
            else:
                self.group["lr"] = now
            losses[step] = self.step(self.blocks_BT[order_SB[step]])
            if kept is not None and (step + 1) % LOOK == 0 and step + 1 < steps:
                losses[step].item()  # waits for the device
                if time.time() >= until:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    torch.save({**self._state(), "losses": losses, "step": step + 1}, kept)
                    return None
        self.trick.deploy()
        found: list[float] = losses.tolist()
        if kept is not None:
            kept.unlink(missing_ok=True)
        return found
