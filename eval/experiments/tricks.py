"""What the literature offers where straight-through training of few bits stops: a row's `trick`, or none.

- "average": the weights that are deployed are a moving average over about a hundred steps (Polyak averaging).
- "dampen": a weight that lies near the edge between two codes hops over it at every step. After a step each weight is
  pulled towards the value it is rounded to, more so as training ends. (Nagel et al., arXiv:2203.11086, add the distance
  to the loss; here the pull is decoupled from AdamW, as weight decay is, since AdamW would rescale it.)
- "freeze": in the second half, a weight whose code has hopped back and forth too often is fixed at the value of the two
  where it spent more time (the same paper's iterative freezing).
- "soft": a layer begins as the float one and ends as the quantised one: its output goes over from one to the other in
  the first fifth of training.
- "scales": scales are learned with the weights (LSQ; integers alone), each at the learning rate relative to its size.
- "features": distillation of every decoder layer's output too, as a squared error over the teacher's square (QAD).

A trick is kept as a recommendation only where it wins on validation pages over all seeds of its row. All of their state
are tensors that change in place, so that a step with a trick can be a CUDA graph and a checkpoint can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aoquant import set_fake_quant
from aoquant.linear.prepared import QATLayer
from aoquant.report.measure import weight_value

DECAY = 0.99
PULL = 0.05  # share of the way to the rounded value that a step at the end of training goes
FEATURES = 1.0  # weight of the layers' error beside the KL divergence, in nats
MEMORY = 0.02  # of the frequency of hops and of the mean code: about fifty steps
HOP = 0.2  # of a value: FP4's codes lie a quarter apart or more; a smaller change is that of a block's scale
OFTEN, SELDOM = 0.1, 0.01  # hops a step that freeze a weight, at the middle of training and at its end
SOFT = 0.2  # share of the steps in which a layer becomes the quantised one


class Trick:
    """Nothing. trained: the model's parameters; masters: their float32 copies; progress: 0 to 1, on the device."""

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], masters: Sequence[Tensor], progress: Tensor
    ) -> None:
        self.trained, self.masters, self.progress = trained, masters, progress
        self.prepare(model)

    def prepare(self, model: nn.Module) -> None:
        """Find what it works on. Raises ValueError for a row that it does not fit."""

    def begin(self) -> None:
        """A run begins with the weights as they are."""

    def step(self) -> None:
        """After an optimizer's step."""

    def deploy(self) -> None:
        """A run has ended."""

    def state(self) -> list[Tensor]:
        """What a checkpoint keeps."""
        return []

    def layers(self, model: nn.Module, name: str) -> list[tuple[Any, Tensor]]:
        """Prepared layers whose weights are trained, each with its master."""
        of = {id(p): m for p, m in zip(self.trained, self.masters, strict=True)}
        found = [m for m in model.modules() if isinstance(m, QATLayer) and id(getattr(m, "weight", None)) in of]
        if not found:
            raise ValueError(f"{name} needs a row of aoquant's whose weights are trained")
        return [(layer, of[id(layer.weight)]) for layer in found]


class Average(Trick):
    """Moving averages of the masters."""

    def prepare(self, model: nn.Module) -> None:
        self.means = [m.detach().clone() for m in self.masters]

    @torch.no_grad()
    def begin(self) -> None:
        torch._foreach_copy_(self.means, [m.detach() for m in self.masters])

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_lerp_(self.means, [m.detach() for m in self.masters], 1 - DECAY)

    @torch.no_grad()
    def deploy(self) -> None:
        for p, mean in zip(self.trained, self.means, strict=True):
            p.copy_(mean)

    def state(self) -> list[Tensor]:
        return self.means


class Dampen(Trick):
    """The pull of every prepared weight towards what it is rounded to; the bf16 weight follows its master."""

    def prepare(self, model: nn.Module) -> None:
        self.pairs = self.layers(model, "dampen")

    @torch.no_grad()
    def step(self) -> None:
        share = PULL * self.progress**2
        for layer, master in self.pairs:
            master.lerp_(weight_value(layer).float(), share)
            layer.weight.copy_(master)


class Hops:
    """Of one weight matrix: where each element's rounded value was, and how often it turned back."""

    def __init__(self, value: Tensor) -> None:
        self.last = value.clone()
        self.direction = torch.zeros_like(value, dtype=torch.int8)  # of the last hop
        self.often, self.mean = torch.zeros_like(value, dtype=torch.float32), value.float()
        self.frozen, self.at = torch.zeros_like(value, dtype=torch.bool), value.float()

    def begin(self, value: Tensor) -> None:
        self.last.copy_(value)
        self.mean.copy_(value)
        for t in (self.direction, self.often, self.frozen, self.at):
            t.zero_()

    def see(self, value: Tensor, threshold: Tensor) -> None:
        """The rounded values after a step; freezes elements that turn back more often than `threshold` a step."""
        by, size = value.float() - self.last.float(), torch.maximum(value.abs(), self.last.abs()).float()
        went = torch.where(by.abs() > HOP * size, torch.sign(by), 0.0).to(torch.int8)
        self.often.lerp_(((went * self.direction) == -1).float(), MEMORY)
        self.mean.lerp_(value.float(), MEMORY)
        before_is_nearer = (self.last.float() - self.mean).abs() < (value.float() - self.mean).abs()
        newly = (self.often > threshold) & ~self.frozen
        self.at.copy_(torch.where(newly, torch.where(before_is_nearer, self.last, value).float(), self.at))
        self.frozen.logical_or_(newly)
        self.direction.copy_(torch.where(went == 0, self.direction, went))
        self.last.copy_(value)

    def state(self) -> list[Tensor]:
        return [self.last, self.direction, self.often, self.mean, self.frozen, self.at]


class Freeze(Trick):
    """Elements that oscillate are fixed, from the middle of training on."""

    def prepare(self, model: nn.Module) -> None:
        self.pairs = self.layers(model, "freeze")
        self.hops = [Hops(weight_value(layer)) for layer, _ in self.pairs]

    @torch.no_grad()
    def begin(self) -> None:
        for (layer, _), hops in zip(self.pairs, self.hops, strict=True):
            hops.begin(weight_value(layer))

    @torch.no_grad()
    def step(self) -> None:
        second = (2 * self.progress - 1).clamp(0, 1)
        threshold = torch.where(self.progress < 0.5, torch.inf, OFTEN + (SELDOM - OFTEN) * second)
        for (layer, master), hops in zip(self.pairs, self.hops, strict=True):
            hops.see(weight_value(layer), threshold)
            master.copy_(torch.where(hops.frozen, hops.at, master))
            layer.weight.copy_(master)

    def state(self) -> list[Tensor]:
        return [t for hops in self.hops for t in hops.state()]


class Soft(Trick):
    """A prepared layer's output goes over from the float layer's to its own; afterwards it is its own, exactly."""

    def prepare(self, model: nn.Module) -> None:
        self.share = torch.zeros_like(self.progress)
        for layer, _ in self.layers(model, "soft"):
            layer.register_forward_hook(self.blend)

    def blend(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        set_fake_quant(layer, False)
        whole = layer.forward(*inputs)  # not called: no hook
        set_fake_quant(layer, True)
        return torch.lerp(whole, output, self.share.to(output.dtype))

    @torch.no_grad()
    def begin(self) -> None:
        self.share.zero_()

    @torch.no_grad()
    def step(self) -> None:
        self.share.copy_((self.progress / SOFT).clamp(max=1))

    def state(self) -> list[Tensor]:
        return [self.share]


class Scales(Trick):
    """A step of a learned scale is taken relative to its mean size at the beginning: AdamW's steps know no units."""

    def prepare(self, model: nn.Module) -> None:
        of = {id(p): (p, m) for p, m in zip(self.trained, self.masters, strict=True)}
        found = [of[id(p)] for name, p in model.named_parameters() if name.endswith("_scale") and id(p) in of]
        if not found:
            raise ValueError("scales needs a row of aoquant's whose scales can be learned: int8, intx")
        self.pairs = found
        self.before = [m.detach().clone() for _, m in found]
        self.sizes = [m.detach().abs().mean() for _, m in found]

    @torch.no_grad()
    def begin(self) -> None:
        for (_, master), before, size in zip(self.pairs, self.before, self.sizes, strict=True):
            before.copy_(master)
            size.copy_(master.abs().mean())

    @torch.no_grad()
    def step(self) -> None:
        for (p, master), before, size in zip(self.pairs, self.before, self.sizes, strict=True):
            master.copy_(before + (master - before) * size)
            before.copy_(master)
            p.copy_(master)

    def state(self) -> list[Tensor]:
        return [*self.before, *self.sizes]


MADE: dict[str, Callable[..., Trick]] = {
    "": Trick,
    "average": Average,
    "dampen": Dampen,
    "freeze": Freeze,
    "soft": Soft,
    "scales": Scales,
    "features": Trick,  # it is a loss
}
TRICKS = tuple(MADE)


def feature_loss(student: Any, teacher: Any) -> Tensor:
    """Of two outputs with hidden_states: mean over layers of |s - t|^2 / |t|^2."""
    pairs = list(zip(student.hidden_states[1:], teacher.hidden_states[1:], strict=True))
    errors = [(s.float() - t.float()).square().sum() / t.float().square().sum() for s, t in pairs]
    return torch.stack(errors).mean()
