"""Which stacked experts a config's names choose, and the words for those that it cannot quantise."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from support.expert_cases import FAMILIES, IMPLEMENTATIONS, WIDTH, E, H, Holder, made, routed
from support.moe_models import IDS, MODELS, model_of
from torch import nn
from torchao.quantization import FqnToConfig, Int8DynamicActivationInt8WeightConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import aoquant
from aoquant import (
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    quantize_,
)
from aoquant.config import ATTENTION
from aoquant.experts.packed_experts import PackedExperts


def test_names_choose_a_module_or_one_parameter() -> None:
    int4 = Int4WeightConfig(32)
    for keys, wanted in (
        ({"experts": int4}, {"gate_up_proj", "down_proj"}),
        ({"experts.down_proj": int4}, {"down_proj"}),
        ({"experts.down_proj": None, "experts": int4}, {"gate_up_proj"}),
        ({"re:.*up_proj": int4}, {"gate_up_proj"}),
    ):
        for implementation in IMPLEMENTATIONS:
            model, batch = made("mixtral", implementation), routed(16, "random")
            quantize_(model, QATConfig(FqnToConfig(keys), step="prepare"))
            assert set(model.experts.stacks) == wanted
            y = model(*batch)
            states = {w.names[0].split(".")[1]: w.state for w in aoquant.coverage(model).weights}
            assert {n for n, state in states.items() if state == "prepared"} == wanted
            quantize_(model, QATConfig(step="convert"))
            assert torch.equal(model(*batch), y)
            assert {n for n, p in model.experts.named_parameters() if isinstance(p.data, PackedExperts)} == wanted
    model = made("mixtral", "eager")
    quantize_(model, QATConfig(FqnToConfig({"experts.up": None, "_default": int4}), step="prepare"))
    assert set(model.experts.stacks) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "recipe"),
    [*((family, "int4-g32") for family in MODELS), ("deepseek-v3", "mxfp4"), ("deepseek-v3", "vllm-w4a16-g32")],
)
def test_a_recipe_leaves_out_attention_and_another_all_but_experts(family: str, recipe: str) -> None:
    """Routers stay float under both; shared experts and dense MLPs are in the one."""
    attention = re.compile(r"\.self_attn\.")
    states = {}
    for end in ("-no-attention", "-experts"):
        model = model_of(family)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            quantize_(model, QATConfig(recipe + end, step="prepare"), strict=True)
        states[end] = {w.names[0]: w.state for w in aoquant.coverage(model).weights if w.state != "small"}
        y = model(input_ids=IDS).logits
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(input_ids=IDS).logits, y)
    prepared = {end: {n for n, s in found.items() if s == "prepared"} for end, found in states.items()}
    floats = {n: s for n, s in states["-no-attention"].items() if s != "prepared"}
    assert prepared["-experts"] == {n for n in states["-experts"] if re.search(r"\.experts\.\w+$", n)}
    assert prepared["-experts"] <= prepared["-no-attention"]
    assert (prepared["-experts"] < prepared["-no-attention"]) == (family == "deepseek-v3")
    assert {n for n, s in floats.items() if s == "left out"} == {n for n in floats if attention.search(n)}
    assert {s for n, s in floats.items() if not attention.search(n)} == {"default"}


@pytest.mark.parametrize(
    ("name", "is_attention"),
    [
        ("model.layers.0.self_attn.q_a_proj", True),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv", True),
        ("encoder.block.0.layer.0.SelfAttention.q", True),
        ("model.layers.3.linear_attn.in_proj", True),
        ("backbone.layers.7.mixer.q_proj", True),
        ("attn", True),
        ("backbone.layers.7.mixer.in_proj", False),
        ("model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.mlp.experts.down_proj", False),
    ],
)
def test_what_is_called_attention(name: str, is_attention: bool) -> None:
    assert (re.fullmatch(ATTENTION.removeprefix("re:"), name) is not None) == is_attention


def test_convert_without_prepare_says_so() -> None:
    model = model_of("mixtral")
    one = FqnToConfig({"model.layers.0.mlp.experts.down_proj": Int4WeightConfig(32)})
    for base in ("int4-g32-experts", "int4-g32-no-attention", one, None):
        with pytest.raises(ValueError, match="nothing to convert: no layer is prepared"):
            quantize_(model, QATConfig(base, step="convert"))
    quantize_(model, "int4-g32-experts")
    with pytest.raises(
        ValueError, match=r"nothing to convert: no layer is prepared, and 4 weight\(s\), such as model\.layers"
    ):
        quantize_(model, QATConfig("int4-g32-experts", step="convert"))
    with pytest.raises(ValueError, match=r"for experts alone .*, and Linear has no experts"):
        quantize_(nn.Linear(64, 64), QATConfig("int4-g32-experts", step="convert"))


@pytest.mark.parametrize(
    ("keys", "named"),
    [(("a", "b.experts"), ["a", "b.experts"]), (("a.experts", "b.experts"), [])],
)
def test_unmet_names_are_warned_of_unless_all_are_of_experts(
    keys: tuple[str, ...], named: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    """The error that follows has names of experts alone."""
    config = FqnToConfig(dict.fromkeys(keys, Int4WeightConfig(32)))
    with pytest.raises(ValueError, match="nothing to quantise"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), config)
    assert [re.findall("'(.+?)'", str(w.message))[:1] for w in recwarn] == [[name] for name in named]


REFUSED = {
    "static": (Int8WeightConfig(activation="int8-tensor-static"), "no calibrated activation scale"),
    "learned": (QATConfig(IntxWeightConfig(4, 32), step="prepare", scales="learned"), "static or learned scales"),
    "fitted": (NVFP4WeightConfig(transform=aoquant.WUSH(16)), "fitted transform"),
    "torchao": (Int8DynamicActivationInt8WeightConfig(), "use a config of aoquant's"),
    "group": (Int4WeightConfig(128), "multiple of 128"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_experts_cannot_take_is_refused_by_name(config: Any, message: str) -> None:
    model = made("mixtral", "eager")
    config = config if isinstance(config, QATConfig) else QATConfig(config, step="prepare")
    with pytest.raises(ValueError, match=rf"(?s)experts.gate_up_proj \(4, 192, 64\).*{message}"):
        quantize_(model, config)
    assert type(model.experts) is MixtralExperts


class OwnExperts(nn.Module):
    """Stacked, and not known."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * WIDTH, H))
        self.down_proj = nn.Parameter(torch.zeros(E, H, WIDTH))


def test_classes_without_the_protocol_are_refused_by_name() -> None:
    model = Holder(OwnExperts())
    found = aoquant.coverage(model).unexpected
    assert {w.names[0] for w in found} == {"experts.gate_up_proj", "experts.down_proj"}
    assert all("of OwnExperts, whose class lacks" in w.about and "has_gate" in w.about for w in found)
    with pytest.raises(ValueError, match=r"experts.down_proj.*cannot quantise: .* of OwnExperts, whose class lacks"):
        quantize_(model, FqnToConfig({"experts.down_proj": Int4WeightConfig(32)}))


def test_experts_that_are_not_whole_or_run_elsewhere_are_refused() -> None:
    config = QATConfig(Int4WeightConfig(32), step="prepare")
    model = made("mixtral", "eager")
    with torch.no_grad():
        model.experts.down_proj[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"experts.down_proj .*: it holds NaN or Inf"):
        quantize_(model, config)
    model = made("mixtral", "eager")
    model.experts.forward = model.experts.forward
    with pytest.raises(ValueError, match="replaced on the instance"):
        quantize_(model, config)
    del model.experts.forward
    quantize_(model, config)
    with torch.device("meta"):
        skeleton = Holder(MixtralExperts(FAMILIES["mixtral"][1]))
    quantize_(skeleton, config)
    assert set(skeleton.experts.stacks) == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("end", ["up_proj", "0", "0.w1"])
def test_a_key_within_stacked_experts_is_told_what_there_is(end: str) -> None:
    key = f"model.layers.0.mlp.experts.{end}"
    for others in ({}, {"_default": Int4WeightConfig(32)}):
        said = rf"{re.escape(key)}' names nothing in model\.layers\.0\.mlp\.experts \(MixtralExperts\).*A single expert cannot be named"
        with pytest.raises(ValueError, match=said) as error:
            quantize_(model_of("mixtral"), FqnToConfig({key: Int4WeightConfig(32), **others}))
        assert all(f"experts.{name}" in str(error.value) for name in ("gate_up_proj", "down_proj"))
    with pytest.raises(ValueError, match=r"no stacked experts of MixtralForCausalLM have the name re:.*gate_up_proj"):
        quantize_(model_of("mixtral"), FqnToConfig({r"re:.*experts\.up_proj": Int4WeightConfig(32)}))
