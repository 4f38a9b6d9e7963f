"""A model's weights as engines read them: under the names of the float checkpoint, experts one by one.

transformers gives some architectures' tensors other names than their files have, and stacks the matrices of experts.
vLLM, SGLang and transformers look for "...experts.0.gate_proj", "...experts.0.up_proj" and so on, one linear layer
each, and stack them as they like. A piece is a view of the packed stack, rows of one expert, so nothing is rounded. The
other tensors of such a model get their names in files too. Experts that float checkpoints keep as one tensor (gpt-oss)
have no such names, and stay one weight, which no target holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from aoquant.experts.families import experts_of, stacks_of
from aoquant.files.safetensors_file import StoredTensor
from aoquant.files.stored_names import Piece, pieces_of, stored_names
from aoquant.linear.packed_moves import cut_rows
from aoquant.linear.tensor import PackedTensor


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer. tensor_class: the name of its class, "Tensor" for plain ones. read: with False, a
    PackedTensor has its codes on meta. read_expert: the same of one expert, for packed experts. stored: its name in
    files, "" for `name`.
    """

    name: str
    tensor_class: str
    read: Callable[[bool], Any]
    read_expert: Callable[[int, bool], PackedTensor] | None = None
    stored: str = ""

    @property
    def module(self) -> str:
        """Name of the module that holds it; a stack of experts is a module of its own."""
        return self.name if self.tensor_class == "PackedExperts" else self.name.rpartition(".")[0]

    @property
    def name_in_files(self) -> str:
        """Name in float checkpoints, and in what is exported."""
        return self.stored or self.name

    @property
    def module_in_files(self) -> str:
        """Name of the module that holds it, by its name in files."""
        return self.name_in_files.rpartition(".")[0]


def as_stored(
    model: Any,
    weights: dict[str, Weight],
    names: Mapping[str, str] | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> dict[str, Weight]:
    """Return a model's weights with their names in files. Experts' matrices, and tensors that files keep in parts, are
    one weight each, by that name.

    names: of a folder, the names in its files of the weights that it keeps whole; None for a model in memory. stored:
        its tensors, by those names.
    """
    stacks = {f"{name}.{stack}" for name, module in experts_of(model).items() for stack in stacks_of(module)}
    pieces = {name: own for name in weights if name in stacks and (own := pieces_of(model, name))}
    shapes = {name: t.shape for name, t in model.state_dict().items() if name in weights and name not in pieces}
    whole, parts = stored_names(model, shapes)
    whole |= names or {}
    found = dict[str, Weight]()
    for name, weight in weights.items():
        if name in pieces and weight.read_expert is not None:
            one = lru_cache(maxsize=1)(weight.read_expert)  # its pieces are read one after the other
            found |= {p.name: Weight(p.name, "PackedTensor", _packed_piece(one, p)) for p in pieces[name]}
        elif name in pieces:
            found |= {p.name: Weight(p.name, "Tensor", _float_piece(weight, p, stored)) for p in pieces[name]}
        elif name in parts and weight.tensor_class == "Tensor":
            found |= {part: Weight(part, "Tensor", _float_part(model, weight, part, stored)) for part in parts[name]}
        else:
            found[name] = replace(weight, stored=whole.get(name, name))
    return found


def given(tensor: Tensor) -> Callable[[bool], Tensor]:
    """Return what reads a plain tensor that is there."""
    return lambda codes: tensor


def _packed_piece(one: Callable[[int, bool], PackedTensor], piece: Piece) -> Callable[[bool], Tensor]:
    return lambda codes: cut_rows(one(piece.expert, codes), piece.start, piece.end)


def _float_piece(weight: Weight, piece: Piece, stored: Mapping[str, StoredTensor] | None) -> Callable[[bool], Tensor]:
    if stored is not None:  # as transformers writes it
        return lambda codes: stored[piece.name].read()
    return lambda codes: weight.read(True)[piece.expert, piece.start : piece.end]


def _float_part(
    model: Any, weight: Weight, part: str, stored: Mapping[str, StoredTensor] | None
) -> Callable[[bool], Tensor]:
    if stored is not None:
        return lambda codes: stored[part].read()
    return lambda codes: revert_weight_conversion(model, {weight.name: weight.read(True)})[part].contiguous()
