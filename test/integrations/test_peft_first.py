"""Adapters first, then prepare: bit for bit what preparing first gives, or refused by layer and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel, get_peft_model
from support.models import IDS, NARROW, everything, llama, logits
from support.peft_options import EXACT, NAMED, REFUSED, config_of, lora
from torchao.quantization import FqnToConfig
from transformers import LlamaForCausalLM

from aoquant import (
    AoquantWarning,
    Int4WeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.integrations.peft import QATLoraLinear
from aoquant.linear.prepared import QATLayer, QATLinear
from aoquant.planning import fused

INT4 = Int4WeightConfig(32)


def narrow() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return llama(**NARROW)


def in_order(first: str, config: QATConfig, options: dict[str, Any], filter_fn: Any = None) -> Any:
    """A model that is prepared, and given adapters of the same numbers, in one order or the other."""
    model, adapts = narrow(), lora(**({"init_lora_weights": False} | options))
    if first == "prepare":
        quantize_(model, config, filter_fn)
    torch.manual_seed(1)
    model = get_peft_model(model, adapts).eval()
    if first == "adapters":
        quantize_(model, config, filter_fn)
    return model


def facts(model: Any) -> dict[str, Any]:
    """What one step of training finds and leaves, and what is deployed."""
    found: dict[str, Any] = {"kinds": [type(m).__name__ for m in model.modules()]}
    found["trains"] = {name: p.requires_grad for name, p in model.named_parameters()}
    found["state"] = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(IDS, labels=IDS).loss.backward()
    found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    found["logits"] = logits(model)
    model.merge_adapter()
    model.unmerge_adapter()
    found["unmerged"] = logits(model)
    merged = model.merge_and_unload()
    quantize_(merged, QATConfig(step="convert"))
    found["converted"] = logits(merged)
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def agree(config: QATConfig, options: dict[str, Any], filter_fn: Any = None) -> dict[str, Any]:
    """Assert that both orders are one; return what they find."""
    want, got = (facts(in_order(first, config, options, filter_fn)) for first in ("prepare", "adapters"))
    assert [key for key in want if not same(want[key], got[key])] == []
    assert torch.equal(got["logits"], got["converted"]) and torch.equal(got["logits"], got["unmerged"])
    return got


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name not in ("plain", "a parameter", "saved block")))
        for name, options in EXACT.items()
    ],
)
def test_an_option_is_what_it_is_on_a_prepared_model(options: dict[str, Any]) -> None:
    assert agree(QATConfig(INT4), options, everything)["gradients"]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (QATConfig(NVFP4WeightConfig()), {}),
        (QATConfig("nvfp4-training"), {"modules_to_save": ["k_proj", "mlp"], "target_modules": ["q_proj"]}),
        (QATConfig(INT4), {"init_lora_weights": "pissa"}),
        (QATConfig("nvfp4-pow2/", scales="static"), {"target_modules": ["q_proj", "k_proj", "gate_proj"]}),
        (QATConfig("int8", scales="learned"), {}),
    ],
    ids=["nvfp4", "random numbers by name", "pissa", "shared scales", "learned scales"],
)
@pytest.mark.filterwarnings("ignore:peft froze")
def test_a_config_is_what_it_is_on_a_prepared_model(config: QATConfig, options: dict[str, Any]) -> None:
    agree(config, options)


def test_the_adapter_is_saved_loaded_and_converted(tmp_path: Path) -> None:
    model = in_order("adapters", QATConfig(INT4), {})
    facts_of = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(IDS, labels=IDS).loss.backward()
    facts_of.step()
    y = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    for first in ("prepare", "adapters"):
        again: Any = narrow()
        if first == "prepare":
            quantize_(again, QATConfig(INT4))
        again = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        if first == "adapters":
            quantize_(again, QATConfig(INT4))
        assert torch.equal(logits(again), y)
    converted = model.merge_and_unload()
    quantize_(converted, QATConfig(step="convert"))
    save_pretrained(converted, tmp_path / "converted")
    assert torch.equal(logits(load_pretrained(tmp_path / "converted")), y)


def test_names_are_the_layers_and_adapters_stay_float() -> None:
    model = get_peft_model(narrow(), lora())
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    quantize_(model, FqnToConfig({q: QATConfig(INT4)}))
    assert [name for name, m in model.named_modules() if isinstance(m, QATLayer)] == [f"{q}.base_layer"]
    assert type(model.get_submodule(q)) is QATLoraLinear
    quantize_(model, QATConfig(INT4), lambda m, fqn: fqn.endswith("1.self_attn.q_proj"))
    assert sum(isinstance(m, QATLinear) for m in model.modules()) == 2
    with pytest.warns(AoquantWarning, match="lora_A"), pytest.raises(ValueError, match="nothing"):
        quantize_(model, FqnToConfig({f"{q}.lora_A.default": QATConfig(INT4)}))


REFUSED_FIRST = {
    name: o for name, o in REFUSED.items() if name not in ("a bias", "arrow", "bdlora", "loftq", "transposed")
}


@pytest.mark.parametrize("options", REFUSED_FIRST.values(), ids=REFUSED_FIRST)
def test_an_option_is_refused_by_the_layers_name(options: dict[str, Any]) -> None:
    """peft itself refuses the others on a float model, or turns them off."""
    unchanged_after(get_peft_model(narrow(), lora(**options)), QATConfig(INT4), rf"{NAMED}")


def unchanged_after(model: Any, config: Any, reason: str) -> None:
    """Assert that a step is refused, and leaves the model what it is."""
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=reason):
        quantize_(model, config, everything)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_dropout": 0.1}, r"q_proj: LoraConfig\(lora_dropout=...\)"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"q_proj: LoraConfig\(layer_replication=...\)"),
    ],
    ids=["dropout", "replication"],
)
def test_what_has_no_merged_weight_is_refused(options: dict[str, Any], reason: str) -> None:
    unchanged_after(get_peft_model(narrow(), lora(**options)), QATConfig(INT4), reason)


def test_loftq_and_a_start_that_moved_the_weight_of_held_scales_are_refused() -> None:
    model = get_peft_model(narrow(), lora())
    model.peft_config["default"].init_lora_weights = "loftq"  # what it needs is not installed everywhere
    unchanged_after(model, QATConfig(INT4), "q_proj: init_lora_weights='loftq'")
    model = get_peft_model(narrow(), lora(init_lora_weights="pissa"))
    unchanged_after(model, QATConfig("int8", scales="learned"), "q_proj: init_lora_weights='pissa'")


@pytest.mark.parametrize("name", ["IA3", "LOHA", "OFT", "VERA"])
def test_another_tuner_is_refused_by_layer_and_class(name: str) -> None:
    unchanged_after(
        get_peft_model(narrow(), config_of(name)),
        QATConfig(INT4),
        rf"q_proj: its adapter is peft\.tuners\.{name.lower()}",
    )


def test_adapters_that_are_merged_replaced_or_unknown_are_refused() -> None:
    model = get_peft_model(narrow(), lora())
    model.merge_adapter()
    unchanged_after(model, QATConfig(INT4), "q_proj: its adapter is merged")
    model.unmerge_adapter()
    layer = model.base_model.model.model.layers[0]
    unchanged_after(layer, QATConfig(INT4), "q_proj: nothing here says which LoraConfig")
    layer.self_attn.q_proj.forward = layer.self_attn.q_proj.forward
    unchanged_after(model, QATConfig(INT4), "q_proj: the forward of its adapter is replaced")


def test_an_error_leaves_the_adapters_on_float_layers() -> None:
    model = get_peft_model(narrow(), lora())
    before, kinds = logits(model), [type(m) for m in model.modules()]
    with mock.patch.object(fused, "share_outer_scales", side_effect=RuntimeError), pytest.raises(RuntimeError):
        quantize_(model, QATConfig(INT4))
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(logits(model), before)


def test_learned_scales_are_frozen_with_a_warning() -> None:
    model = get_peft_model(narrow(), lora())
    with pytest.warns(AoquantWarning, match="peft froze 14 learned scales") as said:
        quantize_(model, QATConfig("int8", scales="learned"))
    assert [w.filename for w in said if "peft froze" in str(w.message)] == [__file__]


def test_the_device_is_the_adapters_too() -> None:
    model = get_peft_model(narrow(), lora())
    quantize_(model, QATConfig(INT4), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
