"""Layers that an engine fuses have one number where it has one: shared from the start, or refused at export."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import moe_models
from support.export_cases import converted, llama, packed, told
from support.models import IDS
from torchao.quantization import FqnToConfig
from torchao.quantization import quantize_ as torchao_quantize
from transformers import AutoModelForCausalLM

from aoquant import PackedWeightConfig, QATConfig, calibrate, convert_checkpoint, export, load_pretrained, quantize_
from aoquant.experts.packed_experts import PackedExperts
from aoquant.export.fused_checks import unequal, warn_mixed
from aoquant.linear.tensor import same_bits
from aoquant.planning.fused import share_outer_scales, siblings
from aoquant.recipes import get_recipe

LAYOUTS = ("compressed-tensors", "modelopt")
O_AND_DOWN = ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]


def apart() -> Any:
    """A Llama whose siblings ask for different outer scales."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 8
        layer.mlp.up_proj.weight.data *= 16
    return model


def outers(model: Any) -> dict[str, float]:
    return {name: w.per_tensor_scale[0].item() for name, w in packed(model).items()}


@pytest.mark.parametrize(("other", "differ"), [(0.5, False), (0.25, True)])
def test_a_number_may_be_given_once_or_for_every_row(other: float, differ: bool) -> None:
    numbers = {"a.q_proj": torch.full((64, 1), 0.5), "a.k_proj": torch.tensor(other), "a.v_proj": torch.full((8,), 0.5)}
    numbers["b.q_proj"] = torch.tensor(7.0)  # of another layer
    assert [sorted(g) for g in unequal(numbers)] == ([["a.k_proj", "a.q_proj", "a.v_proj"]] if differ else [])


# ---- without training


def test_siblings_share_an_outer_scale_when_they_are_quantised_at_once(tmp_path: Path) -> None:
    model, alone = apart(), apart()
    quantize_(model, "vllm-nvfp4-weight")
    shared, groups = outers(model), siblings(packed(model))
    torchao_quantize(alone, get_recipe("vllm-nvfp4-weight").make(), lambda m, n: n in shared)  # module by module
    own = outers(alone)
    assert len(groups) == 4 and all(len({own[n] for n in g}) > 1 for g in groups)
    assert all(shared[n] == max(own[m] for m in g) for g in groups for n in g)
    assert all(shared[n] == own[n] for n in own if not any(n in g for g in groups))
    for layout in LAYOUTS:
        export(model, tmp_path / layout, layout)
        with pytest.raises(ValueError, match=r"(?s)layers\.0\.self_attn: .*layers\.1\.self_attn: .*vllm-nvfp4-weight"):
            export(alone, tmp_path / "refused", layout)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.q_proj", "a.o_proj"], []),
        (["a.q_proj", "b.k_proj"], []),
        (["a.v_proj", "a.q_proj", "b.q_proj"], [["a.v_proj", "a.q_proj"]]),
    ],
)
def test_a_module_alone_has_no_siblings(names: list[str], groups: list[list[str]]) -> None:
    assert siblings(names) == groups


def test_a_checkpoint_is_converted_with_shared_outer_scales(tmp_path: Path) -> None:
    model = apart()
    model.save_pretrained(tmp_path / "float")
    convert_checkpoint(tmp_path / "float", "vllm-nvfp4-weight", tmp_path / "streamed")
    quantize_(model, "vllm-nvfp4-weight")
    streamed = load_pretrained(tmp_path / "streamed")
    assert all(same_bits(w, packed(model)[name]) for name, w in packed(streamed).items())
    export(tmp_path / "streamed", tmp_path / "out")


# ---- mixtures of experts


EXPERTS_IN_TRANSFORMERS = "transformers leaves out the outer scales of nvfp4-pack-quantized experts"


@pytest.mark.filterwarnings("error::UserWarning", f"ignore:.*{EXPERTS_IN_TRANSFORMERS}")
def test_a_whole_mixtral_trains_and_exports(tmp_path: Path) -> None:
    model = moe_models.model_of("mixtral").eval()
    quantize_(model, QATConfig("vllm-nvfp4-weight"))
    model(IDS[:, :8] % 64, labels=IDS[:, :8] % 64).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.abs().mean() * p.grad.sign()
        before = model(moe_models.IDS).logits
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(moe_models.IDS).logits, before)
    assert sum(isinstance(p.data, PackedExperts) for p in model.parameters()) == 4
    for layout in LAYOUTS:
        export(model, tmp_path / layout, layout)
    again = load_pretrained(tmp_path / "compressed-tensors")
    with torch.no_grad():
        assert torch.equal(again(moe_models.IDS).logits, before)
    quantize_(moe := moe_models.model_of("mixtral"), "vllm-nvfp4-weight")  # and without training
    export(moe, tmp_path / "at-once")


def test_what_transformers_reads_of_the_mixtral_is_said(tmp_path: Path) -> None:
    """It loads: linear layers are equal, and of experts it leaves out the outer scale, which export says."""
    model = moe_models.model_of("mixtral").eval()
    quantize_(model, "vllm-nvfp4-weight")
    with pytest.warns(UserWarning, match=EXPERTS_IN_TRANSFORMERS):
        export(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    theirs(moe_models.IDS)
    for name, w in packed(model).items():
        assert torch.equal(theirs.get_submodule(name).weight, w.dequantize())
    name = "model.layers.1.mlp.experts.down_proj"
    w, values = model.get_parameter(name).data, theirs.get_parameter(name)
    for e in range(8):
        assert torch.equal(values[e] * w.expert(e).per_tensor_scale[0].to(values.dtype), w.expert(e).dequantize())


@pytest.mark.filterwarnings(f"ignore:.*{EXPERTS_IN_TRANSFORMERS}")
def test_activations_of_experts_stay_float_by_name(tmp_path: Path) -> None:
    model = moe_models.model_of("mixtral").eval()
    with pytest.raises(ValueError, match=r"nvfp4-pow2-static.*vllm-nvfp4-weight"):
        quantize_(model, QATConfig("vllm-nvfp4"))
    experts, rest = QATConfig("vllm-nvfp4-weight"), QATConfig("vllm-nvfp4")
    quantize_(model, FqnToConfig({r"re:.*\.experts": experts, r"re:.*self_attn\..*": rest}))
    calibrate(model, [moe_models.IDS])
    quantize_(model, QATConfig(step="convert"))
    said = told(export(model, tmp_path / "out"))["config_groups"].values()
    groups = {g["input_activations"] is None: g["targets"] for g in said}
    assert all("experts" in t for t in groups[True]) and all("self_attn" in t for t in groups[False])


# ---- what is refused, and the way out


@pytest.mark.parametrize("recipe", ["vllm-nvfp4", "vllm-nvfp4-weight"])
def test_dynamic_outer_scales_are_refused_with_the_way_out(recipe: str, tmp_path: Path) -> None:
    def trained(**options: Any) -> Any:
        model = apart()
        quantize_(model, QATConfig(recipe, **options))
        if recipe == "vllm-nvfp4":
            calibrate(model, [IDS])
        quantize_(model, QATConfig(step="convert"))
        return model

    with pytest.raises(ValueError, match=rf"'{recipe}'.*'dynamic'"):
        export(trained(scales="dynamic"), tmp_path / "refused")
    export(trained(), tmp_path / "out")


def test_per_tensor_scales_of_siblings_are_checked(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, QATConfig(PackedWeightConfig("fp8-tensor", "fp8-tensor-static"), step="prepare"))
    calibrate(model, [IDS])
    quantize_(model, QATConfig(step="convert"))
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match="under one weight scale") as caught:
            export(model, tmp_path / "refused", layout)
        assert "activation scale, and" not in str(caught.value) and "vllm-fp8" in str(caught.value)  # one input's scale
    skip = ["*.[qkv]_proj", "*.gate_proj", "*.up_proj"]
    for layout in LAYOUTS:
        export(model, tmp_path / layout, layout, skip=skip)
    alike = converted(PackedWeightConfig("fp8-tensor-static:0.01", "fp8-tensor-static:0.01"))
    export(alike, tmp_path / "alike")


def test_learned_activation_scales_of_siblings_are_checked(tmp_path: Path) -> None:
    def trained(scales: str) -> Any:
        model = llama()
        quantize_(model, QATConfig(PackedWeightConfig("int8-row", "int8-tensor-static"), step="prepare", scales=scales))
        calibrate(model, [IDS])
        if scales == "learned":
            model.model.layers[1].self_attn.k_proj.input_scale.data *= 1.25  # an optimizer step
        quantize_(model, QATConfig(step="convert"))
        return model

    with pytest.raises(ValueError, match=r"layers\.1\.self_attn: .*activation scale"):
        export(trained("learned"), tmp_path / "refused")
    export(trained("static"), tmp_path / "out")


@pytest.mark.parametrize(
    ("schemes", "mixed"),
    [
        ({"q": "a", "k": "a", "v": "a"}, False),
        ({}, False),
        ({"q": "a", "k": "a", "v": "b"}, True),
        ({"q": "a", "k": "a"}, True),  # v stays float
        ({"o": "a"}, False),
    ],
)
def test_siblings_of_several_schemes_are_named_and_others_are_not(schemes: dict[str, str], mixed: bool) -> None:
    names = {of: f"layers.3.attn.{of}_proj" for of in "qkvo"}
    with warnings.catch_warnings(record=True, action="always") as caught:
        warn_mixed(names.values(), {names[of]: scheme for of, scheme in schemes.items()})
    assert [("layers.3.attn.{q_proj, k_proj, v_proj}" in str(w.message)) for w in caught] == [True] * mixed


# ---- groups that are given by name


def test_given_groups_stay_shared_and_are_checked(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.data *= 32
    quantize_(model, QATConfig("vllm-nvfp4"))
    assert share_outer_scales(model, [O_AND_DOWN]) == 1
    calibrate(model, [IDS])
    for part in ("weight_outer", "input_outer"):
        a, b = (getattr(model.get_submodule(name), part).item() for name in O_AND_DOWN)
        assert a == b
    model = copy.deepcopy(model)
    quantize_(model, QATConfig(step="convert"))
    export(model, tmp_path / "out")
    model.get_submodule(O_AND_DOWN[0]).weight.per_tensor_scale.mul_(2)
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match=r"o_proj .*down_proj "):
            export(model, tmp_path / "refused", layout)


def test_groups_that_overlap_are_one() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.o_proj.weight.data *= 64
    quantize_(model, QATConfig("vllm-nvfp4-weight"))
    share_outer_scales(attention, [["v_proj", "o_proj"]])  # names within the module that is given
    calibrate(model, [IDS])
    scales = {getattr(attention, f"{n}_proj").weight_outer.item() for n in "qkvo"}
    assert len(scales) == 1
    with pytest.raises(ValueError, match="lm_head"):
        share_outer_scales(model, [["lm_head"]])
