"""Reading compressed-tensors folders: the codes that were stored, as packed tensors, and as prepared layers that start
from them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from safetensors.torch import load_file, save_file
from support.export_cases import converted, llama, packed
from support.models import IDS, logits
from torch import nn

from aoquant import AoquantWarning, PackedWeightConfig, export, load_pretrained, unpack_
from aoquant.export import reading
from aoquant.export.compressed import store
from aoquant.export.targets import Stored
from aoquant.formats import get_format, get_operand
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor, same_bits

PAIRS = [
    ("intx4-g128", None),
    ("intx4-g32-asym", None),
    ("intx3-g32", None),
    ("intx8-row", None),
    ("int8-row", "int8-row-vllm"),
    ("fp8-row", "fp8-row-vllm"),
    ("fp8-tensor", "fp8-tensor-static:0.015625"),
    ("fp8-128x128", "fp8-1x128"),
    ("mxfp4-even", "mxfp4-even"),
    ("mxfp8", "mxfp8"),
    ("nvfp4-static:0.0009765625", "nvfp4-static:0.00390625"),
]


@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_reading_gives_the_same_packed_tensors(weight: str, activation: str | None, tmp_path: Path) -> None:
    contract = "aoquant" if activation else "dequantize"
    model = converted(PackedWeightConfig(weight, activation, contract), tied=weight == "intx4-g128")
    again = load_pretrained(export(model, tmp_path / "out"))
    assert packed(again).keys() == packed(model).keys()
    for name, w in packed(again).items():
        before = packed(model)[name]
        if weight.startswith("nvfp4"):  # whose outer scale is read as one of this tensor's own
            assert (w.format, w.activation) == ("nvfp4", before.activation)
            assert torch.equal(w.dequantize(), before.dequantize())
        else:
            assert same_bits(w, before)
    assert torch.equal(logits(again), logits(model))


def stored(weight: str, activation: str | None = None, k: int = 96, n: int = 64) -> tuple[PackedTensor, Stored]:
    """A weight (n, k), and how compressed-tensors stores it."""
    format, x = get_format(weight), get_operand(activation) if activation else None
    recipe = LinearRecipe(x, format, "aoquant" if activation else "dequantize")
    p = PackedTensor.from_encoded(format.encode(torch.randn(n, k).bfloat16()), recipe, torch.bfloat16)
    return p, store(p)


def read_back(scheme: Any, parts: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> PackedTensor:
    return reading._packed("layer", scheme, parts, dtype)


@pytest.mark.parametrize("n", [64, 4])  # 4: their zero points take one word
@pytest.mark.parametrize("zero", ["", "-asym"])
@pytest.mark.parametrize("per", ["row", "g32"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_every_width_are_read_as_they_were_stored(bits: int, per: str, zero: str, n: int) -> None:
    p, made = stored(f"intx{bits}-{per}{zero}", k=98 if per == "row" else 96, n=n)  # 98: the last word is not full
    again = read_back(made.scheme, made.tensors)
    assert same_bits(again, p) and again.qdata.is_contiguous()


@pytest.mark.parametrize("weight", ["fp8-row", "fp8-tensor", "fp8-32x32", "mxfp4-even", "mxfp8", "nvfp4-pow2"])
def test_floats_are_read_as_they_were_stored(weight: str) -> None:
    p, made = stored(weight)
    again = read_back(made.scheme, made.tensors)
    assert torch.equal(again.dequantize(), p.dequantize())
    assert again.qdata.dtype == p.qdata.dtype and torch.equal(again.qdata.view(torch.uint8), p.qdata.view(torch.uint8))


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("intx4-g32", "int8-row-vllm"),
        ("intx4-g32", "fp8-row-vllm"),
        ("intx8-row-asym", "int8-row-vllm"),
        ("intx8-g32-asym", "int8-row-vllm"),
        ("int8-row", "int8-tensor-static:0.5"),
        ("fp8-row", "fp8-tensor-static:0.5"),
        ("fp8-32x32", "fp8-1x128"),
        ("mxfp4-even", "mxfp8"),
        ("mxfp8", "mxfp4-even"),
        ("nvfp4-pow2", "nvfp4-static:0.25"),
    ],
)
def test_layers_with_activations_are_read_as_they_were_stored(weight: str, activation: str) -> None:
    p, made = stored(weight, activation, 128)
    again = read_back(made.scheme, made.tensors)
    assert again.activation == p.activation and torch.equal(again.dequantize(), p.dequantize())


STATIC, TOKEN = {"strategy": "tensor", "dynamic": False}, {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 8, "type": "int", **STATIC},  # without a stored scale
        {"num_bits": 4, "type": "int", **STATIC},
        {"num_bits": 8, "type": "int", **TOKEN, "symmetric": False},
        {"num_bits": 4, "type": "int", **TOKEN},
        {"num_bits": 4, "type": "float", **TOKEN},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64, "dynamic": True},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "dynamic": True},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ],
)
def test_activations_of_no_format_are_refused(inputs: dict[str, Any]) -> None:
    _, made = stored("intx4-g32")
    scheme = made.scheme.model_copy(update={"input_activations": QuantizationArgs(**inputs)})
    with pytest.raises(ValueError, match=f"layer: .*activations of {inputs['num_bits']} bits"):
        read_back(scheme, made.tensors)


def changed(name: str, change: Any) -> Any:
    return lambda parts: {**parts, name: change(parts[name])}


@pytest.mark.parametrize(
    ("weight", "change", "said"),
    [
        ("intx4-g32", changed("weight_packed", lambda t: t[:, 1:]), "weight_packed"),
        ("intx4-g32", changed("weight_packed", lambda t: t[1:]), "weight_packed"),
        ("intx4-g32", changed("weight_packed", lambda t: t.long()), "weight_packed"),
        ("intx4-g32", changed("weight_shape", lambda t: t * 2), "weight_packed"),
        ("intx4-g32-asym", changed("weight_zero_point", lambda t: torch.cat((t, t))), "weight_zero_point"),
        ("intx4-g32", changed("weight_scale", lambda t: t.float() * 1.001), None),
        ("intx4-g32", changed("weight_scale", lambda t: (t.float() * 1.001).half()), "scales"),
        ("intx4-g32", lambda parts: {**parts, "weight_g_idx": torch.arange(96)}, "weight_g_idx"),
    ],
)
def test_parts_that_do_not_fit_their_scheme_are_refused(weight: str, change: Any, said: str | None) -> None:
    _, made = stored(weight)
    if said is None:  # float32 scales stay what they are
        parts = change(made.tensors)
        scale = read_back(made.scheme, parts).scale
        assert scale is not None and torch.equal(scale, parts["weight_scale"])
    else:
        with pytest.raises(ValueError, match=f"layer: .*{said}"):
            read_back(made.scheme, change(made.tensors))


def test_plain_integers_are_within_their_bits() -> None:
    """Codes that no packing bounds, as int-quantized stores them: num_bits says how large they may be."""
    args = QuantizationArgs(num_bits=4, type="int", strategy="channel", symmetric=True)
    scheme, scale = QuantizationScheme(targets=["Linear"], weights=args), torch.tensor([[0.5], [2.0]])
    codes = torch.tensor([[7, -8] * 16, [0, -1] * 16], dtype=torch.int8)
    read = read_back(scheme, {"weight": codes, "weight_scale": scale}, torch.float32)
    assert read.format == "intx4-row" and torch.equal(read.dequantize(), codes * scale)
    for wrong in (codes.where(codes != 7, 8), codes.where(codes != -8, -9), codes.int()):
        with pytest.raises(ValueError, match="4 bits"):
            read_back(scheme, {"weight": wrong, "weight_scale": scale}, torch.float32)


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "MXFP4A16"])
def test_a_folder_that_compressed_tensors_made(preset: str, tmp_path: Path) -> None:
    """Its own min-max scales and its own compressor: what llm-compressor publishes. Values and training start equal its
    values.
    """
    model = llama()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    assert isinstance(scheme, QuantizationScheme) and scheme.weights is not None
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
            _observe(module, scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "out")
    compressor.update_config(tmp_path / "out")
    compressor.decompress_model(model)
    # bfloat16 has fewer steps than int8 has codes: such a model is trained further in float32
    read = load_pretrained(tmp_path / "out", dtype=torch.float32 if preset == "W8A8" else torch.bfloat16)
    for name, w in packed(read).items():
        assert torch.equal(w.dequantize(torch.bfloat16), model.get_submodule(name).weight), name
    assert len(packed(read)) == 14
    with torch.no_grad():
        logits = read(IDS).logits
        unpack_(read)
        assert torch.equal(read(IDS).logits, logits)


def _observe(module: nn.Module, scheme: QuantizationScheme) -> None:
    """Min-max scales, by compressed-tensors' own arithmetic."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    assert args is not None and isinstance(module.weight, torch.Tensor)
    group = args.group_size or module.weight.shape[1]
    blocks = module.weight.detach().float().unflatten(1, (-1, group))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)  # type: ignore[union-attr]
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)  # type: ignore[union-attr]


def test_what_no_format_equals_is_refused(tmp_path: Path) -> None:
    out = export(converted("intx4-g128"), tmp_path / "out")
    told = json.loads((out / "config.json").read_text())
    told["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 4, "type": "int", "strategy": "token", "dynamic": True,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(told))
    for name, options in (
        (r"config\.json", {}),
        ("q_proj: ", {"verify_checksums": False}),
        ("device_map='auto'", {"device_map": "auto"}),
    ):
        with pytest.raises(ValueError, match=name):
            load_pretrained(out, **options)  # type: ignore[arg-type]


_HADAMARD = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_DENSE = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured", "targets": [], "ignore": []}
_EMPTY = [None, {}, [], {"config_groups": {}}, _DENSE]


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without checksums, as other libraries write them."""
    folder = export(converted("intx4-g128"), tmp_path_factory.mktemp("foreign") / "out")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    for path in folder.glob("aoquant*"):
        path.unlink()
    return folder


@pytest.fixture
def told(unmarked: Path) -> Any:
    """Write fields into the folder's quantization_config, for one test."""
    path = unmarked / "config.json"
    before = path.read_text()

    def tell(**fields: Any) -> Path:
        config = json.loads(before)
        config["quantization_config"] |= fields
        path.write_text(json.dumps(config))
        return unmarked

    yield tell
    path.write_text(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparsity_config", {**_DENSE, "format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("sparsity_config", {"format": "sparse-bitmask"}),
        ("sparsity_config", "sparse-bitmask"),
        ("transform_config", {"config_groups": {"R1": _HADAMARD}}),
        ("moe_sparsity_config", {"method": "prune", "num_experts": [None, 2]}),
    ],
)
def test_a_field_that_changes_the_weights_is_refused(field: str, value: Any, told: Any) -> None:
    with pytest.raises(ValueError, match=rf"config.json: .*{field}"):
        load_pretrained(told(**{field: value}))


def test_a_group_without_weights_is_refused(told: Any) -> None:
    groups = json.loads((told() / "config.json").read_text())["quantization_config"]["config_groups"]
    attention = {"targets": ["LlamaAttention"], "input_activations": _INT8}
    with pytest.raises(ValueError, match="LlamaAttention"):
        load_pretrained(told(config_groups={**groups, "attention": attention}))


def test_empty_fields_pass_silently(told: Any) -> None:
    with warnings.catch_warnings(action="error", category=AoquantWarning):
        for empty in _EMPTY:
            given = {"sparsity_config": empty, "transform_config": empty}
            assert len(packed(load_pretrained(told(**given, kv_cache_scheme=None)))) == 14


@pytest.mark.parametrize("kind", ["float", "int"])
def test_a_quantised_cache_is_computed_or_warned_of(kind: str, told: Any) -> None:
    folder = told(kv_cache_scheme={"num_bits": 8, "type": kind, "strategy": "tensor", "symmetric": True})
    file = folder / "model.safetensors"
    before = load_file(file)
    scales = {f"model.layers.0.self_attn.{of}_scale": torch.full((1,), 0.25) for of in "kv"}
    save_file(before | scales, file, {"format": "pt"})
    if kind == "int":
        with pytest.warns(AoquantWarning, match=r"config.json: .*kv_cache_scheme"):
            assert len(packed(load_pretrained(folder))) == 14
    else:
        loaded = load_pretrained(folder)
        attention = loaded.model.layers[0].self_attn
        assert len(packed(loaded)) == 14 and attention.k_scale.tolist() == attention.v_scale.tolist() == [0.25]
        assert loaded(torch.ones(1, 3, dtype=torch.long)).cache.layers[0].keys.dtype == torch.uint8
    save_file(before, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("where", "value", "name"),
    [
        ("targets", ["re:("], r"config\.json"),
        ("ignore", ["re:("], r"config\.json"),
        ("output_activations", {**_INT8, "symmetric": True}, "output_activations"),
    ],
)
def test_patterns_that_are_none_and_quantised_outputs_are_refused(where: str, value: Any, name: str, told: Any) -> None:
    if where == "ignore":
        folder = told(ignore=value)
    else:
        groups = json.loads((told() / "config.json").read_text())["quantization_config"]["config_groups"]
        folder = told(config_groups={"group_0": {**groups["group_0"], where: value}})
    with pytest.raises(ValueError, match=name):
        load_pretrained(folder)
