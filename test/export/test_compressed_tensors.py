"""compressed-tensors folders: transformers loads the trained numbers in a process that has never heard of aoquant."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.export_cases import converted, load_elsewhere, write_expected
from torchao.quantization import FqnToConfig

from aoquant import PackedWeightConfig, export

WEIGHT_ONLY = [
    "intx4-g128",
    "intx4-g32",
    "intx4-g32-asym",
    "intx4-g64-noclip",
    "intx3-g32",
    "intx8-row",
    "intx8-g128",
    "mxfp4",
    "mxfp8",
    "nvfp4-static:0.0009765625",
]
WITH_ACTIVATIONS = {
    "int8": PackedWeightConfig("int8-row", "int8-row"),
    "fp8-row": PackedWeightConfig("fp8-row", "fp8-row"),
    "fp8-row-weight": PackedWeightConfig("fp8-row"),
    "fp8-tensor": PackedWeightConfig("fp8-tensor", "fp8-tensor-static:0.02"),
    "fp8-block": PackedWeightConfig("fp8-128x128", "fp8-1x128"),
    "mxfp4-even": PackedWeightConfig("mxfp4-even", "mxfp4-even"),
    "mxfp8-both": PackedWeightConfig("mxfp8", "mxfp8"),
    "nvfp4-both": PackedWeightConfig("nvfp4-static:0.0009765625", "nvfp4-static:0.00390625"),
    "fouroversix": PackedWeightConfig("fouroversix-static:1.5"),
}
LAYER = "model.layers.1.mlp.down_proj"
MIXED = FqnToConfig(
    {
        r"re:.*\.mlp\..*": PackedWeightConfig("intx8-row", contract="dequantize"),
        "model.layers.0.self_attn.o_proj": None,
        "_default": PackedWeightConfig("intx4-g32", contract="dequantize"),
    }
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case, exported here and loaded there."""
    root = tmp_path_factory.mktemp("folders")
    cases: dict[str, Any] = {**dict.fromkeys(WEIGHT_ONLY), **WITH_ACTIVATIONS, "mixed": MIXED, "tied": "intx4-g128"}
    folders: list[Path] = []
    for name, config in cases.items():
        model = converted(config or name, tied=name == "tied")
        folders.append(root / name.replace(":", "-"))
        with pytest.warns() if name in ("int8", "fp8-row") else _silent():
            export(model, folders[-1])
        write_expected(model, Path(f"{folders[-1]}.pt"))
    folders.append(flipped(root / "intx4-g128", root / "one bit"))
    return load_elsewhere(folders)


def flipped(folder: Path, copied: Path) -> Path:
    """A copy of an exported folder in which one bit of one weight's codes is another."""
    shutil.copytree(folder, copied)
    shutil.copy(f"{folder}.pt", f"{copied}.pt")
    tensors = load_file(copied / "model.safetensors")
    tensors[f"{LAYER}.weight_packed"][3, 5] ^= 1 << 9
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


def _silent() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "mixed", "tied"])
def test_weight_only_logits_are_equal_elsewhere(loaded: dict[str, dict[str, Any]], name: str) -> None:
    found = loaded[name.replace(":", "-")]
    assert found == {"logits": True, "different": [], "layers": 13 if name == "mixed" else 14}


def test_one_wrong_bit_is_noticed_elsewhere(loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded["one bit"] == {"logits": False, "different": [LAYER], "layers": 14}


@pytest.mark.parametrize("name", WITH_ACTIVATIONS)
def test_dequantised_weights_are_equal_elsewhere(loaded: dict[str, dict[str, Any]], name: str) -> None:
    assert (loaded[name]["different"], loaded[name]["layers"]) == ([], 14)
