"""Mixture-of-experts models whole: recipes, training, saving, loading, and what is refused."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import forked
from support.moe_models import IDS, MODELS, model_of
from transformers import AutoModelForCausalLM

import aoquant
from aoquant import (
    Int4WeightConfig,
    MXFP4WeightConfig,
    QATConfig,
    explain,
    load_pretrained,
    quantize_,
    refresh_,
    report,
    save_pretrained,
)
from aoquant.experts.packed_experts import PackedExperts

PROGRAM = """
import sys, torch, aoquant
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.parametrize("family", MODELS)
def test_experts_alone_are_trained_converted_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    quantize_(model, QATConfig("mxfp4-experts", step="prepare"))
    states = {w.names[0]: w.state for w in aoquant.coverage(model).weights}
    assert states["model.layers.0.self_attn.o_proj.weight"] == "left out"
    assert states["model.layers.1.mlp.experts.down_proj"] == "prepared"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.model.layers[1].mlp.experts.down_proj.detach().clone()
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(model.model.layers[1].mlp.experts.down_proj, before)
    model.eval()
    with pytest.raises(ValueError, match="prepared and not converted"):
        save_pretrained(model, tmp_path / "early")
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(step="convert"))
        save_pretrained(converted, tmp_path / "saved")
        for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
            loaded = load(tmp_path / "saved").eval()
            assert isinstance(loaded.model.layers[1].mlp.experts.down_proj.data, PackedExperts)
            assert torch.equal(loaded(input_ids=IDS).logits, wanted)
        save_pretrained(loaded, tmp_path / "again")
        assert torch.equal(load_pretrained(tmp_path / "again").eval()(input_ids=IDS).logits, wanted)
        fresh = model_of(family).eval()
        torch.save(converted.state_dict(), tmp_path / "state.pt")
        fresh.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
        assert torch.equal(fresh(input_ids=IDS).logits, wanted)
        if family == "gpt-oss":  # a new process, with transformers' own loader
            torch.save(IDS, tmp_path / "ids.pt")
            arguments = [str(tmp_path / name) for name in ("saved", "ids.pt", "logits.pt")]
            done = forked.python(PROGRAM, *arguments)
            assert done.returncode == 0, done.stderr
            assert torch.equal(torch.load(tmp_path / "logits.pt"), wanted)


def test_batched_mm_is_refused_and_eager_generates() -> None:
    model = model_of("mixtral").eval()
    quantize_(model, Int4WeightConfig(32))
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match=r"batched_mm.*set_experts_implementation"):
        model(input_ids=IDS)
    model.set_experts_implementation("eager")
    assert model.generate(IDS[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_report_and_explain_show_each_parameter() -> None:
    model = model_of("gpt-oss").eval()
    quantised = copy.deepcopy(model)
    quantize_(quantised, "int4-g32-experts")
    found = report(model, quantised, {"input_ids": IDS}, progress=False)
    assert [r.fqn.rpartition(".")[2] for r in found.layers] == ["gate_up_proj", "down_proj"] * 2
    assert all(10 < r.weight_sqnr_db < 40 and 10 < r.output_sqnr_db < 40 for r in found.layers)  # type: ignore[operator]
    assert {r.bits_per_weight for r in found.layers} == {5.0}
    assert "gate_up_proj" in found.to_markdown()
    said = str(explain(quantised.model.layers[0].mlp.experts))
    assert "gate_up_proj: 8 experts of 128 x 64, converted" in said
    assert "down_proj: multiply, M = 1" in said
    with pytest.raises(ValueError, match="got float ones"):
        explain(model.model.layers[0].mlp.experts)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_a_converted_copy_follows_training(family: str) -> None:
    """Equal logits after every refresh, in the tensors that the copy had."""
    prepared = model_of(family).eval()
    quantize_(prepared, QATConfig(MXFP4WeightConfig(), step="prepare"))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    packed = [p.data for p in converted.parameters() if isinstance(p.data, PackedExperts)]
    places = [t.data_ptr() for w in packed for t in (w.qdata, w.scale) if t is not None]
    with torch.no_grad():
        for p in prepared.parameters():
            p *= 1.3
        wanted = prepared(input_ids=IDS).logits
        assert not torch.equal(converted(input_ids=IDS).logits, wanted)
        layers = refresh_(converted, prepared)
        assert layers == sum(isinstance(m, torch.nn.Linear) for m in prepared.model.modules()) + 4
        assert torch.equal(converted(input_ids=IDS).logits, wanted)
    packed = [p.data for p in converted.parameters() if isinstance(p.data, PackedExperts)]
    assert places == [t.data_ptr() for w in packed for t in (w.qdata, w.scale) if t is not None]


def test_a_copy_of_experts_in_another_format_is_refused() -> None:
    prepared, other = model_of("mixtral"), model_of("mixtral")
    quantize_(prepared, QATConfig("int4-g32-experts", step="prepare"))
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is prepared, and in the first model its weight is"):
        refresh_(other, prepared)
    quantize_(other, "mxfp4-experts")
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is prepared as \('int4-g32'.*has \('mxfp4'"):
        refresh_(other, prepared)


PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model: Any, parameters: list[str]) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize(("family", "autocast"), [("mixtral", False), ("mixtral", True), ("gpt-oss", False)])
def test_adapters_of_experts_merge_and_convert_bit_equal(family: str, autocast: bool) -> None:
    model = model_of(family).float() if autocast else model_of(family)
    quantize_(model, QATConfig("int4-g32-experts", step="prepare"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = model(input_ids=IDS).logits
        adapters = adapted(model, PARAMETERS)
        wanted = adapters(input_ids=IDS).logits
        adapters.merge_adapter()
        assert torch.equal(adapters(input_ids=IDS).logits, wanted)
        adapters.unmerge_adapter()
        assert torch.equal(adapters(input_ids=IDS).logits, wanted)
        with adapters.disable_adapter():
            assert torch.equal(adapters(input_ids=IDS).logits, plain)
        assert not torch.equal(wanted, plain)
        merged = adapters.merge_and_unload(safe_merge=True)
        quantize_(merged, QATConfig(step="convert"))
        assert torch.equal(merged(input_ids=IDS).logits, wanted)


def test_experts_beneath_adapters_are_what_they_are_first() -> None:
    want = model_of("mixtral")
    got = model_of("mixtral")
    got.load_state_dict(want.state_dict())
    quantize_(want, QATConfig("int4-g32-experts"))
    want, got = adapted(want, PARAMETERS), adapted(got, PARAMETERS)
    quantize_(got, QATConfig("int4-g32-experts"))
    assert [type(m) for m in got.modules()] == [type(m) for m in want.modules()]
    with torch.no_grad():
        y = want(input_ids=IDS).logits
        assert torch.equal(got(input_ids=IDS).logits, y)
        merged = got.merge_and_unload()
        quantize_(merged, QATConfig(step="convert"))
        assert torch.equal(merged(input_ids=IDS).logits, y)


def test_adapters_of_packed_experts_are_refused_by_name() -> None:
    model = model_of("mixtral")
    quantize_(model, "int4-g32-experts")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts.down_proj: target_parameters='down_proj' adapts"):
        adapted(model, PARAMETERS[1:])


def test_all_linear_means_experts_too() -> None:
    """peft adapts them where it can, prepared; packed ones are refused, and the layers that it can adapt are named."""
    prepared, packed = model_of("mixtral"), model_of("mixtral")
    quantize_(prepared, QATConfig("int4-g32-experts", step="prepare"))
    peft_model = get_peft_model(prepared, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    wanted = peft_model(input_ids=IDS).logits
    merged = peft_model.merge_and_unload()
    quantize_(merged, QATConfig(step="convert"))
    torch.testing.assert_close(
        merged(input_ids=IDS).logits, wanted, rtol=2e-2, atol=2e-2
    )  # peft's merge of float layers
    quantize_(packed, "int4-g32-experts")
    with pytest.raises(ValueError, match=r"'all-linear'.* give target_modules=(.*)$") as error:
        get_peft_model(packed, LoraConfig(r=4, target_modules="all-linear"))
    named = ast.literal_eval(str(error.value).rpartition("=")[2])
    assert named == ["k_proj", "o_proj", "q_proj", "v_proj"]
    packed = model_of("mixtral")
    quantize_(packed, "int4-g32-experts")
    get_peft_model(packed, LoraConfig(r=4, target_modules=named))(input_ids=IDS, labels=IDS).loss.backward()
