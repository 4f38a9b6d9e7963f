"""What stays float is counted, said, and raised where asked for; choices that cannot be honoured are never silent."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from support.expert_cases import Holder
from support.models import TiedLM
from torch import nn
from torchao.quantization import FqnToConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import aoquant
from aoquant import IntxWeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.linear.prepared import QATLinear
from aoquant.planning import choose, tied
from aoquant.report import verify


class Experts(nn.Module):
    """Experts as transformers stacks them: one 3-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bk,enk->bn", x, self.gate_up_proj)


class Model(nn.Module):
    """4096 parameters in a linear layer, 16384 in experts, 1024 in an embedding, 1024 + 64 in small things and a
    bag.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.up = nn.Linear(64, 64, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.experts(self.up(x)))


def states(model: nn.Module) -> dict[str, str]:
    return {name: w.state for w in aoquant.coverage(model).weights for name in w.names}


def quiet(*args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings(action="error"):
        quantize_(*args, **kwargs)


def test_every_parameter_is_counted_once_with_its_state() -> None:
    model = Model()
    assert states(model) == {
        "embed.weight": "default",
        "up.weight": "left out",
        "experts.gate_up_proj": "unsupported",
        "2 biases, norms and scales": "small",
    }
    found = aoquant.coverage(model)
    assert (found.elements, found.share, found.bytes_share) == (1024 + 4096 + 16384 + 128, 0.0, 0.0)
    with pytest.warns(UserWarning, match="stay float"):
        quantize_(model, QATConfig("int4-g32", step="prepare"))
    assert states(model)["up.weight"] == "prepared"
    quiet(model, QATConfig(step="convert"))  # prepare has said it
    found = aoquant.coverage(model)
    assert states(model)["up.weight"] == "quantised"
    assert found.share == 4096 / found.elements
    packed = 64 * (
        32 + 2 * 2 * 2
    )  # nibbles, and bf16 scales and zeros would be 2 bytes; float32 weights keep float32 ones
    assert packed <= next(w for w in found.weights if w.state == "quantised").bytes < 4 * 4096
    assert "experts.gate_up_proj" in found.to_markdown() and json.dumps(found.to_dict()) and "18.9%" in str(found)


def test_stacked_experts_are_named_by_everything_and_strict_raises() -> None:
    """Unless they are left out by name: then nothing is said, not even that the name matches nothing."""
    model = Model()
    with pytest.warns(UserWarning, match=r"75\.7% .*experts.gate_up_proj \(4x64x64\)"):
        quantize_(model, QATConfig("int4-g32", step="prepare"))
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(step="convert"))
    with pytest.warns(UserWarning, match=r"verified, but .*experts.gate_up_proj") as said:
        found = verify(model, converted, torch.randn(3, 64))
    assert [w.filename for w in said] == [__file__]
    assert found.coverage.share == aoquant.coverage(converted).share and "- experts.gate_up_proj" in found.to_markdown()
    totals = json.loads(found.to_json())["totals"]["coverage"]
    assert [w["names"] for w in totals["float_weights"]] == [["experts.gate_up_proj"], ["embed.weight"]]
    model = Model()
    with pytest.raises(ValueError, match=r"strict: 1 .*experts.gate_up_proj"):
        quantize_(model, QATConfig("nvfp4", step="prepare"), strict=True)
    assert type(model.up) is nn.Linear
    names = {"experts.gate_up_proj": None, "up.weight": QATConfig("int4-g32", step="prepare")}
    quiet(model, FqnToConfig(names), strict=True)
    assert type(model.up) is QATLinear
    quiet(Model(), FqnToConfig({"experts": None, "up": "int4-g32"}))
    quiet(Model(), "int4-g32", lambda m, fqn: fqn == "up", strict=True)
    covered = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    quiet(covered, QATConfig("int8-weight", step="prepare"), strict=True)


def everything(module: nn.Module, fqn: str) -> bool:
    return True


def test_a_convolution_and_a_bag_are_named_when_a_filter_picks_them() -> None:
    with pytest.warns(UserWarning, match=r"0.weight \(64x8x3x3\): Conv2d"):
        quantize_(nn.Sequential(nn.Conv2d(8, 64, 3), nn.Linear(64, 64)), "int4-g32")
    with pytest.warns(UserWarning, match=r"0.weight \(4x64\): .*EmbeddingBag"):
        quantize_(nn.Sequential(nn.EmbeddingBag(4, 64), nn.Linear(64, 512)), "int4-g32", everything)
    with pytest.raises(ValueError, match=r"EmbeddingBag$"):
        quantize_(nn.Sequential(nn.EmbeddingBag(4, 64), nn.LayerNorm(64)), "int4-g32", everything)
    # a filter that reads in_features is not broken by modules without them
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Linear(64, 64))
    quantize_(model, "int4-g32", filter_fn=lambda m, fqn: m.in_features == 64)
    assert isinstance(model[1].weight, PackedTensor)


NORMS = {
    "no weight": nn.LayerNorm(64, elementwise_affine=False),
    "no bias": nn.LayerNorm(64, bias=False),
    "no weight of a batch": nn.BatchNorm1d(64, affine=False),
    "no weight of groups": nn.GroupNorm(2, 64, affine=False),
    "no bias of a convolution": nn.Conv1d(64, 64, 1, bias=False),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("filter_fn", [None, everything])
@pytest.mark.filterwarnings("ignore:.*Conv1d")
def test_modules_without_some_parameters_stay_as_they_are(norm: nn.Module, filter_fn: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), copy.deepcopy(norm))
    before = model[1].state_dict()
    quantize_(model, "int4-g32", filter_fn)
    assert isinstance(model[0].weight, PackedTensor) and type(model[1]) is type(norm)
    assert model[1].state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model[1].state_dict().items())
    with pytest.raises(ValueError, match="nothing to quantise"):
        quantize_(model[1:], "int4-g32", filter_fn)
    for key in (f"1.{name}" for name in norm._parameters):
        for config in (None, aoquant.Int4WeightConfig(32)):
            with (
                pytest.raises(ValueError, match=f"nothing to quantise|{key}"),
                warnings.catch_warnings(action="ignore"),
            ):
                quantize_(model[1:], FqnToConfig({key: config}))


@pytest.mark.parametrize("key", ["experts.gate_up_proj", "re:.*gate_up_proj", "norm.weight"])
def test_a_key_that_names_a_parameter_is_refused(key: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"names the parameter (experts.gate_up_proj|norm.weight) .*cannot quantise"):
        quantize_(model, FqnToConfig({key: "int4-g32", "up": "int4-g32"}))
    assert type(model.up.weight) is nn.Parameter


def tied_by_memory() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[2].weight = nn.Parameter(model[0].weight.data)
    assert model[2].weight is not model[0].weight
    return model


def test_two_parameters_over_one_memory_are_tied() -> None:
    model = tied_by_memory()
    assert [w.names for w in aoquant.coverage(model).weights if w.elements == 4096] == [("0.weight", "2.weight")]
    x = torch.randn(2, 64)
    quantize_(model, QATConfig("int4-g32", step="prepare"))
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert model[0].weight is model[2].weight
    assert torch.equal(model(x), y)
    with pytest.raises(ValueError, match=r"tied \(0.weight, 2.weight\)"):
        quantize_(tied_by_memory(), "int4-g32", filter_fn=lambda m, fqn: fqn == "0")


def test_skip_incompatible_leaves_out_what_cannot_and_says_why() -> None:
    """Both users of a weight."""
    config = QATConfig("int4-g128", step="prepare")
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))
    with pytest.raises(ValueError, match=r"strict: 1 .*1.weight"):
        quantize_(model, config, skip_incompatible=True, strict=True)
    with pytest.raises(ValueError, match="none of the 2 chosen"):
        quantize_(model, "int4-g256/", skip_incompatible=True)
    with pytest.warns(UserWarning, match=r"(?s)1 layer.*1 \(128, 64\): .*K = 64"):
        quantize_(model, config, skip_incompatible=True)
    assert [type(m) for m in model] == [QATLinear, nn.Linear]
    row = next(w for w in aoquant.coverage(model).weights if w.names == ("1.weight",))
    assert (row.state, "K = 64" in row.about) == ("incompatible", True)
    both = tied_by_memory().append(nn.Linear(128, 64))
    with pytest.warns(UserWarning, match="2 layer"):
        quantize_(both, "int4-g128", skip_incompatible=True)
    assert [isinstance(both[i].weight, PackedTensor) for i in (0, 2, 3)] == [False, False, True]


def test_more_than_a_twentieth_of_a_model_is_worth_a_warning() -> None:
    for width, said in ((53, True), (96, False)):  # of 3701 parameters 256 are unsupported, and of 6496
        model = nn.Sequential(nn.EmbeddingBag(4, 64), nn.Linear(64, width))
        share = 256 / aoquant.coverage(model).elements
        assert (0.05 < share < 0.1) == said
        if said:
            with pytest.warns(UserWarning, match="stay float"):
                quantize_(model, "int4-g32")
        else:
            quiet(model, "int4-g32")


def test_empty_views_of_one_memory_are_not_tied() -> None:
    memory = torch.randn(4, 4)
    assert tied.identity(memory[:2]) == tied.identity(memory[:2]) != tied.identity(memory[2:])
    one, other = memory[:0], memory[:0]
    assert tied.identity(one) != tied.identity(other)


def test_biases_of_experts_and_scales_of_prepared_layers_are_small() -> None:
    experts = Holder(GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=4)))
    assert states(experts) == {
        "experts.gate_up_proj": "left out",
        "experts.down_proj": "left out",
        "2 biases, norms and scales": "small",
    }
    model = nn.Sequential(nn.Linear(64, 64))
    quiet(model, QATConfig(IntxWeightConfig(4, 32), step="prepare", scales="learned"))
    assert states(model) == {"0.weight": "prepared", "2 biases, norms and scales": "small"}
    assert model[0].weight_scale.shape == (64, 2)


def test_recipes_of_experts_say_so_on_a_model_without_experts() -> None:
    for config in ("int4-g32-experts", QATConfig("mxfp4-experts", step="prepare")):
        with pytest.raises(ValueError, match=r"for experts alone .*Sequential has no experts"):
            quantize_(nn.Sequential(nn.Linear(64, 64)), config)


def test_the_head_and_the_embedding_are_left_out_by_default() -> None:
    assert {states(TiedLM(tied=False))[f"{name}.weight"] for name in ("embed", "lm_head")} == {"default"}
    (weight,) = (w for w in aoquant.coverage(TiedLM(tied=True)).weights if "embed.weight" in w.names)
    assert weight.names == ("embed.weight", "lm_head.weight") and "tied" in weight.about


class Shifted(nn.Embedding):
    """An embedding whose forward does not read rows as nn.Embedding does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) @ self.weight.T @ self.weight


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_cannot_be_quantised_is_not_said_to_wait_for_its_name(tied: bool) -> None:
    model = TiedLM(tied=tied)
    model.embed.__class__ = Shifted
    (weight,) = (w for w in aoquant.coverage(model).weights if "embed.weight" in w.names)
    assert weight.state == "default" and "Shifted" in weight.about and "named" not in weight.about


class Doubled(nn.Linear):
    """A linear layer whose forward is not that of nn.Linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * input)


def test_a_subclass_of_a_layer_is_no_unsupported_parameter() -> None:
    found = aoquant.coverage(nn.Sequential(Doubled(64, 64, bias=False)))
    (weight,) = found.weights
    assert weight.state == "subclass" and "Doubled is a subclass of Linear" in weight.about
    assert found.unexpected == (weight,) and found.problem is None


@pytest.mark.parametrize("prepares", [False, True], ids=["float", "prepared"])
def test_an_adapters_matrices_are_no_weights_beneath_it(prepares: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
    if prepares:
        quiet(model, QATConfig(IntxWeightConfig(4), step="prepare"))
    found = states(inject_adapter_in_model(LoraConfig(target_modules=["0"], r=2), model))
    matrices = {f"0.lora_{side}.default.weight": "adapter" for side in "AB"}
    layers = dict.fromkeys(("0.base_layer.weight", "1.weight"), "prepared" if prepares else "left out")
    assert found == {**matrices, **layers}


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"part.1": IntxWeightConfig(4)}, True),
        ({"part.1": None}, False),
        ({"other": IntxWeightConfig(4)}, False),
        ({"part.0": IntxWeightConfig(4), "part.1": None}, True),
        ({"_default": IntxWeightConfig(4)}, True),
    ],
)
def test_names_ask_for_modules_beneath_one(keys: Any, asked: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert choose.is_asked(FqnToConfig(keys), None, "part", model) is asked


def test_a_filter_is_a_function_of_module_and_name() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="filter_fn"):
        quantize_(model, "int4-g32", lambda module: True)  # type: ignore[arg-type, misc]
    quantize_(model, "int4-g32", lambda *names: True)
