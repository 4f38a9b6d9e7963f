"""Stacked experts in other libraries' folders: each expert's matrices out, packed stacks in, nothing rounded."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from support import export_cases
from support.export_cases import told
from support.moe_models import IDS, model_of, write_mxfp4
from torch import Tensor
from torchao.quantization import FqnToConfig
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, GptOssForCausalLM

from aoquant import (
    PackedWeightConfig,
    QATConfig,
    export,
    load_pretrained,
    quantize_,
    refresh_,
    save_pretrained,
    unpack_,
)
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts
from aoquant.export.reading import joined_rows
from aoquant.linear.tensor import PackedTensor, same_bits
from aoquant.report import verify


def only_experts(weight: str, activation: str | None = None) -> FqnToConfig:
    config = PackedWeightConfig(weight, activation, "aoquant" if activation else "dequantize")
    return FqnToConfig({r"re:.*\.experts": config})


def converted(family: str, config: Any) -> Any:
    model = model_of(family).eval()
    quantize_(model, config)
    return model


def stacks(model: Any) -> dict[str, Any]:
    return {n: p.data for n, p in model.named_parameters() if isinstance(p.data, PackedExperts)}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


# ---- out and in again

CASES = [
    ("mixtral", "intx4-g32", None),
    ("deepseek-v3", "mxfp4-even", "mxfp4-even"),
    ("qwen3-moe", "int8-row", "int8-row-vllm"),
    ("qwen3-moe", "nvfp4-static:0.0009765625", None),
]


@pytest.mark.parametrize(("family", "weight", "activation"), CASES)
def test_exported_experts_come_back_bit_equal(family: str, weight: str, activation: str | None, tmp_path: Path) -> None:
    model = converted(family, only_experts(weight, activation))
    again = load_pretrained(export(model, tmp_path / "out"))
    assert stacks(again).keys() == stacks(model).keys() and len(stacks(model)) >= 2
    for name, w in stacks(again).items():
        assert torch.equal(w.dequantize(), stacks(model)[name].dequantize()), name
        assert same_bits(w, stacks(model)[name]) or weight.startswith("nvfp4")
    assert torch.equal(logits(again), logits(model))
    save_pretrained(model, tmp_path / "saved")  # the folder, read one expert at a time, exports to the same files
    export(tmp_path / "saved", tmp_path / "streamed")
    assert told(tmp_path / "out") == told(tmp_path / "streamed")
    a, b = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "streamed"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_names_and_ignored_routers_are_those_of_float_checkpoints(tmp_path: Path) -> None:
    model = converted("mixtral", only_experts("intx4-g32"))
    out = export(model, tmp_path / "out")
    names = {n for n in load_file(out / "model.safetensors") if ".experts.7." in n and "layers.1" in n}
    base = "model.layers.1.block_sparse_moe"
    parts = ("weight_packed", "weight_scale", "weight_shape")
    assert names == {f"{base}.experts.7.{w}.{part}" for w in ("w1", "w2", "w3") for part in parts}
    assert {f"{base}.gate", "lm_head"} <= set(told(out)["ignore"])
    model_of("mixtral").save_pretrained(tmp_path / "float")
    float_names = {n.removesuffix(".weight") for n in load_file(tmp_path / "float" / "model.safetensors")}
    quantised = {n.removesuffix(".weight_scale") for n in load_file(out / "model.safetensors") if "_scale" in n}
    assert quantised < float_names


def test_transformers_alone_computes_the_same_logits(tmp_path: Path) -> None:
    """In a process that has never heard of aoquant: logits of compressed-tensors' own decompression are equal."""
    folders = []
    for family, config in (
        ("mixtral", only_experts("intx4-g32")),
        ("qwen3-moe", PackedWeightConfig("intx8-g32", contract="dequantize")),
    ):
        model = converted(family, config)
        folders.append(export(model, tmp_path / family))
        with torch.no_grad():
            expected = {"weights": {}, "logits": model(export_cases.IDS).logits}
        torch.save(expected, f"{folders[-1]}.pt")
    found = export_cases.load_elsewhere(folders)
    assert {name: case["logits"] for name, case in found.items()} == {"mixtral": True, "qwen3-moe": True}


@pytest.mark.parametrize(
    ("weight", "activation", "layout"),
    [("int8-row", "int8-row-vllm", "int-quantized"), ("fp8-row", None, ""), ("mxfp4-even", None, "")],
)
def test_experts_that_transformers_cannot_load_are_said(
    weight: str, activation: str | None, layout: str, tmp_path: Path
) -> None:
    model = converted("mixtral", only_experts(weight, activation))
    with warnings.catch_warnings(record=True, action="always", category=UserWarning) as caught:
        export(model, tmp_path / "out")
    said = [str(w.message) for w in caught if "transformers cannot" in str(w.message)]
    assert len(said) == bool(layout) and all(f"load {layout} experts" in s for s in said)
    if layout:  # the reason of the warning, which goes when transformers loads them
        with pytest.raises(RuntimeError, match="CONVERSION"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=model.dtype)
        return
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=model.dtype).state_dict()
    assert all(torch.equal(found[n].to(w.dtype), w.dequantize()) for n, w in stacks(model).items())


def test_several_schemes_name_experts_by_a_pattern(tmp_path: Path) -> None:
    config = FqnToConfig(
        {
            r"re:.*layers\.0\.mlp\.experts": None,
            r"re:.*\.experts": PackedWeightConfig("intx4-g32", contract="dequantize"),
            r"re:.*\.self_attn\..*": PackedWeightConfig("intx8-row", contract="dequantize"),
        }
    )
    model = converted("qwen3-moe", config)
    out = export(model, tmp_path / "out")
    targets = [group["targets"] for group in told(out)["config_groups"].values()]
    assert [r"re:model\.layers\.1\.mlp\.experts\..*"] in targets
    assert r"re:model\.layers\.0\.mlp\.experts\..*" in told(out)["ignore"]
    again = load_pretrained(out)
    assert list(stacks(again)) == list(stacks(model)) and len(stacks(again)) == 2
    assert torch.equal(logits(again), logits(model))


ONE_ALONE = FqnToConfig({r"re:.*\.experts\.down_proj": PackedWeightConfig("intx4-g32", contract="dequantize")})
REFUSED: dict[str, tuple[str, Any, str]] = {
    "stacked on disk": ("gpt-oss", only_experts("mxfp4-even"), r"experts\.down_proj"),
    "zero points": ("mixtral", only_experts("intx4-g32-asym"), r"experts\.0\.w1: .*vllm-w4a16-g32-experts"),
    "float zero points": ("mixtral", "int4-g32-experts", r"experts\.\*\.w1: .*vllm-w4a16-g32-experts"),
    "one parameter alone": ("qwen3-moe", ONE_ALONE, r"mlp\.experts"),
}


@pytest.mark.parametrize(("family", "config", "name"), REFUSED.values(), ids=REFUSED)
def test_experts_that_an_engine_cannot_run_are_refused(family: str, config: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s){name}"):
        export(converted(family, config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_recipe_that_a_refusal_names_is_exported(tmp_path: Path) -> None:
    model = model_of("qwen3-moe").eval()
    quantize_(model, QATConfig("vllm-w4a16-g32-experts", step="prepare"))
    wanted = logits(model)
    quantize_(model, QATConfig(step="convert"))
    with warnings.catch_warnings(action="error"):
        out = export(model, tmp_path / "out")
    assert torch.equal(logits(load_pretrained(out)), wanted)


def test_skipped_experts_leave_as_values(tmp_path: Path) -> None:
    model = converted("gpt-oss", PackedWeightConfig("mxfp4-even", contract="dequantize"))
    values = {n: w.dequantize() for n, w in stacks(model).items()}
    out = export(model, tmp_path / "out", skip=["*.experts.*"])
    tensors = load_file(out / "model.safetensors")
    assert len(values) == 4 and all(torch.equal(tensors[n], w) for n, w in values.items())


def test_modelopt_holds_each_expert(tmp_path: Path) -> None:
    model = converted("qwen3-moe", only_experts("nvfp4"))
    tensors = load_file(export(model, tmp_path / "out", "modelopt") / "model.safetensors")
    w = stacks(model)["model.layers.1.mlp.experts.gate_up_proj"].expert(3)
    base = "model.layers.1.mlp.experts.3"
    assert torch.equal(tensors[f"{base}.up_proj.weight"], w.qdata[64:])
    assert all(tensors[f"{base}.{part}_proj.weight_scale_2"] == w.per_tensor_scale[0] for part in ("gate", "up"))
    assert "model.layers.1.mlp.gate" in told(tmp_path / "out")["exclude_modules"]


# ---- published checkpoints


def kimi(folder: Path) -> dict[str, Tensor]:
    """A folder as Kimi K2 Thinking is published: DeepSeek-V3's names and config under a model type of its own, int4 of
    g32 in [-7, 7] with bfloat16 scales. Returns the experts' values, by the model's names.
    """
    model = model_of("deepseek-v3")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    g = torch.Generator().manual_seed(3)
    for name in [n for n in tensors if ".mlp.experts." in n]:
        rows, k = tensors.pop(name).shape
        codes = torch.randint(-7, 8, (rows, k), generator=g, dtype=torch.int8)
        codes[:, ::32] = 7 * (2 * torch.randint(0, 2, (rows, k // 32), generator=g, dtype=torch.int8) - 1)
        scale = (0.02 * torch.rand(rows, k // 32, generator=g) + 0.001).bfloat16()
        module = name.removesuffix(".weight")
        tensors |= {
            f"{module}.weight_packed": pack_to_int32(codes, 4),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": torch.tensor([rows, k]),
        }
        model.values = getattr(model, "values", {}) | {module: codes * scale.repeat_interleave(32, 1)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config |= {
        "model_type": "kimi_k2",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    found: dict[str, Tensor] = model.values
    return found


def test_kimi_is_read_with_its_codes_and_trained_from_them(tmp_path: Path) -> None:
    values = kimi(tmp_path / "kimi")
    model = load_pretrained(tmp_path / "kimi", DeepseekV3ForCausalLM)
    found = stacks(model)
    assert set(found) == {f"model.layers.1.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")}
    for e in range(8):
        base = f"model.layers.1.mlp.experts.{e}"
        up = torch.cat([values[f"{base}.gate_proj"], values[f"{base}.up_proj"]])
        assert torch.equal(found["model.layers.1.mlp.experts.gate_up_proj"].expert(e).dequantize(), up)
        assert torch.equal(
            found["model.layers.1.mlp.experts.down_proj"].expert(e).dequantize(), values[f"{base}.down_proj"]
        )
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(logits(load_pretrained(tmp_path / "saved", DeepseekV3ForCausalLM)), logits(model))
    trains_from_its_codes(model, held=True)


def test_gpt_oss_is_read_with_its_codes_and_trained_from_them(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "oss")
    model = load_pretrained(tmp_path / "oss").eval()
    stored = load_file(tmp_path / "oss" / "model.safetensors")
    assert len(stacks(model)) == 4
    for name, w in stacks(model).items():
        assert torch.equal(w.qdata, stored[f"{name}_blocks"].flatten(2))
        assert torch.equal(w.scale.view(torch.uint8), stored[f"{name}_scales"])
    theirs = GptOssForCausalLM.from_pretrained(tmp_path / "oss", dtype=torch.bfloat16).eval()  # decodes on a CPU
    for name, w in stacks(model).items():
        assert torch.equal(w.dequantize(), theirs.get_parameter(name))
    assert torch.equal(logits(model), logits(theirs))
    # a prepared model that starts from transformers' values starts where the packed one is
    quantize_(theirs, QATConfig("mxfp4-experts", step="prepare"))
    assert torch.equal(logits(theirs), logits(model))
    verify(theirs, model, {"input_ids": IDS})  # SQNR inf in every row
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(logits(load_pretrained(tmp_path / "saved")), logits(model))
    trains_from_its_codes(model, held=False)  # scales made anew are the same ones


def test_those_who_would_train_packed_experts_are_led_to_unpack(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "oss")
    model = load_pretrained(tmp_path / "oss")
    w = model.model.layers[0].mlp.experts.down_proj
    with pytest.raises(ValueError, match=r"down_proj .*unpack_"):
        quantize_(model, QATConfig("mxfp4-experts", step="prepare"))
    with pytest.raises(ValueError, match=r"gate_up_proj"):
        unpack_(model, scales="learned")
    for ask in (lambda: w.requires_grad_(), lambda: setattr(w, "requires_grad", True)):
        with pytest.warns(UserWarning, match="unpack_"):
            ask()
        w.requires_grad_(False)
    with warnings.catch_warnings(action="error"):
        torch.nn.Parameter(w.data)
        copy.deepcopy(model)
        unpack_(model)
        model.requires_grad_(True)


def trains_from_its_codes(model: Any, *, held: bool) -> None:
    """SQNR inf before the first step; after some, what was trained is what is converted; a checkpoint resumes."""
    before, codes, served = logits(model), stacks(model), copy.deepcopy(model)
    unpack_(model)
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, QATExperts) and experts.gate_up_proj.requires_grad
    assert torch.equal(logits(model), before)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    scale = "model.layers.1.mlp.experts.gate_up_proj_weight_scale"
    assert (scale in state) == held
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p *= 1.5
    if held:
        other.get_buffer(scale).view(torch.uint8).zero_()
    assert not torch.equal(logits(other), before)
    other.load_state_dict(state)
    assert torch.equal(logits(other), before)
    assert not held or other.double().get_buffer(scale).dtype == state[scale].dtype
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.3 * p.abs().mean() * p.grad.sign()
    trained = logits(model)
    assert not torch.equal(trained, before)
    refresh_(served, model)  # under the held scales
    assert torch.equal(logits(served), trained)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(logits(model), trained)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    after = stacks(model)[name]
    assert not torch.equal(after.qdata, codes[name].qdata)
    assert not held or torch.equal(after.scale.float(), codes[name].scale.float())


def nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 255


def shape(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, 1:].contiguous()


def lose(tensors: dict[str, Tensor]) -> None:
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"model.layers.1.mlp.experts.5.up_proj.{part}"]


@pytest.mark.parametrize(
    ("change", "name"),
    [(nan, "down_proj"), (shape, r"down_proj.*\(E, N, K / 32, 16\)"), (lose, r"experts\.5\.up_proj")],
)
def test_damaged_folders_are_named(change: Callable[[dict[str, Tensor]], None], name: str, tmp_path: Path) -> None:
    (kimi if change is lose else write_mxfp4)(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        load_pretrained(tmp_path, DeepseekV3ForCausalLM if change is lose else GptOssForCausalLM)


def test_rows_of_one_weight_have_one_format() -> None:
    a, b = (model_part(w) for w in ("intx4-g32", "mxfp4-even"))
    with pytest.raises(ValueError, match=r"intx4-g32.*mxfp4-even"):
        joined_rows([a, b])
    one, other = model_part("fp8-tensor"), model_part("fp8-tensor", 3.0)
    assert same_bits(joined_rows([one, one])[:64], one)
    with pytest.raises(ValueError, match="fp8-tensor"):
        joined_rows([one, other])


def model_part(weight: str, factor: float = 1.0) -> PackedTensor:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.weight.data *= factor
    quantize_(layer, PackedWeightConfig(weight))
    packed = layer.weight.data
    assert isinstance(packed, PackedTensor)
    return packed
