"""HybridConfig as a value: what it refuses, what it survives, and what `quantize_` makes of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
from support.hybrid_cases import assert_same, data, layer, step
from test_hybrid_training import gradients, network
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import FqnToConfig
from torchao.quantization import quantize_ as torchao_quantize

from aoquant import (
    Cast,
    HybridConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    fixed_weights,
    quantize_,
)
from aoquant.layers.qat import RANDOM
from aoquant.recipes import FP8_HYBRID, NVFP4_TRAINING, get_recipe

RHT = "te-hadamard16-sd7e8"
MIXES = ("mxfp8-nvfp4", "nvfp4-mxfp8", "fp8-hybrid", "nvfp4-training", "mxfp8-hp", "nvfp4-hp")


@pytest.mark.parametrize(
    ("casts", "said"),
    [
        ({"dgrad_grad_output": "mxfp8"}, "dgrad have one format.*got grad_output mxfp8 and weight high precision"),
        ({"wgrad_input": "mxfp8"}, "wgrad have one format.*got grad_output high precision and input mxfp8"),
        ({"dgrad_grad_output": "mxfp8", "dgrad_weight": "mxfp4"}, "dgrad .*grad_output mxfp8 and weight mxfp4"),
        ({"wgrad_grad_output": "te-fp8-tensor", "wgrad_input": "te-fp8-1x128"}, "wgrad .*FP8 in blocks of 128"),
        ({"wgrad_grad_output": f"{RHT}+te-nvfp4", "wgrad_input": "te-nvfp4"}, "wgrad have one transform"),
        (
            {"wgrad_grad_output": f"{RHT}+te-nvfp4", "wgrad_input": "te-hadamard16-s1+te-nvfp4"},
            "wgrad have one transform",
        ),
        (
            {"dgrad_grad_output": Cast("mxfp8", "forward"), "dgrad_weight": "mxfp8"},
            "dgrad: grad_output mxfp8: a gradient has",
        ),
        (
            {"wgrad_grad_output": Cast(None, "forward")},
            "wgrad: grad_output high precision: a gradient has no forward value",
        ),
        ({"dgrad_grad_output": "nvfp4-sr", "dgrad_weight": "nvfp4-sr"}, "dgrad: weight nvfp4-sr rounds at random"),
        (
            {"wgrad_grad_output": "rht32+mxfp4", "wgrad_input": "rht32+mxfp4"},
            r"wgrad: input rht32\+mxfp4: a rotation that is drawn",
        ),
        ({"fprop_weight": "nvfp4-sr"}, "fprop: fprop_weight nvfp4-sr rounds at random"),
        ({"fprop_input": Cast("mxfp8", "forward")}, "fprop: fprop_input: forward starts from the original"),
        ({"fprop_weight": "mxfp9"}, "fprop_weight: no format is called 'mxfp9'"),
        ({"dgrad_weight": Cast(None, "row")}, "dgrad: weight high precision: the source is one of original, forward"),
        ({"save": "row"}, "save is one of col, hp"),
        ({"seed": -1}, "seed must be an integer"),
        ({"dgrad_weight": 8}, "dgrad_weight is a Cast, the name of a format or None, got 8"),
        (
            {"dgrad_grad_output": "nvfp4-sr", "dgrad_weight": "nvfp4-sr"},
            "nvfp4-sr rounds at random.*; got grad_output nvfp4-sr and weight nvfp4-sr",
        ),
        (
            {"fprop_input": "hadamard16+mxfp4", "fprop_weight": "hadamard16+mxfp4"},
            "a backward whose casts have sources needs a forward without a transform",
        ),
        (
            {"fprop_input": f"{RHT}+te-nvfp4", "fprop_weight": f"{RHT}+te-nvfp4"},
            "te-hadamard stands before both operands of wgrad",
        ),
        ({"fprop_input": "mxfp8", "fprop_weight": "mxfp8", "amax_history": 16}, "delayed scaling is for te-fp8-tensor"),
        ({"dgrad_grad_output": "mxfp8", "dgrad_weight": "mxfp8", "amax_history": 16}, "delayed scaling is for"),
        ({"amax_history": 16}, "delayed scaling is for"),
    ],
)
def test_5_mismatches_are_refused_at_construction(casts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"HybridConfig: .*{said}"):
        HybridConfig(**casts)


@pytest.mark.parametrize(
    ("grad", "other"),
    [
        ("te-fp8-e5m2-tensor", "te-fp8-tensor"),
        ("te-fp8-e5m2-1x128", "te-fp8-128x128"),
        ("mxfp8-e5m2", "mxfp8"),
        ("nvfp4-sr", "te-nvfp4-16x16"),
        ("mxfp4-sr", "mxfp4"),
        (f"{RHT}+nvfp4-sr", f"{RHT}+te-nvfp4"),
    ],
)
def test_5_a_family_is_allowed(grad: str, other: str) -> None:
    config = HybridConfig(wgrad_grad_output=grad, wgrad_input=other)
    assert (config.cast("wgrad_grad_output").format, config.cast("wgrad_input").format) == (grad, other)
    drawn = HybridConfig(wgrad_grad_output="rht32+mxfp4-sr", wgrad_input=Cast("rht32+mxfp4", "forward"))
    assert drawn.slots()["input_source"] == "forward"


def test_18_a_config_is_a_value(tmp_path: Any) -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4", seed=7, save="hp")
    assert pickle.loads(pickle.dumps(config)) == config and hash(pickle.loads(pickle.dumps(config))) == hash(config)
    written = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(written) == config
    assert config_from_dict(config_to_dict(NVFP4_TRAINING)) == NVFP4_TRAINING
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert config.dgrad_weight == Cast("te-nvfp4", "forward") and config.wgrad_input == Cast("te-nvfp4")


def test_18_a_config_loads_weights_only(tmp_path: Any) -> None:
    """Beside weights in a checkpoint."""
    for config in (NVFP4_TRAINING, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4", seed=7)):
        torch.save({"config": config, "weight": torch.ones(2)}, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt", weights_only=True)["config"]
        assert again == config and hash(again) == hash(config)


def test_18_weights_only_load(tmp_path: Any) -> None:
    linear = layer(get_recipe("nvfp4-training").prepare())
    step(linear, *data())
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = layer(get_recipe("nvfp4-training").prepare())
    other.load_state_dict(state)
    assert torch.equal(other.backward_random, linear.backward_random) and other.backward_random[2] == 1


def test_the_forward_is_what_convert_deploys() -> None:
    config = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, config)
    x = torch.randn(5, 64)
    with torch.no_grad():
        wanted = model(x)
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(x), wanted)
    weight = model[0].weight
    assert isinstance(weight, PackedTensor) and (weight.format, weight.activation) == ("mxfp8", "mxfp8")


def test_by_layer_and_by_torchao() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    quantize_(
        model, FqnToConfig({"a": HybridConfig.fwd_bwd("mxfp8", None), "b": HybridConfig.fwd_bwd(None, "te-nvfp4")})
    )
    assert model["a"].prepared.recipe.fprop_weight.name == "mxfp8"
    assert model["b"].prepared.recipe.wgrad_input.name == "te-nvfp4"
    other = nn.Sequential(nn.Linear(64, 64))
    torchao_quantize(other, HybridConfig.fwd_bwd("mxfp8", None))
    assert other[0].prepared.recipe == model["a"].prepared.recipe


def test_beside_a_base() -> None:
    linear = layer(QATConfig(NVFP4WeightConfig(), backward=HybridConfig.bwd("mxfp8", seed=3)))
    recipe = linear.prepared.recipe
    assert recipe.deployed == NVFP4WeightConfig().recipe().deployed and recipe.dgrad_weight.name == "mxfp8"
    assert linear.prepared.config.seed == 3
    agreeing = HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")
    assert layer(QATConfig(MXFP8WeightConfig(), backward=agreeing)).prepared.recipe.fprop_weight.name == "mxfp8"
    both = "input mxfp8 and weight mxfp8, and the base deploys input nvfp4-row and weight nvfp4: give the base with"
    with pytest.raises(ValueError, match=both):
        layer(QATConfig(NVFP4WeightConfig(), backward=agreeing))
    with pytest.raises(ValueError, match=r"convert it first.*HybridConfig\.bwd\(\.\.\.\) changes its backward alone"):
        quantize_(nn.ModuleDict({"layer": linear}), QATConfig(NVFP4WeightConfig(), backward="mxfp8"))
    with pytest.raises(ValueError, match="seed=5, and its HybridConfig has seed=3: give one of them"):
        QATConfig(NVFP4WeightConfig(), backward=HybridConfig.bwd("mxfp8", seed=3), seed=5)
    with pytest.raises(ValueError, match="leaves fprop to a base needs one"):
        layer(HybridConfig.bwd("mxfp8"))
    with pytest.raises(ValueError, match="without a transform"):
        layer(QATConfig("nvfp4-h16", backward=HybridConfig.bwd("mxfp8")))


def test_5_where_a_hybrid_config_cannot_stand() -> None:
    with pytest.raises(ValueError, match=r"give quantize_ the HybridConfig itself, or QATConfig\(base, backward="):
        QATConfig(HybridConfig.fwd_bwd("mxfp8", "mxfp8"))
    for wrong in ({}, 8, MXFP8WeightConfig()):
        with pytest.raises(ValueError, match="backward is quartet, quartet2, the name of a format for gradients"):
            QATConfig(MXFP8WeightConfig(), backward=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MIXES)
def test_recipes(name: str) -> None:
    linear = layer(get_recipe(name).prepare())
    assert all(torch.isfinite(t).all() for t in step(linear, *data()).values())
    assert linear.prepared.recipe.draws == (name == "nvfp4-training") == (RANDOM in linear._buffers)


def test_25_a_new_config_takes_effect_at_the_next_step() -> None:
    x, g = data()
    wanted = step(layer(HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")), x, g)
    model = nn.ModuleDict({"layer": layer(HybridConfig.fwd_bwd("mxfp8", "mxfp8"))})
    before = step(model["layer"], x, g)
    quantize_(model, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4"))
    after = step(model["layer"], x, g)
    assert all(torch.equal(after[k], wanted[k]) for k in wanted) and not torch.equal(before["x"], after["x"])
    with pytest.raises(ValueError, match="a HybridConfig replaces backward alone"):
        quantize_(model, QATConfig(NVFP4WeightConfig(), backward=HybridConfig.bwd("mxfp8")))
    with pytest.raises(ValueError, match="is prepared already"):
        quantize_(model, QATConfig(MXFP8WeightConfig(), backward="mxfp8"))


def test_25_the_random_state_stays() -> None:
    model = nn.ModuleDict({"layer": layer(get_recipe("nvfp4-training").prepare(seed=5))})
    step(model["layer"], *data())
    state = model["layer"].backward_random.clone()
    quantize_(model, NVFP4_TRAINING.replaced(save="hp"))
    assert torch.equal(model["layer"].backward_random, state) and state[0] == 5 and state[2] == 1


DELAYED = FP8_HYBRID.replaced(amax_history=16)
STARTS = {
    "quartet": (QATConfig("mxfp8", backward="quartet"), HybridConfig.bwd("te-nvfp4")),
    "drawing": (get_recipe("nvfp4-training").prepare(), HybridConfig.bwd("mxfp8")),
    "delayed": (QATConfig("fp8-hybrid", backward=DELAYED), FP8_HYBRID),
    "current": (get_recipe("fp8-hybrid").prepare(), DELAYED),
}


@pytest.mark.parametrize("start", STARTS)
def test_25_a_model_of_two_layers_from_any_start(start: str) -> None:
    """After a step of the old config, a step of the new one is a freshly prepared model's."""
    first, new = STARTS[start]
    model, fresh = network(first), network(dataclasses.replace(first, backward=new, straight_through="identity"))
    gradients(model, model)
    quantize_(model, new)
    for name, wanted in fresh.named_modules():
        if hasattr(wanted, "prepared"):
            assert model.get_submodule(name).prepared.recipe == wanted.prepared.recipe
    assert_same(gradients(model, model), gradients(fresh, fresh))


def test_25_after_quartet_its_trust_mask_goes() -> None:
    """Quest's scales clip, so that the mask shows."""
    x, g = data()
    base = MXFP4WeightConfig(rule="quest")
    model = nn.ModuleDict({"layer": layer(QATConfig(base, backward="quartet"))})
    quantize_(model, HybridConfig.bwd("mxfp8"))
    wanted = layer(QATConfig(base, backward=HybridConfig.bwd("mxfp8")))
    assert model["layer"].prepared.recipe == wanted.prepared.recipe
    assert_same(step(model["layer"], x, g), step(wanted, x, g))
    model = nn.ModuleDict({"layer": layer(QATConfig(base, backward="mxfp4", straight_through="clipped"))})
    quantize_(model, HybridConfig.bwd("mxfp8"))
    assert model["layer"].prepared.recipe.straight_through == "clipped", "which was asked for"


def test_25_states_of_an_earlier_recipe_are_not_asked_for() -> None:
    """A checkpoint of a model whose backward no longer draws, and one of a model that never did."""
    changed = nn.ModuleDict({"layer": layer(get_recipe("nvfp4-training").prepare())})
    step(changed["layer"], *data())
    quantize_(changed, HybridConfig.bwd("te-nvfp4"))
    assert RANDOM in changed["layer"]._buffers, "it goes on when the backward draws again"
    fresh = nn.ModuleDict({"layer": layer(QATConfig("nvfp4-training", backward=HybridConfig.bwd("te-nvfp4")))})
    state = fresh.state_dict()
    fresh.load_state_dict(changed.state_dict())
    assert_same(step(fresh["layer"], *data()), step(changed["layer"], *data()))
    changed.load_state_dict(state)


def test_25_inside_fixed_weights() -> None:
    """The columns of the old recipe are not those of the new one."""
    x, g = data()
    start = HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4")
    for new in (start.replaced(dgrad_weight=Cast("te-nvfp4")), HybridConfig.fwd_bwd("te-nvfp4", "mxfp8")):
        model = nn.ModuleDict({"layer": layer(start)})
        with fixed_weights(model):
            step(model["layer"], x, g)
            pending = model["layer"](x.detach().requires_grad_())
            quantize_(model, new)
            assert_same(step(model["layer"], x, g), step(layer(new), x, g))
            pending.backward(g)  # by the recipe of its forward


def test_25_compile_recompiles_once() -> None:
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model = nn.ModuleDict({"layer": layer(HybridConfig.fwd_bwd("mxfp8", "mxfp8"))})
    run = torch.compile(model["layer"], backend=backend, fullgraph=True)
    x, g = data()
    for config in (None, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4")):
        if config is not None:
            quantize_(model, config)
        for _ in range(3):
            run(x).backward(g)
    assert len(compiled) == 2
