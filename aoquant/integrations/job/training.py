"""How a run trains: presets of published hyper-parameters, frozen layers, and validation pages.

Validation pages are the last blocks of the training text, which are not trained on then. They choose among learning
rates and end training early; the pages that a run is scored on do neither.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aoquant.integrations.finetune import block_loss, scored_tokens
from aoquant.integrations.text import ONE_TEXT, Documents

HELD_OUT = 20  # one of so many blocks, at most `_MOST`
_MOST = 64
SEARCH = 5  # a rate is tried for one of so many steps


@dataclass(frozen=True)
class Preset:
    """Defaults of a fine-tune. AdamW's rate warms up for a twentieth of the steps, and falls by a cosine to final_rate.

    steps: None is one pass over the training text, at most `tokens` in all.
    """

    loss: str
    learning_rate: float
    final_rate: float
    steps: int | None = None
    tokens: int = 0

    def steps_for(self, blocks: int, batch_size: int, block: int) -> int:
        """Return the steps for a text of so many blocks."""
        return self.steps or max(1, min(blocks // batch_size, self.tokens // (batch_size * block)))


# qad: quantisation-aware distillation of NVIDIA's NVFP4 models, arXiv:2601.20088: KL, 1e-5 to 1e-6, 1000 steps of
# 512 x 32 768 tokens. The tokens are what is kept of its budget: a smaller batch makes more steps of them.
# sft: the same schedule with cross entropy, as QAT after supervised fine-tuning is done with NVIDIA's Model Optimizer
# (its llm_qat example: a rate such as 1e-5, for 1 to 10 % of the first training).
_NVIDIA = 1000 * 512 * 32_768
PRESETS = {
    "demo": Preset("kl", 3e-4, 0.0, steps=80),
    "qad": Preset("kl", 1e-5, 1e-6, tokens=_NVIDIA),
    "sft": Preset("ce", 1e-5, 1e-6, tokens=_NVIDIA),
}


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Keep the parameters of the modules of these names from training. A name is exact, or "re:" and a pattern.

    Raises:
        ValueError: a name matches no module that has parameters, or nothing is left to train.
    """
    for name in names:
        pattern = re.compile(name[3:] if name.startswith("re:") else re.escape(name))
        found = [p for fqn, m in model.named_modules() if pattern.fullmatch(fqn) for p in m.parameters()]
        if not found:
            raise ValueError(f"--freeze {name}: the model has no module of that name with parameters")
        for p in found:
            p.requires_grad_(False)
    if names and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"--freeze {' '.join(names)} leaves nothing to train")


def hold_out(blocks_BT: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Split token blocks into (training, validation): the last twentieth, at most 64, as many for each rank.

    Raises:
        ValueError: too little text.
    """
    n = max(1, min(len(blocks_BT) // HELD_OUT, _MOST) // ranks) * ranks
    if len(blocks_BT) <= n:
        raise ValueError(
            f"validation takes {n} blocks of the training text, and it has {len(blocks_BT)}: give more text, or a "
            "smaller --block"
        )
    return blocks_BT[:-n], blocks_BT[-n:]


@torch.no_grad()
def validation_loss(model: nn.Module, blocks_BT: Tensor, documents: Documents = ONE_TEXT, *, shared: bool) -> float:
    """Return the mean cross entropy of validation blocks, in nats a token.

    shared: each rank scores a part; a collective.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    training = model.training
    model.eval()
    mine = torch.arange(rank, len(blocks_BT), size, device="cpu")
    total = torch.stack(
        [block_loss(model, None, blocks_BT, row, "ce", weight=1.0, documents=documents) for row in mine.split(1)]
    ).sum()
    model.train(training)
    if shared:
        dist.all_reduce(total)
    return float(total) / scored_tokens(blocks_BT, "ce", documents)


def best_rate(rates: Sequence[float], loss_of: Callable[[float], float]) -> float:
    """Return the rate of the lowest validation loss, and say so; the best at an end of the list is a hint.

    Raises:
        ValueError: no rate ends with a finite loss.
    """
    found = {rate: loss_of(rate) for rate in sorted(rates)}
    finite = {rate: value for rate, value in found.items() if math.isfinite(value)}
    if not finite:
        raise ValueError(
            f"training diverges with each of --learning-rates {' '.join(map(str, rates))}: give smaller ones"
        )
    best = min(finite, key=lambda rate: finite[rate])
    text = ", ".join(f"{rate:g}: {value:.4f}" for rate, value in found.items())
    ends = {min(found): "the smallest, so try smaller ones", max(found): "the largest, so try larger ones"}
    hint = f" ({ends[best]})" if len(found) > 1 and best in ends else ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"validation loss by learning rate: {text}; chosen {best:g}{hint}", file=sys.stderr, flush=True)
    return best
