"""Bytes: every scheme against compressed-tensors' own compressors, and ModelOpt's layout tensor by tensor; and
transformers loads the trained numbers in a process that has never heard of aoquant.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from safetensors.torch import load_file, save_file
from support.export_cases import converted, load_elsewhere, packed, told, write_expected
from torchao.quantization import FqnToConfig

from aoquant import PackedWeightConfig, export
from aoquant.export.compressed import store
from aoquant.export.targets import Stored, Unfit, power_of_two
from aoquant.formats import get_format
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor

PAIRS = [
    ("intx4-g128", ""),
    ("intx4-g32-asym", ""),
    ("intx3-g32", ""),
    ("intx8-row", ""),
    ("int8-row", "int8-row-vllm"),
    ("intx4-g128", "int8-row-vllm"),
    ("intx8-row-asym", "int8-row-vllm"),
    ("fp8-row", ""),
    ("fp8-row", "fp8-row-vllm"),
    ("fp8-tensor", "fp8-tensor-static:0.02"),
    ("fp8-128x128", "fp8-1x128"),
    ("mxfp4-even", "mxfp4-even"),
    ("mxfp8", "mxfp8"),
    ("nvfp4-pow2", ""),
    ("nvfp4-pow2", "nvfp4-static:0.00390625"),
]


WEIGHTS = PackedWeightConfig("intx4-g32", contract="dequantize")
WEIGHTS_ASYM = PackedWeightConfig("intx4-g32-asym", contract="dequantize")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        *(([0.5, 2.0**e, 1.0], -126 <= e <= 126) for e in (-149, -127, -126, 126, 127)),
        *((values, False) for values in ([1.0, 3.0], [-2.0], [0.0], [torch.inf], [torch.nan])),
    ],
)
def test_powers_of_two_are_told_apart(values: list[float], found: bool) -> None:
    assert power_of_two(torch.tensor(values)) == found


def test_static_inputs_are_stored_by_their_scale() -> None:
    """TransformerEngine's formats hold its reciprocal, and e5m2 codes are none of the layout's."""
    format = get_format("fp8-tensor")

    def stored(activation: str) -> Stored:
        recipe = LinearRecipe(get_format(activation), format)
        return store(PackedTensor.from_encoded(format.encode(torch.randn(32, 32)), recipe, torch.float32))

    for activation in ("fp8-tensor-static:0.02", "te-fp8-tensor-static:50.0"):
        assert stored(activation).tensors["input_scale"].item() == pytest.approx(0.02)
    with pytest.raises(Unfit, match="fp8-e5m2-tensor"):
        stored("fp8-e5m2-tensor-static:0.02")


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
    ("config", "dtype"),
    [
        (PackedWeightConfig("int8-row", "int8-row-vllm"), torch.float32),  # as engines hold them beside int8 inputs
        (PackedWeightConfig("int8-row"), torch.bfloat16),  # of the values that its float32 scales have
        (PackedWeightConfig("intx4-g32", contract="dequantize"), torch.bfloat16),
    ],
)
def test_scales_of_integers_are_stored_in_the_dtype_that_readers_hold(
    config: PackedWeightConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = load_file(export(converted(config), tmp_path / "out", "compressed-tensors") / "model.safetensors")
    assert {t.dtype for name, t in stored.items() if name.endswith("weight_scale")} == {dtype}


def test_scales_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"self_attn\.q_proj"):
        export(converted(PackedWeightConfig("int8-row-vllm")), tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


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
    facts = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    facts |= {"group_size": 16} if "NVFP4" in algorithm else {}
    assert also == facts and said | facts | {"ignore": ["lm_head"]} == said
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


@pytest.mark.parametrize(
    ("config", "layout", "groups", "dequantize"),
    [
        ("intx4-g32", "pack-quantized", [["Linear"]], None),
        ("intx4-g32-asym", "pack-quantized", [["Linear"]], True),
        ("fp8-row", "naive-quantized", [["Linear"]], None),
        (
            FqnToConfig(
                {"re:.*o_proj": WEIGHTS_ASYM, "re:.*[qk]_proj": None, "re:.*v_proj": None, "_default": WEIGHTS}
            ),
            "pack-quantized",
            [[f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)], None],
            None,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_config_of_compressed_tensors(
    config: Any, layout: str, groups: list[Any], dequantize: bool | None, tmp_path: Path
) -> None:
    said = told(export(converted(config), tmp_path / "out"))
    assert (said["quant_method"], said["quantization_status"]) == ("compressed-tensors", "compressed")
    assert said["format"] == layout and said.get("dequantize") == dequantize
    assert said["version"] == version("compressed-tensors")
    targets = [group["targets"] for group in said["config_groups"].values()]
    assert len(targets) == len(groups) and all(wanted in (None, t) for t, wanted in zip(targets, groups, strict=True))
    left = [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkv"] if len(groups) > 1 else []
    assert sorted(said["ignore"]) == sorted(["lm_head", *left])


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
    "nvfp4-gate-up": FqnToConfig(  # whose inputs stay in bfloat16
        {
            r"re:.*(gate|up)_proj": PackedWeightConfig("nvfp4-static:0.0009765625"),
            "_default": PackedWeightConfig("nvfp4-static:0.0009765625", "nvfp4-static:0.00390625"),
        }
    ),
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
        with pytest.warns() if name in ("int8", "fp8-row") else nullcontext():
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


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "mixed", "tied"])
def test_weight_only_logits_are_equal_elsewhere(loaded: dict[str, dict[str, Any]], name: str) -> None:
    found = loaded[name.replace(":", "-")]
    assert found == {"logits": True, "different": [], "layers": 13 if name == "mixed" else 14}


def test_one_wrong_bit_is_noticed_elsewhere(loaded: dict[str, dict[str, Any]]) -> None:
    assert loaded["one bit"] == {"logits": False, "different": [LAYER], "layers": 14}


@pytest.mark.parametrize("name", WITH_ACTIVATIONS)
def test_dequantised_weights_are_equal_elsewhere(loaded: dict[str, dict[str, Any]], name: str) -> None:
    assert (loaded[name]["different"], loaded[name]["layers"]) == ([], 14)
