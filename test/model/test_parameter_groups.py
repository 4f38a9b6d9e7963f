"""Learned scales in the optimizer: a group of their own, and a warning when they are not positive."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import trainers
from support.models import llama
from support.moe_models import MODELS, model_of
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig, PerAxis, PerGroup
from transformers import Trainer

import aoquant
from aoquant import AoquantWarning, Int8WeightConfig, IntxWeightConfig, QATConfig, calibrate, quantize_
from aoquant.linear.learned_scales import learned_scales, not_positive

IDS = torch.arange(4 * 8).reshape(4, 8) % 31
CONFIGS: dict[str, Any] = {
    "int8": Int8WeightConfig(),
    "int8-tensor": Int8WeightConfig("tensor"),
    "static activation": Int8WeightConfig(activation="int8-tensor-static"),
    "static asymmetric activation": Int8WeightConfig(activation="int8-tensor-asym-static"),
    "intx4-g32": IntxWeightConfig(4, 32),
    "intx4-row": IntxWeightConfig(4, None),
    "torchao intx": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "torchao axis": IntxWeightOnlyConfig(torch.int8, PerAxis(0)),
    "torchao int8": Int8DynamicActivationInt8WeightConfig(),
}
every = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def prepared(config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = llama(dtype=torch.float32, vocab_size=32, **(size | options))
    quantize_(model, QATConfig(config, scales="learned"))
    calibrate(model, lambda m: m(IDS))
    return model


def trainer(model: nn.Module, folder: Path, optimizer: Any = None, **arguments: Any) -> Trainer:
    made = trainers.trainer(model, folder, IDS, 2, **({"learning_rate": 1e-6, "weight_decay": 0.5} | arguments))
    made.optimizer = optimizer
    return made


@every
def test_every_parameter_is_in_one_group_and_scales_have_their_own(config: Any) -> None:
    model = prepared(config)
    model.model.norm.weight.requires_grad_(False)
    groups = {g["name"]: g for g in aoquant.parameter_groups(model, weight_decay=0.1, scale_lr=1e-5)}
    every = [id(p) for g in groups.values() for p in g["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    scales = {id(p) for n, p in model.named_parameters() if n.endswith(("input_scale", "weight_scale"))}
    assert len(scales) >= 7 and {id(p) for p in groups["scales"]["params"]} == scales
    decays = {n: g["weight_decay"] for n, g in groups.items()}
    assert decays == {"matrices": 0.1, "others": 0.1, "vectors": 0.0, "scales": 0.0}
    assert groups["scales"]["lr"] == 1e-5 and "lr" not in groups["matrices"]
    dims = {n: {p.dim() for p in groups[n]["params"]} for n in ("matrices", "vectors")}
    assert dims == {"matrices": {2}, "vectors": {1}}
    others = {id(p) for p in groups["others"]["params"]}
    assert others == {id(model.lm_head.weight), id(model.model.embed_tokens.weight)}


@every
def test_scales_stay_positive_under_decay_and_muon(config: Any) -> None:
    """The same optimizers over all that has two dimensions move them below zero."""
    model = prepared(config)
    groups = {g["name"]: g for g in aoquant.parameter_groups(model, weight_decay=0.5)}
    before = {n: p.detach().clone() for n, p in learned_scales(model).items()}
    muon = torch.optim.Muon(groups.pop("matrices")["params"], lr=1e-2)
    adamw = torch.optim.AdamW([g | {"lr": 0.0} for g in groups.values()], lr=0.0)
    model(IDS, labels=IDS).loss.backward()
    muon.step()
    adamw.step()
    assert all(torch.equal(p, before[n]) for n, p in learned_scales(model).items())


def test_stacked_experts_tied_weights_and_empty_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    assert [g["name"] for g in aoquant.parameter_groups(model)] == ["matrices"]
    tied = prepared(Int8WeightConfig(), tied=True)
    (others,) = [g["params"] for g in aoquant.parameter_groups(tied) if g["name"] == "others"]
    assert [id(p) for p in others] == [id(tied.lm_head.weight)]
    moe = model_of(next(iter(MODELS)))
    found = {g["name"]: g["params"] for g in aoquant.parameter_groups(moe)}
    assert any(p.dim() == 3 for p in found["others"]) and all(p.dim() == 2 for p in found["matrices"])


@pytest.mark.parametrize(
    "options", [{"weight_decay": -0.1}, {"scale_lr": -1.0}, {"weight_decay": float("nan")}], ids=str
)
def test_bad_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        aoquant.parameter_groups(nn.Linear(4, 4), **options)


@every
def test_trainer_does_not_decay_scales(config: Any, tmp_path: Path) -> None:
    model = prepared(config)
    made = trainer(model, tmp_path)
    optimizer = made.create_optimizer()
    assert optimizer is not None
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {decays[id(p)] for p in learned_scales(model).values()} == {0.0}
    assert decays[id(model.model.layers[0].mlp.up_proj.weight)] == 0.5
    with warnings.catch_warnings(action="error", category=AoquantWarning):
        made.train()


@pytest.mark.parametrize("kind", ["decay", "muon"])
def test_trainer_warns_of_an_optimizer_that_moves_scales_as_matrices(kind: str, tmp_path: Path) -> None:
    model = prepared(Int8WeightConfig())
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.1)
    if kind == "muon":
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 1e-6, weight_decay=0.0)
    with pytest.warns(AoquantWarning, match=r"7 .*q_proj\.weight_scale"):
        trainer(model, tmp_path, optimizer).train()


@pytest.mark.parametrize("value", [0.0, -1e-4])
def test_a_scale_that_is_not_positive_is_told_at_log_save_and_convert(value: float, tmp_path: Path) -> None:
    told = r"not positive.*model\.layers\.0\.mlp\.up_proj\.weight_scale"
    model = prepared(Int8WeightConfig())
    model.model.layers[0].mlp.up_proj.weight_scale.data[3] = value
    frozen = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.warns(AoquantWarning, match=told):
        trainer(copy.deepcopy(model), tmp_path / "log", torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.0)).train()
    quiet = trainer(model, tmp_path / "save", frozen, logging_strategy="no", save_strategy="steps", save_steps=1)
    with pytest.warns(AoquantWarning, match=told):
        quiet.train()
    y = model(IDS).logits
    with pytest.warns(AoquantWarning, match=told):
        quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(IDS).logits, y)
    model = prepared(Int8WeightConfig())
    assert not_positive(model) is None
    model.model.layers[0].mlp.up_proj.weight_scale.data[3] = float("nan")
    assert "up_proj.weight_scale (nan)" in str(not_positive(model))
