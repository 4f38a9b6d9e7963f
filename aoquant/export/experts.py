"""Stacked experts as engines read them: each expert's matrices, under the names of the float checkpoint.

vLLM, SGLang and transformers look for "...experts.0.gate_proj", "...experts.0.up_proj" and so on, one linear layer
each, and stack them as they like. A piece is a view of the packed stack, rows of one expert, so nothing is rounded. The
other tensors of such a model get their names in files too. Experts that float checkpoints keep as one tensor (gpt-oss)
have no such names, and stay one weight, which no target holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from aoquant.integrations.safetensors_file import StoredTensor
from aoquant.integrations.stored_names import Piece, pieces_of, stored_name
from aoquant.layers.experts import stacks_of
from aoquant.layers.packed_moves import cut_rows
from aoquant.layers.routers import experts_of
from aoquant.tensor import PackedTensor


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer. tensor_class: the name of its class, "Tensor" for plain ones. read: with False, a
    PackedTensor has its codes on meta. read_expert: the same of one expert, for packed experts.
    """

    name: str
    tensor_class: str
    read: Callable[[bool], Tensor]
    read_expert: Callable[[int, bool], PackedTensor] | None = None

    @property
    def module(self) -> str:
        """Name of the module that holds it; a stack of experts is a module of its own."""
        return self.name if self.tensor_class == "PackedExperts" else self.name.rpartition(".")[0]


def as_stored(
    model: Any, weights: dict[str, Weight], stored: dict[str, StoredTensor] | None = None
) -> dict[str, Weight]:
    """The weights of a model with stacked experts by their names in files; those of any other model as they are.

    stored: the tensors of the model's folder, by those names; None for a model in memory.
    """
    stacks = {f"{name}.{stack}" for name, module in experts_of(model).items() for stack in stacks_of(module)}
    if not stacks:
        return weights
    found = dict[str, Weight]()
    for name, weight in weights.items():
        pieces = pieces_of(model, name) if name in stacks else []
        if not pieces:
            own = stored_name(model, name)
            found[own] = replace(weight, name=own)
        elif weight.read_expert is not None:
            one = lru_cache(maxsize=1)(weight.read_expert)  # its pieces are read one after the other
            found |= {p.name: Weight(p.name, "PackedTensor", _packed_piece(one, p)) for p in pieces}
        else:
            found |= {p.name: Weight(p.name, "Tensor", _float_piece(weight, p, stored)) for p in pieces}
    return found


def _packed_piece(one: Callable[[int, bool], PackedTensor], piece: Piece) -> Callable[[bool], Tensor]:
    return lambda codes: cut_rows(one(piece.expert, codes), piece.start, piece.end)


def _float_piece(weight: Weight, piece: Piece, stored: dict[str, StoredTensor] | None) -> Callable[[bool], Tensor]:
    if stored is not None:  # as transformers writes it
        return lambda codes: stored[piece.name].read()
    return lambda codes: weight.read(True)[piece.expert, piece.start : piece.end]
