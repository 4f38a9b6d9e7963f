"""The names and dtypes that a checkpoint's files give a model's tensors, where they differ from the model's own.

transformers renames some architectures' tensors when it loads them, and stacks the matrices of experts.
`revert_weight_conversion` decides by names and shapes alone, so it is given row numbers in place of values, and what
comes back says which rows of which expert each name holds.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from aoquant._messages import warn


@dataclass(frozen=True)
class Piece:
    """Rows start to end of one expert's weight (N, K), which files keep under a name of their own."""

    name: str
    expert: int
    start: int
    end: int

    @property
    def module(self) -> str:
        """Return the name of the linear layer that the piece would be."""
        return self.name.removesuffix(".weight")


def stored_name(model: Any, name: str) -> str:
    """Return the name in files of a tensor that is stored whole."""
    found = revert_weight_conversion(model, {name: torch.empty(2, 2, device="meta")})
    return next(iter(found)) if len(found) == 1 else name


def stored_names(model: Any, shapes: Mapping[str, torch.Size]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the names in files of a model's tensors, given by name with their shapes: one name for each tensor that
    files keep as it is, several for one that they keep in parts or in another order. Tensors that files join keep their
    own names, by which `from_pretrained` finds them too.
    """
    marks = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    reverted = {id(t): stored for stored, t in revert_weight_conversion(model, dict(marks)).items()}
    whole = {name: reverted[id(mark)] for name, mark in marks.items() if id(mark) in reverted}
    parts = {n: list(revert_weight_conversion(model, {n: marks[n]})) for n in marks if n not in whole}
    sources = Counter(stored for names in parts.values() for stored in names)
    joined = {name for name, names in parts.items() if any(sources[stored] > 1 for stored in names)}
    return whole | {name: name for name in joined}, {n: names for n, names in parts.items() if n not in joined}


def model_names(model: Any, stored: Iterable[str], places: Iterable[str] | None = None) -> dict[str, str]:
    """Return the names in the model of a folder's tensors, renamed as `from_pretrained` renames them. A tensor beside a
    layer's weight, such as its scale, goes where the weight goes. A tensor without a place keeps its name.

    places: names that have a place, by default those of the model's state dict.
    """
    known = dict.fromkeys(model.state_dict() if places is None else places, True)
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]

    def place(name: str) -> str | None:
        # a folder may have the model's own names already
        renamed = (rename_source_key(name, r, [], model.base_model_prefix, known)[0] for r in (renamings, []))
        return next((found for found in renamed if found in known), None)

    found = dict[str, str]()
    for name in sorted(stored, key=dot_natural_key):  # the order in which transformers renames
        owner, dot, own = name.rpartition(".")
        if (here := place(name)) is not None:
            found[name] = here
        else:
            weight = place(f"{owner}{dot}weight")
            found[name] = name if weight is None else weight.removesuffix("weight") + own
    return found


def pieces_of(model: Any, name: str) -> list[Piece]:
    """Return the pieces in which files keep a stacked parameter, by expert and row; none where they keep it as it is.

    Raises:
        ValueError: files keep it in another way.
    """
    owner, _, parameter = name.rpartition(".")
    shape = getattr(model.get_submodule(owner), parameter).shape
    experts, rows, _ = shape
    numbers = torch.arange(experts * rows, device="cpu").view(experts, rows, 1).expand(-1, -1, 2)
    pieces = []
    for stored, held in revert_weight_conversion(model, {name: numbers}).items():
        if held.shape == numbers.shape and torch.equal(held, numbers):
            return []
        first = int(held.flatten()[0])
        end = first + len(held)
        if held.dim() != 2 or not torch.equal(held[:, 0], torch.arange(first, end, device="cpu")):
            raise ValueError(f"{name} {tuple(shape)}: files keep it in a layout that is not known here")
        pieces.append(Piece(stored, first // rows, first % rows, first % rows + len(held)))
    return sorted(pieces, key=lambda p: (p.expert, p.start))


def keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Give parameters and buffers that an architecture keeps in another dtype than its model's `dtype` their own, as
    `from_pretrained` does: DeepSeek's routing biases stay float32.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if wide := wide_dtype(model, name, dtype):
            tensor.data = tensor.data.to(wide)


def warn_of_dtypes(model: Any) -> None:
    """Warn of tensors that the model from the files has in another dtype than `model`: a model that was cast as a whole
    rounded what transformers keeps wide, or computes anew, such as rotary frequencies.
    """
    try:
        with torch.device("meta"):
            made = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    except TypeError:  # a class that wants more than a config
        return
    keep_wide(made, model.dtype)
    loaded = {name: t.dtype for name, t in (*made.named_parameters(), *made.named_buffers())}
    there = (*model.named_parameters(), *model.named_buffers())
    changed = [n for n, t in there if type(t.data) is torch.Tensor and loaded.get(n, t.dtype) != t.dtype]
    if changed:
        here, then = model.get_parameter_or_buffer(changed[0]).dtype, loaded[changed[0]]
        warn(
            f"{len(changed)} tensor(s), such as {changed[0]}, are {here} in this model and {then} in the one that is loaded from its files, "
            f"which then computes other numbers: give a model its dtype as it is made or loaded (dtype={model.dtype}), in place of a cast "
            "that also rounds what transformers keeps wider"
        )


def wide_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that an architecture keeps a tensor in where its model is loaded in `dtype`; None: in that one."""
    if exceptions := model._get_dtype_plan(dtype):
        pattern, keys, _ = build_glob_alternation(list(exceptions))
        if (match := pattern.search(name)) and match.lastgroup:
            return exceptions[keys[match.lastgroup]]
    return None
