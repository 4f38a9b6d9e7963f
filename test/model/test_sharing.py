"""Modules under several names and weights of several modules: quantised once and for all users, or not at all."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torchao
from support.models import IDS, TiedLM, everything
from torch import nn
from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig, PerGroup

from aoquant import Int4WeightConfig, Int8WeightConfig, NVFP4WeightConfig, PackedTensor, QATConfig, quantize_, verify
from aoquant.linear.embedding import QATEmbedding
from aoquant.linear.prepared import QATLinear
from aoquant.planning.adapters import adapter_problem

CONFIGS = {
    "aoquant": Int4WeightConfig(32),
    "torchao": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "activations": NVFP4WeightConfig(),  # the head's
}


@pytest.mark.parametrize("convert", [quantize_, torchao.quantize_], ids=["aoquant's", "torchao's"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tied_embedding_and_head_are_one_weight_and_one_packed_tensor(config: Any, convert: Any) -> None:
    model = TiedLM()
    quantize_(model, QATConfig(config, step="prepare"), filter_fn=everything)
    assert (type(model.embed), type(model.lm_head)) == (QATEmbedding, QATLinear)
    assert model.embed.weight is model.lm_head.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(IDS).float().logsumexp(-1).sum().backward()
    optimizer.step()
    y = model(IDS)
    prepared = copy.deepcopy(model)
    convert(model, QATConfig(config, step="convert"), filter_fn=everything)
    assert model.embed.weight is model.lm_head.weight
    assert type(model.embed) is nn.Embedding and not isinstance(model.lm_head, QATLinear)
    assert torch.equal(model(IDS), y)
    found = verify(prepared, model, IDS)
    assert [(r.fqn, r.activation) for r in found.layers if r.fqn == "embed"] == [("embed", "")]


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_uses() -> None:
    tied, apart = TiedLM(), TiedLM(tied=False)
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"), filter_fn=everything)
        model(IDS).float().logsumexp(-1).sum().backward()
    both = [m.weight.grad for m in (apart.embed, apart.lm_head)]
    assert all(g.any() for g in both)
    torch.testing.assert_close(tied.embed.weight.grad, both[0] + both[1], rtol=0.01, atol=1e-3)


def test_equal_weights_that_nobody_tied_stay_two() -> None:
    model = TiedLM(tied=False)
    model.load_state_dict(TiedLM().state_dict())
    torchao.quantize_(model, Int4WeightConfig(32), filter_fn=everything)
    gc.collect()
    assert isinstance(model.embed.weight, PackedTensor)
    assert model.embed.weight is not model.lm_head.weight


@pytest.mark.parametrize("step", ["prepare", "convert", "quantize"])
@pytest.mark.parametrize(("chosen", "left"), [("embed", "lm_head"), ("lm_head", "embed")])
def test_one_of_two_users_is_refused_naming_both(chosen: str, left: str, step: str) -> None:
    model, config = TiedLM(), Int4WeightConfig(32)
    if step == "convert":
        quantize_(model, QATConfig(config, step="prepare"), filter_fn=everything)
    classes = [type(m) for m in model.modules()]
    wrapped = config if step == "quantize" else QATConfig(config, step=step)
    with pytest.raises(ValueError, match=rf"{chosen}: .*\(embed.weight, lm_head.weight\).*{left}"):
        quantize_(model, wrapped, filter_fn=lambda m, fqn: fqn == chosen)
    assert [type(m) for m in model.modules()] == classes
    if step != "convert":  # untied, it works
        getattr(model, left).weight = nn.Parameter(getattr(model, left).weight.detach().clone())
        quantize_(model, wrapped, filter_fn=lambda m, fqn: fqn == chosen)


def test_the_default_leaves_a_tied_pair_alone() -> None:
    model = TiedLM()
    quantize_(model, Int4WeightConfig(32))
    assert type(model.embed.weight) is nn.Parameter
    assert model.embed.weight is model.lm_head.weight
    assert isinstance(model.up.weight, PackedTensor)


def test_tied_layers_take_one_config() -> None:
    configs = {"embed": Int8WeightConfig(), "lm_head": Int4WeightConfig(32)}
    with pytest.raises(ValueError, match="embed, lm_head: "):
        quantize_(TiedLM(), FqnToConfig(configs))
    model = TiedLM()
    quantize_(model, FqnToConfig({"re:embed|lm_head": Int8WeightConfig(), "up": Int4WeightConfig(32)}))
    assert model.embed.weight is model.lm_head.weight
    assert (model.embed.weight.format, model.up.weight.format) == ("int8-row", "int4-g32")


class Twice(nn.Module):
    """One block under two names, as layer-sharing models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.second = self.first
        self.out = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(self.first(x)))


def test_a_shared_module_is_named_by_all_its_names() -> None:
    model = Twice()
    with pytest.raises(ValueError, match=r"first.0, second.0 \(64, 64\)"):
        quantize_(model, Int4WeightConfig(48), filter_fn=lambda m, fqn: fqn.endswith(".0"))
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    with pytest.raises(ValueError, match=r"first.0, second.0: "):
        model(torch.randn(2, 32))
    x = torch.randn(2, 64)
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert model.first[0] is model.second[0]
    assert isinstance(model.first[0].weight, PackedTensor)
    assert torch.equal(model(x), y)


def test_a_shared_module_is_chosen_under_all_its_names_or_none() -> None:
    for chosen in ({"first.0": Int8WeightConfig()}, {"first.0": Int8WeightConfig(), "second.0": Int4WeightConfig(32)}):
        model = Twice()
        with pytest.raises(ValueError, match=r"first.0, second.0: "):
            quantize_(model, FqnToConfig(chosen))
        assert type(model.first[0].weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"first.0, second.0: "):
        quantize_(Twice(), Int8WeightConfig(), filter_fn=lambda m, fqn: fqn == "second.0")
    quantize_(model, FqnToConfig({r"re:(first|second)\.0": Int8WeightConfig()}))
    assert isinstance(model.second[0].weight, PackedTensor)


def test_what_an_adapter_lets_happen_to_its_base() -> None:
    """A stand-in for peft's tuner layers."""
    model, base = nn.ModuleDict({"up": nn.Module(), "down": nn.Linear(4, 4)}), nn.Linear(4, 4)
    model["up"].base_layer, model["up"].merged = base, False  # type: ignore[assignment]
    assert "its adapter is not merged" in (adapter_problem(model, base, "up.base_layer", "convert") or "")
    for kind in ("prepare", "quantize"):
        assert "is part of an adapted layer" in (adapter_problem(model, base, "up.base_layer", kind) or "")
        assert adapter_problem(model, model["down"], "down", kind) is None
    model["up"].merged = True  # type: ignore[assignment]
    assert adapter_problem(model, base, "up.base_layer", "convert") is None
