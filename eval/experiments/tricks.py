"""What the literature offers where straight-through training of 4-bit floats stops: a row's `trick`, or none.

- "average": the weights that are deployed are a moving average over about a hundred steps (Polyak averaging).
- "dampen": a weight that lies near the edge between two codes hops over it at every step. After a step each weight is
  pulled towards the value it is rounded to, more so as training ends. (Nagel et al., arXiv:2203.11086, add the distance
  to the loss; here the pull is decoupled from AdamW, as weight decay is, since AdamW would rescale it.)
- "features": distillation of every decoder layer's output too, as a squared error over the teacher's square (QAD).

A trick is kept as a recommendation only where it wins on validation pages over all seeds of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.layers.qat import QATLayer
from aoquant.report.measure import weight_value

TRICKS = ("", "average", "dampen", "features")
DECAY = 0.99
PULL = 0.05  # share of the way to the rounded value that a step at the end of training goes
FEATURES = 1.0  # weight of the layers' error beside the KL divergence, in nats


class Average:
    """Moving averages of float32 masters, kept in place, so that a captured step updates them."""

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self.masters, self.means = masters, [m.detach().clone() for m in masters]

    @torch.no_grad()
    def begin(self) -> None:
        """From the masters as they are."""
        torch._foreach_copy_(self.means, [m.detach() for m in self.masters])

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer's step."""
        torch._foreach_lerp_(self.means, [m.detach() for m in self.masters], 1 - DECAY)

    @torch.no_grad()
    def deploy(self, parameters: Sequence[Tensor]) -> None:
        """Give the model the averages, rounded to its dtype."""
        for p, mean in zip(parameters, self.means, strict=True):
            p.copy_(mean)


class Dampen:
    """The pull of every prepared weight towards what it is rounded to. progress: 0 to 1, a tensor on the device."""

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], masters: Sequence[Tensor], progress: Tensor
    ) -> None:
        of = {id(p): m for p, m in zip(trained, masters, strict=True)}
        layers = [m for m in model.modules() if isinstance(m, QATLayer) and id(getattr(m, "weight", None)) in of]
        self.pairs, self.progress = [(layer, of[id(layer.weight)]) for layer in layers], progress
        if not self.pairs:
            raise ValueError("dampen needs a row of aoquant's whose weights are trained")

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer's step: the bf16 weight follows its master."""
        share = PULL * self.progress**2
        for layer, master in self.pairs:
            master.lerp_(weight_value(layer).float(), share)
            layer.weight.copy_(master)


def feature_loss(student: Any, teacher: Any) -> Tensor:
    """Of two outputs with hidden_states: mean over layers of |s - t|^2 / |t|^2."""
    pairs = list(zip(student.hidden_states[1:], teacher.hidden_states[1:], strict=True))
    errors = [(s.float() - t.float()).square().sum() / t.float().square().sum() for s, t in pairs]
    return torch.stack(errors).mean()
