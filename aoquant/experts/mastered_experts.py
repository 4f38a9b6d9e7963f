"""Prepared experts whose codes follow float32 masters: the stacked experts of `quantized_model_init`.

The module's parameters are the masters, as those of a linear layer are (linear/mastered.py). What its forward reads
under their names is one `GatheredWeight` for the stack, whose experts have codes and scales of their own. An expert
without tokens gets a zero gradient in its part of the master's.
"""

from typing import Any

import torch
from torch import Tensor

from aoquant.experts.prepared import QATExperts
from aoquant.formats import Encoded
from aoquant.linear.mastered import Mastered


class _Read:
    """Read a packed parameter as its codes, or as the master's values where fake quantisation is off.

    Not a property: a `QATReadExperts` puts a `Stack` before it for the time of a forward.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        codes = module.current_codes(self.name)
        return codes.weight if module.fake_quant else codes.master.to(codes.weight.dtype)


class MasteredExperts(Mastered, QATExperts):
    """Prepared experts with packed weights; made at run time, with a `_Read` for each packed parameter."""

    reads = _Read

    def matrix(self, name: str, expert: int) -> Tensor:
        if name not in self.codes:
            return super().matrix(name, expert)
        codes = self.codes[name]
        return codes.values[expert].to(codes.weight.dtype)

    def values(self, name: str) -> Tensor:
        return self.codes[name].master if name in self.codes else super().values(name)

    @torch.no_grad()
    def encode_expert(self, name: str, expert: int, dtype: torch.dtype) -> Encoded:
        if name not in self.codes:
            return super().encode_expert(name, expert, dtype)
        return self.current_codes(name).weight.expert(expert).rows

    @torch.no_grad()
    def quantised_weight(self, name: str) -> Tensor:
        if name not in self.codes:
            return super().quantised_weight(name)
        codes, operand = self.current_codes(name), self.stacks[name].recipe.fprop_weight
        w = codes.weight
        values = torch.stack([operand.decode(w.expert(e).rows, w.dtype) for e in range(len(w))])
        return values.transpose(1, 2) if w.transposed else values
