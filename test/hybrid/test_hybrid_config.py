"""HybridConfig as a value: what it refuses, what it survives, and what `quantize_` makes of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hybrid_cases import data, layer
from support.training_cases import assert_same, batch, step, student
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
    Packed4WeightConfig,
    QATConfig,
    quantize_,
)
from aoquant.linear.prepared import RANDOM
from aoquant.quantize import config_of
from aoquant.recipes import FP8_HYBRID, NVFP4_TRAINING, get_recipe

RHT = "te-hadamard16-sd7e8"


def both(gemm: str, other: str, grad: Any, saved: Any) -> dict[str, Any]:
    return {f"{gemm}_grad_output": grad, f"{gemm}_{other}": saved}


# casts, and what the message names: the GEMM or the argument
MISMATCHES: list[tuple[dict[str, Any], str]] = [
    (both("dgrad", "weight", "mxfp8", None), "dgrad"),
    (both("wgrad", "input", None, "mxfp8"), "wgrad"),
    (both("dgrad", "weight", "mxfp8", "mxfp4"), "dgrad"),
    (both("wgrad", "input", "te-fp8-tensor", "te-fp8-1x128"), "wgrad"),
    (both("wgrad", "input", f"{RHT}+te-nvfp4", "te-nvfp4"), "wgrad"),
    (both("wgrad", "input", f"{RHT}+te-nvfp4", "te-hadamard16-s1+te-nvfp4"), "wgrad"),
    (both("dgrad", "weight", Cast("mxfp8", "forward"), "mxfp8"), "dgrad: grad_output"),
    (both("wgrad", "input", Cast(None, "forward"), None), "wgrad: grad_output"),
    (both("dgrad", "weight", "nvfp4-sr", "nvfp4-sr"), "dgrad: weight nvfp4-sr"),
    (both("wgrad", "input", "rht32+mxfp4", "rht32+mxfp4"), "wgrad: input"),
    ({"fprop_weight": "nvfp4-sr"}, "fprop: fprop_weight"),
    ({"fprop_input": Cast("mxfp8", "forward")}, "fprop: fprop_input"),
    ({"fprop_weight": "mxfp9"}, "fprop_weight"),
    ({"dgrad_weight": Cast(None, "row")}, "dgrad: weight"),
    ({"save": "row"}, "save"),
    ({"seed": -1}, "seed"),
    ({"dgrad_weight": 8}, "dgrad_weight"),
    ({"fprop_input": "hadamard16+mxfp4", "fprop_weight": "hadamard16+mxfp4"}, "a forward without a transform"),
    ({"fprop_input": f"{RHT}+te-nvfp4", "fprop_weight": f"{RHT}+te-nvfp4"}, "te-hadamard stands before"),
    ({"fprop_input": "mxfp8", "fprop_weight": "mxfp8", "amax_history": 16}, "delayed scaling"),
    (both("dgrad", "weight", "mxfp8", "mxfp8") | {"amax_history": 16}, "delayed scaling"),
    ({"amax_history": 16}, "delayed scaling"),
]


@pytest.mark.parametrize(("casts", "named"), MISMATCHES)
def test_mismatches_are_refused_at_construction(casts: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"HybridConfig: .*{named}"):
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
def test_a_family_is_allowed(grad: str, other: str) -> None:
    config = HybridConfig(wgrad_grad_output=grad, wgrad_input=other)
    assert (config.cast("wgrad_grad_output").format, config.cast("wgrad_input").format) == (grad, other)
    drawn = HybridConfig(wgrad_grad_output="rht32+mxfp4-sr", wgrad_input=Cast("rht32+mxfp4", "forward"))
    assert drawn.slots()["input_source"] == "forward"


@pytest.mark.parametrize("config", [NVFP4_TRAINING, HybridConfig.fwd_bwd("mxfp8", "te-nvfp4", seed=7, save="hp")])
def test_a_config_is_a_value(config: HybridConfig, tmp_path: Path) -> None:
    """Through pickle, torchao's JSON, and `torch.load(weights_only=True)` beside weights."""
    torch.save({"config": config, "weight": torch.ones(2)}, tmp_path / "state.pt")
    for again in (
        pickle.loads(pickle.dumps(config)),
        config_from_dict(json.loads(json.dumps(config_to_dict(config)))),
        torch.load(tmp_path / "state.pt", weights_only=True)["config"],
    ):
        assert again == config and hash(again) == hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


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


@pytest.mark.parametrize(
    ("weight", "activation", "few"), [("te-nvfp4", "mxfp8", True), ("mxfp8", None, False), ("te-nvfp4", None, True)]
)
def test_the_base_of_its_forward_says_the_weights_size(weight: str, activation: str | None, few: bool) -> None:
    """By its class, prepared and packed: transformers reads it there."""
    forward = HybridConfig.fwd_bwd(weight, "mxfp8").replaced(fprop_input=activation)
    model = nn.ModuleDict({"layer": layer(forward)})
    prepared = model["layer"].prepared.config.base_config
    quantize_(model, QATConfig(step="convert"))
    for config in (prepared, config_of(model["layer"])):
        assert (type(config) is Packed4WeightConfig) == few
        assert (config.weight, config.activation) == (weight, activation)


def test_where_a_hybrid_config_cannot_stand() -> None:
    with pytest.raises(ValueError, match=r"give quantize_ the HybridConfig itself, or QATConfig\(base, backward="):
        QATConfig(HybridConfig.fwd_bwd("mxfp8", "mxfp8"))
    for wrong in ({}, 8, MXFP8WeightConfig()):
        with pytest.raises(ValueError, match="backward is quartet, quartet2, the name of a format for gradients"):
            QATConfig(MXFP8WeightConfig(), backward=wrong)  # type: ignore[arg-type]


def test_a_new_config_takes_effect_at_the_next_step() -> None:
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


def test_the_random_state_stays() -> None:
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
def test_a_model_of_two_layers_from_any_start(start: str) -> None:
    """After a step of the old config, a step of the new one is a freshly prepared model's."""
    first, new = STARTS[start]
    model, fresh = student(first), student(dataclasses.replace(first, backward=new, straight_through="identity"))
    step(model, *batch())
    quantize_(model, new)
    for name, wanted in fresh.named_modules():
        if hasattr(wanted, "prepared"):
            assert model.get_submodule(name).prepared.recipe == wanted.prepared.recipe
    assert_same(step(model, *batch()), step(fresh, *batch()))


def test_after_quartet_its_trust_mask_goes() -> None:
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


def test_states_of_an_earlier_recipe_are_not_asked_for() -> None:
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


def test_compile_recompiles_once() -> None:
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
