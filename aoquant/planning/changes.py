"""What `quantize_` changes: layers and stacked parameters of experts, chosen and then checked."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded, Scales
from aoquant.linear.kinds import Kind
from aoquant.targets import Target


@dataclass(frozen=True)
class Chosen:
    """A layer, or a stacked parameter of experts, that a config applies to. fqn: all of its names, joined by ", "."""

    fqn: str
    module: Any
    config: Any
    parameter: str = "weight"

    @property
    def weight(self) -> Any:
        return getattr(self.module, self.parameter)


@dataclass(frozen=True, kw_only=True)
class Change(Chosen):
    """A checked change of a layer or of a stacked parameter.

    step: "prepare" swaps the class; "convert", and "quantize" without training, replace the weight.
    layer: the kind of a layer; None for a stacked parameter.
    dtype: that forward sees the weight in, which is what is encoded.
    scales: that a layer quantised at once shares with its siblings; None where its weight makes them, or it holds them.
    codes: made elsewhere, as calibrated PTQ makes them: of a layer, or of each expert; None where convert encodes.
    """

    step: str
    target: Target
    dtype: torch.dtype
    layer: Kind | None = None
    scales: Scales | None = None
    codes: Sequence[Encoded] | None = None

    @property
    def kind(self) -> Kind:
        """The kind of a layer, which stacked parameters do not have."""
        assert self.layer is not None
        return self.layer

    def matrix(self) -> Tensor:
        """The float weight of a layer as (N, K)."""
        return self.kind.matrix(self.weight.detach())


@contextmanager
def restoring(modules: Iterable[Any]) -> Iterator[None]:
    """Put modules, or configs, back, the objects that they are, when the block raises anything, an interrupt too."""
    before = [(m, m.__class__, [(held, dict(held)) for held in _held_by(m)]) for m in modules]
    try:
        yield
    except BaseException:
        for module, cls, dictionaries in before:
            if type(module) is not cls:  # a frozen config refuses even its own class
                module.__class__ = cls
            for held, was in dictionaries:
                held.clear()
                held.update(was)
        raise


def _held_by(module: Any) -> list[dict[str, Any]]:
    """Return the dictionaries that a change writes to."""
    if not isinstance(module, nn.Module):
        return [vars(module)]
    stacks = [module.stacks] if isinstance(module, QATExperts) else []
    return [module.__dict__, module._parameters, module._buffers, *stacks]
