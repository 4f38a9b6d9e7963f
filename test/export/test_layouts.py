"""Bytes: every scheme against compressed-tensors' own compressors, and ModelOpt's layout tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from safetensors.torch import load_file
from support.export_cases import converted, packed, told
from torchao.quantization import FqnToConfig

from aoquant import PackedWeightConfig, export
from aoquant.export.compressed import store
from aoquant.formats import get_format
from aoquant.layers.recipe import LinearRecipe
from aoquant.tensor import PackedTensor

PAIRS = [
    ("intx4-g128", ""),
    ("intx4-g32-asym", ""),
    ("intx3-g32", ""),
    ("intx8-row", ""),
    ("int8-row", "int8-row-vllm"),
    ("intx4-g128", "int8-row-vllm"),
    ("fp8-row", ""),
    ("fp8-row", "fp8-row-vllm"),
    ("fp8-tensor", "fp8-tensor-static:0.02"),
    ("fp8-128x128", "fp8-1x128"),
    ("mxfp4-even", "mxfp4-even"),
    ("mxfp8", "mxfp8"),
    ("nvfp4-pow2", ""),
    ("nvfp4-pow2", "nvfp4-static:0.00390625"),
]


@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_bytes_are_compressed_tensors_own(weight: str, activation: str) -> None:
    """Its compressor, given the values and our scales, packs what we packed."""
    torch.manual_seed(0)
    format = get_format(weight)
    recipe = LinearRecipe(get_format(activation) if activation else None, format)
    p = PackedTensor.from_encoded(format.encode(torch.randn(256, 256)), recipe, torch.float32)
    ours = store(p)
    state = {name: t for name, t in ours.tensors.items() if name not in ("weight", "weight_packed", "weight_shape")}
    if "zero" in "".join(state):
        assert p.zero_point is not None
        state["weight_zero_point"] = p.zero_point
    if ours.scheme.format in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        state["weight_scale"] = p.scale.float()  # type: ignore[union-attr]
    if ours.scheme.format == "nvfp4-pack-quantized":
        state["weight_scale"] = state["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(ours.scheme.format)
    theirs = compressor.compress({**state, "weight": p.dequantize(torch.float32)}, ours.scheme)
    assert theirs.keys() == ours.tensors.keys()
    for name, t in theirs.items():
        assert (t.dtype, t.shape) == (ours.tensors[name].dtype, ours.tensors[name].shape), name
        if ours.scheme.format in ("mxfp4-pack-quantized", "nvfp4-pack-quantized") and name == "weight_packed":
            different = t != ours.tensors[name]  # a -0.0 is a 0.0 for it
            assert {int(x) for x in ((t ^ ours.tensors[name])[different]).unique()} <= {0x08, 0x80, 0x88}
        else:
            assert torch.equal(t.view(torch.uint8), ours.tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        (PackedWeightConfig("nvfp4-static:0.0009"), "W4A16_NVFP4"),
        (PackedWeightConfig("nvfp4-static:0.0009", "nvfp4-static:0.003"), "NVFP4"),
        (PackedWeightConfig("fp8-row", "fp8-row-vllm"), "FP8_PER_CHANNEL_PER_TOKEN"),
        (PackedWeightConfig("fp8-tensor", "fp8-tensor-static:0.02"), "FP8"),
    ],
)
def test_modelopt(config: PackedWeightConfig, algorithm: str, tmp_path: Path) -> None:
    model = converted(config)
    out = export(model, tmp_path / "out", "modelopt")
    said, also = told(out), json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_method"], said["quant_algo"], also["quant_algo"]) == ("modelopt", algorithm, algorithm)
    assert said["exclude_modules"] == also["exclude_modules"] == ["lm_head"]
    stored = load_file(out / "model.safetensors")
    for name, w in packed(model).items():
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert torch.equal(codes.view(torch.uint8), w.qdata.view(torch.uint8))
        assert w.scale is not None
        assert torch.equal(scale.reshape(-1).view(torch.uint8), w.scale.reshape(-1).view(torch.uint8))
        if "NVFP4" in algorithm:
            assert w.per_tensor_scale is not None
            assert torch.equal(stored[f"{name}.weight_scale_2"], w.per_tensor_scale[0, 0])
        inputs = {"NVFP4": 0.003, "FP8": 0.02}.get(algorithm)
        assert (f"{name}.input_scale" in stored) == (inputs is not None)
        if inputs is not None:
            assert stored[f"{name}.input_scale"].item() == torch.tensor(inputs).item()


def test_modelopt_refuses_two_algorithms_and_other_formats(tmp_path: Path) -> None:
    mixed = FqnToConfig(
        {
            r"re:.*\.mlp\..*": PackedWeightConfig("fp8-row", "fp8-row-vllm"),
            "_default": PackedWeightConfig("nvfp4-static:0.0009"),
        }
    )
    with pytest.raises(ValueError, match=r"q_proj"):
        export(converted(mixed), tmp_path / "out", "modelopt")
    with pytest.raises(ValueError, match="intx4-g32"):
        export(converted("intx4-g32"), tmp_path / "out", "modelopt")
    assert list(tmp_path.iterdir()) == []
