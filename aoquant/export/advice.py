"""Which other formats of export hold a layer that one refuses: each is asked by its own check, nothing is assumed."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module

from aoquant.export.fused_checks import unequal
from aoquant.export.source import Source
from aoquant.export.targets import FORMATS, Unfit, layout_of
from aoquant.export.weights import Weight
from aoquant.linear.tensor import PackedTensor


def other_formats(source: Source, target: str) -> Callable[[Iterable[Weight]], str]:
    """Return what advises, of some layers of a model, the formats besides `target` that hold all of them as they are.

    The advice ends a sentence; it is "" where no other format does. The model's outer scales are read once.
    """
    apart = cache(lambda: _fused_apart(source))

    def advise(weights: Iterable[Weight]) -> str:
        asked = list(weights)
        held = [f for f in FORMATS if f != target and asked and _takes(source, asked, f)]
        names = " or ".join(f"format={f!r}" for f in held if f == "gguf" or not apart())
        return f", or export with {names}, which holds its weights as they are" if names else ""

    return advise


def _takes(source: Source, weights: list[Weight], format: str) -> bool:
    try:
        store = layout_of(format).store
        if format != "gguf" and source.embeddings() & {weight.module for weight in weights}:
            return False
        if format == "gguf":
            import_module("aoquant.export.gguf_arch").find(source.config)
        for weight in weights:
            packed = weight.read(False)
            if not isinstance(packed, PackedTensor):
                return False
            store(packed)
        return True
    except (Unfit, ValueError, ImportError):  # ImportError: the format's library is not installed
        return False


def _fused_apart(source: Source) -> bool:
    """Return whether layers that engines fuse have different outer scales, or scales of the whole weight."""
    numbers = {}
    for weight in source.weights.values():
        packed = weight.read(False) if weight.tensor_class == "PackedTensor" else None
        if isinstance(packed, PackedTensor) and packed.per_tensor_scale is not None:
            numbers[weight.module] = packed.per_tensor_scale
        elif isinstance(packed, PackedTensor) and packed.weight_format.reach == "tensor":
            numbers[weight.module] = packed.encoded.scales
    return bool(unequal(numbers, source.modules))
