"""The contents of an export: every tensor is decided for the whole model before anything is written.

Every quantised layer is asked for its scheme with its codes left on meta. Layers that the target cannot hold are in one
error, each of the first ten with the reason and the nearest format that would. `skip` leaves layers in the model's
float dtype: their values are those that the layer multiplies by, decoded once.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from aoquant._messages import listed, warn
from aoquant.export.advice import other_formats
from aoquant.export.embedding_rows import check_use, rows_of
from aoquant.export.source import Source
from aoquant.export.targets import EXPERT, Stored, Unfit, layout_of
from aoquant.export.weights import Weight
from aoquant.linear.tensor import PackedTensor


@dataclass(frozen=True)
class Contents:
    """What an export holds.

    layers: packed ones, by module, as they will be stored, codes on meta. floats: every other tensor, by name, written
    as values: those of layers left out, and what stands beside codes, such as a bias.
    """

    layers: dict[str, Stored]
    floats: dict[str, Weight]


def contents_of(source: Source, skip: Sequence[str], target: str) -> Contents:
    """Ask the target for every quantised layer, and take the others as floats.

    Raises:
        ValueError: listing the layers that do not fit, or a name in `skip` that is no quantised layer's.
    """
    store: Callable[[PackedTensor], Stored] = layout_of(target).store
    quantised = {w.module: w for w in source.weights.values() if w.tensor_class != "Tensor"}
    left = _matching(skip, quantised)
    embeddings = source.embeddings()
    layers: dict[str, Stored] = {}
    others_of = other_formats(source, target)
    experts = any(map(EXPERT.match, quantised))
    problems, notes, others = list[str](), dict[str, list[str]](), dict[str, str]()
    for module, weight in quantised.items():
        if module in left:
            continue
        try:
            if weight.tensor_class == "PackedExperts":
                raise Unfit(
                    f"its experts are one tensor in float checkpoints too, and {target} holds each expert's matrices",
                    "save it with aoquant.save_pretrained",
                )
            if weight.tensor_class != "PackedTensor":
                raise Unfit(
                    f"it is torchao's {weight.tensor_class}",
                    "train with a config of aoquant's, such as IntxWeightConfig(4, 128)",
                )
            tied = weight.name in source.tied.values()
            if module in embeddings:
                check_use(target, tied=tied)
            owner = source.modules.get(module, nn.Linear(1, 1, device="meta"))
            if module not in embeddings and not isinstance(owner, nn.Linear):
                raise Unfit(
                    f"it is transformers' {type(owner).__name__}, and readers of {target} quantise nn.Linear alone",
                    "save it with aoquant.save_pretrained",
                )
            stored = store(weight.read(False))
            if module in embeddings:
                stored = rows_of(stored, target, tied=tied)
            layers[module] = stored
        except Unfit as error:
            if error.reason not in others:  # asked of one layer for each reason
                others[error.reason] = others_of([weight])
            instead = error.beside_experts if experts else error.instead
            problems.append(f"{module}: {error.reason}. Instead: {instead}{others[error.reason]}")
            continue
        for note in layers[module].notes:
            notes.setdefault(note, []).append(module)
    if problems:
        raise ValueError(
            f"{len(problems)} layer(s) do not fit {target} without rounding, and nothing was written:"
            + listed(problems)
            + "\nOr leave layers in high precision: skip=[...] (--skip)"
        )
    if not layers and quantised:
        raise ValueError("skip names every quantised layer: there is nothing to export")
    for note, modules in notes.items():
        warn(f"{note} ({len(modules)} layers, such as {modules[0]}); the numbers in the file are the trained ones")
    codes = {quantised[module].name for module in layers}
    floats = {name: w for name, w in source.weights.items() if name not in codes}
    return Contents(layers, floats)


def values(weight: Weight) -> Tensor:
    """A weight that is written as values: a skipped layer's are what its GEMM multiplies by."""
    tensor = weight.read(True)
    return tensor.dequantize() if weight.tensor_class != "Tensor" else tensor


def _matching(skip: Sequence[str], quantised: dict[str, Weight]) -> set[str]:
    """Modules that `skip` names, by name in the model or in files, glob or "re:" pattern."""
    chosen: set[str] = set()
    for pattern in skip:
        named = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
        found = {m for m, w in quantised.items() if named.fullmatch(m) or named.fullmatch(w.module_in_files)}
        if not found:
            raise ValueError(
                f"skip: {pattern!r} is no quantised layer's name; there are {len(quantised)}, such as {next(iter(quantised))}"
            )
        chosen |= found
    return chosen
