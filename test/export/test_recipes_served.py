"""Recipes by goal: prepare, train, convert, export, and the exported numbers are the trained ones; what a refusal of
export advises takes the layer, asked and not assumed, and trains.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support.export_cases import byte_level, converted, llama, load_elsewhere, packed, write_expected
from support.models import IDS, logits
from support.moe_models import model_of
from torchao.quantization import FqnToConfig
from transformers import AutoModelForCausalLM, StableLmConfig

from aoquant import (
    KVCacheConfig,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    explain,
    export,
    load_pretrained,
    quantize_,
    serving,
)
from aoquant.recipes import get_recipe

VLLM = ["vllm-w4a16-g128", "vllm-w4a16-g32", "vllm-fp8", "vllm-int8", "vllm-nvfp4", "vllm-mxfp4"]
GGUF = ["gguf-q4_0", "gguf-q8_0"]


def trained(name: str) -> Any:
    """A model after two steps towards a recipe, converted; converting changed nothing."""
    torch.manual_seed(0)
    model = llama()
    quantize_(model, get_recipe(name).prepare())
    if name == "vllm-nvfp4":
        calibrate(model, [IDS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        before = model(IDS).logits
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(IDS).logits, before)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folders = []
    for name in VLLM:
        model = trained(name)
        folders.append(export(model, tmp_path_factory.mktemp("out") / name))
        write_expected(model, Path(f"{folders[-1]}.pt"))
    return load_elsewhere(folders)


@pytest.mark.parametrize("name", VLLM)
@pytest.mark.filterwarnings("error")
def test_recipes_for_vllm(served: dict[str, dict[str, Any]], name: str) -> None:
    assert (served[name]["different"], served[name]["layers"]) == ([], 14)
    if "w4a16" in name:
        assert served[name]["logits"]


def test_calibrated_outer_scales_of_activations_survive_the_export(tmp_path: Path) -> None:
    """Calibrated on real inputs, whose extrema are no powers of two; both layouts, and plain nvfp4-static by one."""
    model = trained("vllm-nvfp4")
    again = load_pretrained(export(model, tmp_path / "out"))
    before = {name: w.activation for name, w in packed(model).items()}
    assert {name: w.activation for name, w in packed(again).items()} == before
    outer = {name: float(a.removeprefix("nvfp4-static:")) for name, a in before.items()}
    assert len(set(outer.values())) > 1 and all(math.frexp(t)[0] == 0.5 for t in outer.values())
    export(model, tmp_path / "modelopt", "modelopt")
    written = load_file(tmp_path / "modelopt" / "model.safetensors")
    assert {name: written[f"{name}.input_scale"].item() for name in outer} == outer
    assert torch.equal(logits(again), logits(model))


def test_an_outer_scale_that_its_stored_reciprocal_does_not_give_back_is_refused(tmp_path: Path) -> None:
    lost, kept = 0.0002325148816453293, 0.00030517578125
    model = converted(PackedWeightConfig("nvfp4-static:0.0009765625", f"nvfp4-static:{lost}"))
    with pytest.raises(ValueError, match=r"0\.000232515.*format='modelopt'"):
        export(model, tmp_path / "out")
    export(model, tmp_path / "modelopt", "modelopt")
    export(converted(PackedWeightConfig("nvfp4-static:0.0009765625", f"nvfp4-static:{kept}")), tmp_path / "kept")


@pytest.mark.parametrize("name", GGUF)
@pytest.mark.filterwarnings("error::UserWarning")
def test_recipes_for_llama_cpp(name: str, tmp_path: Path) -> None:
    model = trained(name)
    tensors = {t.name: t for t in gguf.GGUFReader(export(model, tmp_path / "out", "gguf", byte_level())).tensors}
    found = tensors["blk.1.ffn_down.weight"]
    values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type))
    assert torch.equal(values, packed(model)["model.layers.1.mlp.down_proj"].dequantize(torch.float32))


@pytest.mark.parametrize(
    ("recipe", "engine", "gpu", "said"),
    [
        ("vllm-nvfp4", "vllm", "h100", "leaves NVFP4 layers' activations in bfloat16"),
        ("vllm-nvfp4", "vllm", "b200", None),
        ("vllm-mxfp4", "vllm", "b200", None),
        ("mxfp4-weight", "vllm", "b200", "even where the checkpoint says weights only"),
        ("mxfp4-weight", "vllm", "h100", None),
        ("mxfp4", "vllm", "b200", "by the rule 'even'"),
        ("vllm-mxfp4", "vllm", "h100", "train the recipe mxfp4-weight"),
        ("nvfp4", "vllm", "b200", "cannot hold nvfp4 with nvfp4-row activations.*the recipe vllm-nvfp4"),
        ("nvfp4-weight", "vllm", None, "no power of two.*the recipe vllm-nvfp4-weight"),
        ("int4-g128", "vllm", "h100", "cannot hold int4-g128: .*Instead: train the recipe intx4-g128-asym/ "),
        ("nvfp4-wush", "vllm", "b200", "stands behind a transform"),
        ("fp8-block", "vllm", "h100", "scales 128 activations by another formula"),
        ("fp8", "vllm", "h100", "as fp8-row-vllm, trained as fp8-row"),
        ("vllm-fp8", "vllm", "h100", None),
        ("vllm-int8", "vllm", None, None),
        ("vllm-int8", "vllm", "b200", "no int8 kernel for b200: train the recipe vllm-fp8"),
        ("int3-g32", "vllm", "h100", "packed integers of 4 and 8 bits, of 3 bits in its newest versions"),
        ("vllm-w4a16-g128", "vllm", "h100", None),
        ("gguf-q4_0", "llama.cpp", "cpu", None),
        ("gguf-q4_0", "llama.cpp", "cuda", "half away from zero"),
        ("int4-g32", "llama.cpp", "cpu", "has no type for int4-g32"),
    ],
)
def test_what_an_engine_computes_otherwise_is_said(recipe: str, engine: str, gpu: str | None, said: str | None) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        config = get_recipe(recipe).prepare(engine=engine, gpu=gpu)
    messages = [str(w.message) for w in caught]
    assert any(re.search(said, m) for m in messages) if said else messages == []
    layer = torch.nn.Sequential(torch.nn.Linear(128, 128, dtype=torch.bfloat16))
    with warnings.catch_warnings(action="ignore"):
        quantize_(layer, config)
    routes = explain(layer[0], engine=engine, gpu=gpu)
    assert {*messages} <= {*routes.served} and all(f"served: {m}" in str(routes) for m in messages)


def test_what_an_engine_cannot_hold_of_experts_is_said() -> None:
    recipe, model = get_recipe("int4-g32-experts"), model_of("mixtral")
    with pytest.warns(match="cannot hold int4-g32") as caught:
        quantize_(model, recipe.prepare(engine="vllm"))
    experts = model.model.layers[0].mlp.experts
    said = explain(experts, engine="vllm").served
    assert said and {*said} <= {str(w.message) for w in caught}


# (engine, weight/activation, contract): how many differences on any GPU and on each of `serving.ENGINES`
COUNTED = {
    ("vllm", "nvfp4-pow2/nvfp4-pow2", "aoquant"): (0, 1, 1, 0),
    ("vllm", "nvfp4-pow2/", "dequantize"): (0, 0, 0, 0),
    ("vllm", "mxfp4-even/mxfp4-even", "aoquant"): (0, 1, 1, 0),
    ("vllm", "mxfp4-even/", "dequantize"): (0, 0, 0, 1),
    ("vllm", "mxfp4/mxfp4", "aoquant"): (1, 1, 1, 1),
    ("vllm", "nvfp4/mxfp4-even", "aoquant"): (0, 1, 1, 0),
    ("vllm", "fp8-row/", "dequantize"): (0, 0, 0, 0),
    ("vllm", "fp8-row/fp8-row", "aoquant"): (1, 1, 1, 1),
    **dict.fromkeys((("vllm", f"fp8-row/{x}", "aoquant") for x in serving.VLLM_FP8), (0, 0, 0, 0)),
    ("vllm", "fp8-128x128/fp8-1x128", "aoquant"): (1, 1, 1, 1),
    **dict.fromkeys((("vllm", f"int8-row/int8-row{x}", "aoquant") for x in ("", "-native", "-asym")), (1, 1, 1, 2)),
    **dict.fromkeys((("vllm", f"int8-row/int8-row-vllm{x}", "aoquant") for x in ("", "-reciprocal")), (0, 0, 0, 1)),
    ("vllm", "intx4-g32/", "dequantize"): (0, 0, 0, 0),
    ("vllm", "intx8-g32/", "dequantize"): (0, 0, 0, 0),
    ("vllm", "intx3-g32/", "dequantize"): (1, 1, 1, 1),
    ("vllm", "intx4-g32/", "aoquant"): (1, 1, 1, 1),
    ("vllm", "intx4-g128-asym/", "dequantize"): (0, 1, 1, 0),
    ("vllm", "intx3-g32-asym/int8-row-vllm", "aoquant"): (0, 0, 0, 1),
    **dict.fromkeys(
        (("llama.cpp", f"{w}/q8_0-x86", "ggml") for w in ("q4_0", "q4_1", "q8_0", "mxfp4", "mxfp4-even", "nvfp4")),
        (0, 0, 1),
    ),
    ("llama.cpp", "q4_0/", "aoquant"): (1, 1, 1),
    ("llama.cpp", "mxfp8/q8_0-x86", "aoquant"): (1, 1, 2),
    ("llama.cpp", "intx4-g32/", "aoquant"): (2, 2, 2),
}


@pytest.mark.parametrize(("engine", "formats", "contract"), COUNTED)
def test_every_difference_is_said_on_its_gpus_alone(engine: str, formats: str, contract: str) -> None:
    weight, _, activation = formats.partition("/")
    recipe = PackedWeightConfig(weight, activation or None, contract).recipe()
    said = [serving.differences(recipe, engine, gpu) for gpu in (None, *serving.ENGINES[engine])]
    assert tuple(map(len, said)) == COUNTED[engine, formats, contract]
    assert said[1:] == [serving.differences(recipe, engine, gpu.upper()) for gpu in serving.ENGINES[engine]]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("weight", "gpus"), [("nvfp4", True), ("mxfp4", True), ("int8-row", False)])
def test_explain_says_what_a_gpu_changes_where_no_engine_is_asked(weight: str, gpus: bool, experts: bool) -> None:
    model = model_of("mixtral") if experts else torch.nn.Sequential(torch.nn.Linear(64, 64))
    name = "model.layers.0.mlp.experts" if experts else "0"
    config = PackedWeightConfig(weight)
    quantize_(model, FqnToConfig({f"re:{name}.*": config}) if experts else config)
    served = explain(model.get_submodule(name)).served
    assert len(served) == gpus * (2 if experts else 1)
    assert all(("Hopper" in said, "MXFP4" in said) == (True, weight == "mxfp4") for said in served)


def test_differences_are_said_once_and_of_our_configs_that_are_prepared() -> None:
    layers = FqnToConfig({"a": "vllm-mxfp4", "b": "vllm-mxfp4", "c": None, "d": "torchao-int8"})
    counts = []
    for base, step in (
        (layers, "prepare"),
        (layers, "convert"),
        ("torchao-int8", "prepare"),
        (KVCacheConfig("fp8"), "prepare"),
    ):
        with warnings.catch_warnings(record=True, action="always") as caught:
            QATConfig(base, step=step, engine="vllm", gpu="h100")
        counts.append(len(caught))
    assert counts == [1, 0, 0, 0]


BASES = {
    "siblings of fp8-tensor": (PackedWeightConfig("fp8-tensor", "fp8-tensor-static"), {}),
    "fp8-row, one activation scale": (PackedWeightConfig("fp8-row", "fp8-tensor-static"), {}),
    "int8-static": ("int8-static", {}),
    "int8-static, learned": ("int8-static", {"scales": "learned"}),
    "vllm-nvfp4-weight": ("vllm-nvfp4-weight", {}),
    "vllm-nvfp4-weight, dynamic": ("vllm-nvfp4-weight", {"scales": "dynamic"}),
    "int8 per tensor": (PackedWeightConfig("int8-tensor"), {}),
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.filterwarnings("ignore:.*(vLLM quantises|vLLM rounds)")
def test_prepare_foresees_what_export_refuses(name: str, tmp_path: Path) -> None:
    """The warning comes exactly where neither of vLLM's layouts takes the trained model."""
    base, options = BASES[name]
    with warnings.catch_warnings(record=True, action="always") as caught:
        config = QATConfig(base, engine="vllm", **options)
    warned = any("vLLM's formats cannot hold" in str(w.message) for w in caught)
    model = llama()
    for layer in model.model.layers:  # siblings that differ, as trained ones do
        layer.self_attn.k_proj.weight.data *= 8
    quantize_(model, config)
    if any(key.endswith(("input_scale", "input_outer")) for key in model.state_dict()):
        calibrate(model, [IDS])
    if config.scales == "learned":
        model.model.layers[0].self_attn.q_proj.input_scale.data *= 2
    quantize_(model, QATConfig(step="convert"))
    taken = 0
    for layout in ("compressed-tensors", "modelopt"):
        try:
            export(model, tmp_path / layout, layout)
            taken += 1
        except ValueError:
            pass
    assert warned == (taken == 0)


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


def test_formats_are_advised_for_the_models_that_they_hold(tmp_path: Path) -> None:
    """llama.cpp's architectures are asked for gguf alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    made = StableLmConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    for weight, format, others in (("fp8-row", "gguf", {"compressed-tensors"}), ("q4_0", "compressed-tensors", set())):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
        quantize_(model, PackedWeightConfig(weight, contract="dequantize"))
        with pytest.raises(ValueError, match="StableLmForCausalLM" if format == "gguf" else "do not fit") as caught:
            export(model, tmp_path / "out", format, byte_level())
        assert set(re.findall(r"format='([\w-]+)'", str(caught.value))) == others
