"""What a refusal of export advises: formats that take the layer, asked and not assumed, and trainings that export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.export_cases import byte_level, converted, llama

from aoquant import PackedWeightConfig, QATConfig, export, quantize_
from aoquant.recipes import get_recipe

CASES = [
    ("q4_0", "compressed-tensors", "vllm-w4a16-g32", {"gguf"}),
    ("q4_1", "compressed-tensors", "intx4-g32-asym/", {"gguf"}),
    ("q8_0", "compressed-tensors", "intx8-g32/", {"gguf"}),
    ("int4-g32", "compressed-tensors", "intx4-g32-asym/", set()),
    ("int4-g64", "compressed-tensors", "intx4-g64-asym/", set()),
    ("int8-tensor", "compressed-tensors", "intx8-row/", set()),
    ("fp8-e5m2-row", "compressed-tensors", "fp8-row/", set()),
    ("mxfp8-e5m2", "compressed-tensors", "mxfp8-weight", set()),
    ("mxfp8-32x32", "compressed-tensors", "mxfp8-weight", set()),
    ("mxfp4-quest", "compressed-tensors", "mxfp4-even/", set()),
    ("hadamard32-inverse+mxfp4", "compressed-tensors", "mxfp4-even/", set()),
    ("hadamard16+nvfp4", "compressed-tensors", "vllm-nvfp4-weight", set()),
    ("hadamard32-inverse+intx4-g32", "compressed-tensors", "vllm-w4a16-g32", set()),
    ("nvfp4-4over6", "compressed-tensors", "vllm-nvfp4-weight", {"gguf"}),
    ("int4-g32", "modelopt", "vllm-nvfp4-weight", set()),
    ("gridflip", "modelopt", "vllm-nvfp4-weight", set()),
    ("q4_0", "modelopt", "vllm-nvfp4-weight", {"gguf"}),
    ("fp8-row", "gguf", "gguf-q8_0", {"compressed-tensors"}),
    ("int4-g32", "gguf", "gguf-q4_0", set()),
]

TYPED = re.compile(r"(?:recipe|or) (\w+[-/][\w./+-]*)")


def config(name: str) -> Any:
    """Of a weight format, or a recipe's weight."""
    recipe = get_recipe(name) if name.startswith(("vllm", "nvfp4-4over6")) else None
    weight = name if recipe is None else recipe.make().recipe().fprop_weight.name
    return PackedWeightConfig(weight, contract="aoquant" if "+" in weight else "dequantize")


def refusal(model: Any, format: str, out: Path) -> str:
    with pytest.raises(ValueError, match="do not fit") as caught:
        export(model, out, format, byte_level())
    return str(caught.value)


@pytest.mark.parametrize(("weight", "format", "train", "others"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_advised_formats_take_the_layer_and_advised_trainings_fit(
    weight: str, format: str, train: str, others: set[str], tmp_path: Path
) -> None:
    model = converted(config(weight))
    said = refusal(model, format, tmp_path / "out")
    assert set(re.findall(r"format='([\w-]+)'", said)) == others
    assert ("which holds its weights as they are" in said) == bool(others)  # of activations it says nothing
    for other in others:
        export(model, tmp_path / other, other, byte_level())
    named = {*TYPED.findall(said)}
    assert train in named
    for name in named:
        advised = llama()
        quantize_(advised, get_recipe(name).prepare())
        quantize_(advised, QATConfig(step="convert"))
        export(advised, tmp_path / name.replace("/", "_"), format, byte_level())
