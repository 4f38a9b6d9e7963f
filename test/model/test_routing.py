"""Router drift: tokens that change experts, counted between forms of a model; and routers that stay as they are."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.expert_cases import FAMILIES
from support.moe_models import IDS, MODELS, model_of
from support.trainers import trainer
from torch import Tensor, nn
from torchao.quantization import FqnToConfig
from transformers import (
    DbrxConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.dbrx.modeling_dbrx import DbrxFFN

from aoquant import (
    Int4WeightConfig,
    IntxWeightConfig,
    PackedTensor,
    QATConfig,
    coverage,
    freeze_routers,
    quantize_,
    report,
    router_drift,
)
from aoquant.experts.routers import routers_of
from aoquant.integrations.trainer import DRIFT, QATCallback
from aoquant.linear.prepared import QATLinear
from aoquant.report.routing import changed_share, drift, routes

BATCH = {"input_ids": IDS}


@pytest.mark.parametrize("family", MODELS)
def test_prepared_and_converted_route_alike_and_float_does_not(family: str) -> None:
    model = model_of(family).eval()
    prepared = copy.deepcopy(model)
    quantize_(prepared, QATConfig(IntxWeightConfig(2, 32), step="prepare"))
    converted = copy.deepcopy(prepared)
    quantize_(converted, QATConfig(step="convert"))
    found = router_drift(model, prepared, BATCH)
    layers = 1 if family == "deepseek-v3" else 2
    assert [layer.fqn for layer in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)][-layers:]
    assert all((layer.tokens, layer.choices) == (32, 64) for layer in found)
    assert 0 < found[-1].changed <= found[-1].moved and found[-1].changed <= 32
    assert 0 < changed_share(found) < 1
    assert [(layer.changed, layer.moved) for layer in router_drift(prepared, converted, BATCH)] == [(0, 0)] * layers
    assert model.training is False and not any(m._forward_pre_hooks for m in model.modules())


def test_drift_counts_tokens_and_choices_in_any_order() -> None:
    a = [torch.tensor([[0, 1], [2, 3], [4, 5]])]
    b = [torch.tensor([[1, 0], [2, 7], [6, 7]])]
    (layer,) = drift({"experts": a}, {"experts": b})
    assert (layer.tokens, layer.changed, layer.choices, layer.moved) == (3, 2, 6, 3)
    assert layer.changed_share == 2 / 3
    (none, two) = drift({"none": [], "two": a * 2}, {"two": b * 2, "none": []})
    assert (none.tokens, none.changed_share, two.tokens, two.changed) == (0, 0.0, 6, 4)
    assert changed_share([layer, none]) == 2 / 3 and changed_share([layer, replace(layer, tokens=1)]) == 1.0
    assert changed_share([]) == changed_share([none]) == 0.0
    for other in ({"experts": a * 2}, {"experts": [a[0][:2]]}, {}):
        with pytest.raises(ValueError, match="experts"):
            drift({"experts": a}, other)


class Called(nn.Module):
    """Experts that are called with given choices, by place or by name, which are overwritten afterwards."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, config = FAMILIES["gpt-oss" if name == "router_indices" else "mixtral"]
        self.experts, self.name = kind(config), name

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        weights = torch.full(chosen.shape, 0.5)
        if self.name == "place":
            y = self.experts(x, chosen, weights)
        else:
            other = "routing_weights" if self.name == "router_indices" else "top_k_weights"
            y = self.experts(x, **{self.name: chosen, other: weights})
        chosen.zero_()
        return y


@pytest.mark.parametrize("name", ["place", "top_k_index", "router_indices"])
def test_choices_are_kept_as_they_were_in_the_call(name: str) -> None:
    model, chosen = Called(name).train(), torch.tensor([[0, 1], [3, 2], [1, 2]])
    for wrapped in (model, torch.compile(model, backend="eager")):
        state = torch.get_rng_state()
        found = routes(wrapped, (torch.randn(3, 64), chosen.clone()))
        assert found.keys() == {"experts"} and len(found["experts"]) == 1
        assert torch.equal(found["experts"][0], chosen)
        torch.set_rng_state(state)
    assert model.training and model.experts.training and not model.experts._forward_pre_hooks


@pytest.mark.parametrize("chosen", [torch.ones(3, 2), torch.ones(3, dtype=torch.long), torch.ones(1, 3, 2).long()])
def test_choices_that_are_no_integers_of_tokens_and_places_are_refused(chosen: Tensor) -> None:
    with pytest.raises(ValueError, match=r"router_drift: experts \(MixtralExperts\)"):
        routes(Called("place"), (torch.randn(3, 64), chosen))


def test_a_report_tells_the_drift_where_it_is_asked_for() -> None:
    model = model_of("mixtral").eval()
    quantised = copy.deepcopy(model)
    quantize_(quantised, IntxWeightConfig(2, 32))
    found = report(model, quantised, BATCH, routing=True, progress=False)
    assert found.routing == router_drift(model, quantised, BATCH)
    assert f"Router drift: {changed_share(found.routing):.2%} of tokens" in found.to_markdown()
    assert json.loads(found.to_json())["totals"]["routing"][1]["tokens"] == 32
    silent = report(model, quantised, BATCH, progress=False)
    assert silent.routing == () and "Router drift" not in silent.to_markdown() and "routing" not in silent.totals
    with pytest.raises(ValueError, match="Linear"):
        router_drift(nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="Linear"):
        freeze_routers(nn.Linear(2, 2))


def test_the_trainer_logs_it(tmp_path: Path) -> None:
    model = model_of("mixtral").float()
    quantize_(model, QATConfig(IntxWeightConfig(2, 32), step="prepare"))
    run = trainer(model, tmp_path, IDS, 2)
    QATCallback(batch=BATCH, router_drift=True).attach(run)
    run.train()
    logged = [entry[DRIFT] for entry in run.state.log_history if DRIFT in entry]
    assert len(logged) == 2 and 0 < logged[0] < 1
    assert all(m.fake_quant for m in model.modules() if hasattr(m, "fake_quant"))
    with pytest.raises(ValueError, match="batch"):
        QATCallback(router_drift=True)


@pytest.mark.parametrize("family", [*MODELS, "gemma-4"])
def test_frozen_routers_stay_as_they_are(family: str) -> None:
    model = model_of(family)
    quantize_(model, QATConfig("int4-g32-experts", step="prepare"))
    routers = freeze_routers(model)
    assert len(routers) == (1 if family == "deepseek-v3" else 2)
    assert all(name.rpartition(".")[2] in ("gate", "router") for name in routers)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all(n.startswith(tuple(f"{r}." for r in routers)) for n in frozen)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(model.get_parameter(n).grad is None for n in frozen)
    trained = [p for n, p in model.named_parameters() if n.endswith("experts.down_proj")]
    assert trained and all(p.grad is not None for p in trained)


SORTED = {
    "llama-4": "feed_forward.experts (Llama4TextExperts)",
    "aria": "mlp.experts.fc1 (AriaGroupedExpertsGemm)",
    "jetmoe": "self_attention.experts.input_linear (JetMoeParallelExperts)",
}

ARIA_SORTS = not hasattr(AriaExperts, "_apply_gate")  # until transformers 5.24, where its experts are given the choices


@pytest.mark.parametrize("family", [f for f in SORTED if f != "aria" or ARIA_SORTS])
def test_experts_that_are_not_given_the_tokens_choices_are_refused_by_name(family: str) -> None:
    model = model_of(family)
    with pytest.raises(ValueError, match=re.escape(SORTED[family])):
        router_drift(model, model, BATCH)


def switch() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(vocab_size=64, **sizes, **sparse))


class Listed(nn.Module):
    """Experts in a list, a gate by their number, and two layers that are no routers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.output_gate = nn.Linear(64, 64)
        self.shared_expert_gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


DBRX = {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4}
ROUTERS: dict[str, tuple[Any, set[str]]] = {
    "aria": (lambda: model_of("aria"), {"model.layers.0.mlp.router"}),
    "dbrx": (
        lambda: nn.ModuleDict({"ffn": DbrxFFN(DbrxConfig(ffn_config=DBRX)), "other": nn.Linear(64, 64)}),
        {"ffn.router.layer"},
    ),
    "gemma-4": (lambda: model_of("gemma-4"), {f"model.layers.{i}.router.proj" for i in range(2)}),
    "jetmoe": (
        lambda: model_of("jetmoe"),
        {"model.layers.0.mlp.router.layer", "model.layers.0.self_attention.experts.router.layer"},
    ),
    "longcat-flash": (lambda: model_of("longcat-flash"), {"model.layers.0.mlp.router.classifier"}),
    "switch": (
        switch,
        {"encoder.block.1.layer.1.mlp.router.classifier", "decoder.block.1.layer.2.mlp.router.classifier"},
    ),
    "a list": (Listed, {"gate"}),
}
if not ARIA_SORTS:  # then the router is a module of its own class, no linear layer
    del ROUTERS["aria"]


@pytest.mark.parametrize(("make", "names"), ROUTERS.values(), ids=ROUTERS)
@pytest.mark.filterwarnings("ignore:.*matrices without support", "ignore:Config Deprecation")
def test_routers_of_linear_layers_stay_float_unless_they_are_named(make: Any, names: set[str]) -> None:
    int4 = Int4WeightConfig(32)
    by_default = FqnToConfig({"re:.*experts": None, "_default": QATConfig(int4, step="prepare")})
    for config in (QATConfig(int4, step="prepare"), by_default, None):
        model = make()
        if config is not None:
            quantize_(model, config)
        found = {w.names[0].removesuffix(".weight"): w for w in coverage(model).float_weights}
        assert {n for n, w in found.items() if "a router, which decides" in w.about and w.state == "default"} == names
        assert config is None or all(type(model.get_submodule(n)) is nn.Linear for n in names)
    assert {f"{n}.weight" for n in names} <= {
        f"{n}.{p}" for n, r in routers_of(make()).items() for p, _ in r.named_parameters()
    }
    model = make()
    quantize_(model, FqnToConfig({n: QATConfig(int4, step="prepare") for n in names}))
    assert {n for n, m in model.named_modules() if isinstance(m, QATLinear)} == names
    quantize_(model, QATConfig(step="convert"))
    assert all(isinstance(model.get_submodule(n).weight.data, PackedTensor) for n in names)


def test_a_gate_of_another_width_and_other_experts_are_no_routers() -> None:
    model = Listed()
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert isinstance(model.output_gate, QATLinear) and isinstance(model.shared_expert_gate, QATLinear)
    attention = nn.ModuleDict({"k_proj": nn.Linear(64, 8), "experts": nn.Linear(64, 8)})
    assert routers_of(attention) == {}
    beside = model_of("gemma-4")  # whose experts lie beside attention, which may have a row for each of them
    beside.model.layers[0].self_attn.q_proj = nn.Linear(64, 8, bias=False)
    assert freeze_routers(beside) == [f"model.layers.{i}.router" for i in range(2)]


def test_a_layer_without_a_routers_name_is_one_by_its_rows() -> None:
    """Beside stacked experts, where nothing has the name; of experts in a list the name alone tells."""
    stacked, listed = Called("place").experts, Listed().experts
    layers = {"chosen": nn.Linear(64, 4), "mixer": nn.Linear(64, 64), "norm": nn.LayerNorm(64)}
    model = nn.ModuleDict({"a": nn.ModuleDict({**layers, "experts": stacked})})
    assert [*routers_of(model)] == ["a.chosen"] and [*routers_of(model["a"])] == ["chosen"]
    assert routers_of(nn.ModuleDict({**layers, "experts": listed})) == {}
    named = nn.ModuleDict({**layers, "my_router": nn.Linear(64, 9), "experts": stacked})
    assert [*routers_of(named)] == ["my_router"]


def test_a_gate_has_a_row_for_each_of_the_experts_that_their_module_counts() -> None:
    """DBRX's experts are matrices, neither a list nor stacks of three dimensions."""
    experts = DbrxFFN(DbrxConfig(ffn_config=DBRX)).experts
    layers = {"gate": nn.Linear(64, 4), "output_gate": nn.Linear(64, 64)}
    assert [*routers_of(nn.ModuleDict({**layers, "experts": experts}))] == ["gate"]


def test_a_router_that_casts_its_layer_in_every_forward_runs_converted() -> None:
    torch.manual_seed(0)
    model = switch().to(torch.bfloat16).eval()
    batch = {"input_ids": IDS, "decoder_input_ids": IDS}
    names = FqnToConfig({r"re:.*(router\.classifier|experts\..*)": QATConfig("int4-g32", step="prepare")})
    quantize_(model, names)
    wanted = model(**batch).logits
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(**batch).logits, wanted)


def test_a_linear_layer_that_its_router_reads_routes_alike() -> None:
    model = model_of("longcat-flash").eval()
    for p in model.parameters():
        p.data.normal_(0, 0.05)
    quantize_(model, QATConfig("int4-g32", step="prepare"), strict=True)
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    assert [layer.changed for layer in router_drift(model, converted, BATCH)] == [0]
    assert torch.equal(model(**BATCH).logits, converted(**BATCH).logits)
