"""The user surface: what prepare and convert keep, which layers they choose, and that errors leave the model alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchao
from torch import nn
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    quantize_,
)
from aoquant.config import SCHEMA, WeightConfig
from aoquant.formats import Format, get_format
from aoquant.linear.prepared import QATLinear

BASES = {
    "aoquant": NVFP4WeightConfig(),
    "torchao": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
}


class Block(nn.Module):
    """Two linears, a norm and an output head, as language models name them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, dtype=dtype)
        self.down = nn.Linear(128, 64, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.lm_head = nn.Linear(64, 32, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.down(torch.relu(self.up(x)))))


def snapshot(model: nn.Module) -> list[Any]:
    return [(n, type(m), type(getattr(m, "weight", None)), dict(m.__dict__)) for n, m in model.named_modules()]


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_prepare_keeps_everything_but_the_class(base: Any) -> None:
    model = Block().eval()
    model.up.requires_grad_(False)
    model.up.custom = "kept"
    calls = []
    model.down.register_forward_hook(lambda *_: calls.append(1))
    keys, modules = list(model.state_dict()), [id(m) for m in model.modules()]
    parameters = {n: id(p) for n, p in model.named_parameters()}

    quantize_(model, QATConfig(base, step="prepare"))
    assert type(model.up) is QATLinear
    assert [id(m) for m in model.modules()] == modules
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == keys
    assert not model.up.training
    assert not model.up.weight.requires_grad
    assert model.up.custom == "kept"
    model(torch.randn(2, 64, dtype=torch.bfloat16))

    quantize_(model, QATConfig(base, step="convert"))
    assert isinstance(model.up, nn.Linear) and not isinstance(model.up, QATLinear)
    assert [id(m) for m in model.modules()] == modules
    assert model.up.custom == "kept"
    assert not hasattr(model.up, "prepared")
    model(torch.randn(2, 64, dtype=torch.bfloat16))
    assert len(calls) == 2


def test_lm_head_is_skipped_unless_asked_for() -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    assert [type(m) for m in (model.up, model.down, model.lm_head)] == [QATLinear, QATLinear, nn.Linear]
    named = Block()
    quantize_(named, NVFP4WeightConfig(), filter_fn=lambda module, fqn: fqn == "lm_head")
    assert isinstance(named.lm_head.weight, PackedTensor)
    assert not isinstance(named.up.weight, PackedTensor)


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_bare_root_linear_works(base: Any) -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    quantize_(linear, QATConfig(base, step="prepare"))
    y = linear(x)
    quantize_(linear, QATConfig(base, step="convert"))
    assert torch.equal(linear(x), y)


def test_subclasses_of_linear_are_left_alone_with_a_warning() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(64, 64), nn.Linear(64, 64))
    with pytest.warns(UserWarning, match=r"0 \(Scaled is"):
        quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert [type(m) for m in model] == [Scaled, QATLinear]


def test_fqn_to_config_chooses_by_name_by_pattern_and_by_parameter() -> None:
    model = Block()
    configs = {"up": MXFP4WeightConfig(), "up.weight": NVFP4WeightConfig(), r"re:d\w+n": MXFP4WeightConfig()}
    quantize_(model, FqnToConfig({k: QATConfig(c, step="prepare") for k, c in configs.items()}))
    assert [m.prepared.recipe.fprop_weight.name for m in (model.up, model.down)] == ["nvfp4", "mxfp4"]
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    y = model(x)
    quantize_(model, QATConfig(FqnToConfig(configs), step="convert"))
    assert [m.weight.format for m in (model.up, model.down)] == ["nvfp4", "mxfp4"]
    assert torch.equal(model(x), y)


def test_fqn_to_config_none_and_default() -> None:
    model = Block()
    with warnings.catch_warnings(action="ignore"):  # torchao deprecates _default
        config = FqnToConfig({"up": None, "_default": NVFP4WeightConfig()})
    quantize_(model, config)
    kinds = [isinstance(m.weight, PackedTensor) for m in (model.up, model.down, model.lm_head)]
    assert kinds == [False, True, False]


def test_a_pattern_that_matches_nothing_warns_with_near_names() -> None:
    with pytest.warns(UserWarning, match=r"'dwn'.*down"):
        quantize_(Block(), FqnToConfig({"up": NVFP4WeightConfig(), "dwn": NVFP4WeightConfig()}))


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_torchaos_quantize_gives_the_same_numbers(base: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = Block(), Block()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    everything = lambda module, fqn: isinstance(module, nn.Linear)  # noqa: E731 - torchao's default has the head in it
    quantize_(ours, QATConfig(base, step="prepare"), filter_fn=everything)
    torchao.quantization.quantize_(theirs, QATConfig(base, step="prepare"))
    assert torch.equal(ours(x), theirs(x))
    quantize_(ours, QATConfig(base, step="convert"))
    torchao.quantization.quantize_(theirs, QATConfig(base, step="convert"))
    assert type(ours.up.weight) is type(theirs.up.weight)
    assert torch.equal(ours(x), theirs(x))


def test_a_frozen_layer_prepared_one_by_one_warns() -> None:
    layer = nn.Linear(64, 32).requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen"):
        torchao.quantization.quantize_(layer, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert type(layer) is QATLinear


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("quantize", [quantize_, torchao.quantization.quantize_], ids=["ours", "torchaos"])
def test_torchaos_qatconfig(base: Any, quantize: Any) -> None:
    """Both quantize_ take it with our configs; torchao's treats torchao's own as before."""
    model, x = Block(), torch.randn(2, 64, dtype=torch.bfloat16)
    quantize(model, TorchaoQATConfig(base, step="prepare"))
    theirs = quantize is not quantize_ and base is BASES["torchao"]
    assert (type(model.up) is QATLinear) != theirs
    y = model(x)
    quantize(model, TorchaoQATConfig(base, step="convert"))
    assert isinstance(model.up.weight, PackedTensor | IntxUnpackedToInt8Tensor)
    assert theirs or torch.equal(model(x), y)


def test_torchaos_qatconfig_takes_one_of_our_formats() -> None:
    """Beside an activation that is left in high precision, or is torchao's own."""
    model = nn.Sequential(nn.Linear(64, 32))
    config = TorchaoQATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare")
    config.weight_config = get_format("int4-g32")
    torchao.quantization.quantize_(model, config)
    assert type(model[0]) is QATLinear and model[0].prepared.recipe.fprop_weight.name == "int4-g32"


BAD = {
    "group does not divide K": (Int4WeightConfig(48), torch.bfloat16),
    "MSLK plain with groups of 32": (Int4WeightOnlyConfig(32), torch.bfloat16),
    "MSLK with float16": (Int4WeightOnlyConfig(64), torch.float16),
    "dtype": (NVFP4WeightConfig(), torch.float64),
    "fp8 rows in float32": (Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), torch.float32),
    "a config that cannot be trained": (Int8MixedPrecisionTrainingConfig(), torch.bfloat16),
    "an option without exact numerics": (
        Int4WeightOnlyConfig(64, int4_packing_format="plain_int32"),
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("prepare", [True, False], ids=["prepare", "quantize"])
@pytest.mark.parametrize(("base", "dtype"), BAD.values(), ids=BAD)
def test_bad_layers_are_named_and_the_model_is_untouched(base: Any, dtype: torch.dtype, prepare: bool) -> None:
    model = Block(dtype)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"\bup \(128, 64\)"):
        quantize_(model, QATConfig(base, step="prepare") if prepare else base)
    assert snapshot(model) == before
    with pytest.raises(ValueError, match=r"nn.Linear \(128, 64\)"):  # torchao's handlers see no names
        torchao.quantization.quantize_(model, QATConfig(base, step="prepare"))


def test_every_problem_is_in_one_error() -> None:
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 40), nn.Linear(40, 64))
    with pytest.raises(ValueError, match=r"(?s)0 \(64, 96\).*2 \(64, 40\)"):
        quantize_(model, QATConfig(Int4WeightConfig(64), step="prepare"))
    assert all(type(m) is nn.Linear for m in model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_weights_are_named(value: float) -> None:
    model = Block()
    with torch.no_grad():
        model.down.weight[3, 5] = value
    with pytest.raises(ValueError, match=r"down .*NaN or Inf"):
        quantize_(model, NVFP4WeightConfig())
    assert type(model.up.weight) is nn.Parameter


PREPARE, CONVERT = QATConfig(NVFP4WeightConfig(), step="prepare"), QATConfig(NVFP4WeightConfig(), step="convert")
OUT_OF_ORDER: dict[str, tuple[list[Any], str]] = {
    "prepared twice": ([PREPARE, PREPARE], "up.*prepared already"),
    "quantised twice": ([NVFP4WeightConfig(), NVFP4WeightConfig()], "up.*quantised already"),
    "not prepared": ([CONVERT], "no layer is prepared"),
    "prepared for another": ([PREPARE, QATConfig(MXFP4WeightConfig(), step="convert")], "up.*nvfp4.*mxfp4"),
    "no config": ([None], "None"),
    "a class": ([NVFP4WeightConfig], "class NVFP4WeightConfig"),
    "a broken pattern": ([FqnToConfig({"re:up(": NVFP4WeightConfig()})], r"'re:up\('"),
}


@pytest.mark.parametrize(("steps", "name"), OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_steps_that_cannot_follow_leave_the_model(steps: list[Any], name: str) -> None:
    model = Block()
    for step in steps[:-1]:
        quantize_(model, step)
    before = snapshot(model)
    with pytest.raises(ValueError, match=name):
        quantize_(model, steps[-1])
    assert snapshot(model) == before


def test_nothing_to_quantise() -> None:
    with pytest.raises(ValueError, match="Sequential"):
        quantize_(nn.Sequential(nn.ReLU()), NVFP4WeightConfig())
    with pytest.raises(ValueError, match="none was chosen"):
        quantize_(Block(), NVFP4WeightConfig(), filter_fn=lambda module, fqn: False)
    with pytest.warns(UserWarning, match="re:nothing"), pytest.raises(ValueError, match="none was chosen"):
        quantize_(Block(), FqnToConfig({"re:nothing": NVFP4WeightConfig()}))
    named = FqnToConfig({"up": Int4WeightConfig(32)})
    with pytest.raises(ValueError, match="filter_fn"):
        quantize_(Block(), named, filter_fn=lambda module, fqn: True)
    with pytest.raises(ValueError, match="layer names"):
        torchao.quantization.quantize_(Block(), QATConfig(named, step="prepare"))


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (lambda: QATConfig(step="prepare"), "base_config"),
    "step": (lambda: QATConfig(NVFP4WeightConfig(), step="train"), "step"),
    "both": (lambda: QATConfig(NVFP4WeightConfig(), weight_config="nvfp4"), "not both"),
    "fake config": (lambda: QATConfig(IntxFakeQuantizeConfig(torch.int4, group_size=32)), "PTQ config"),
    "convert": (lambda: QATConfig(weight_config="nvfp4", step="convert"), "weight_config"),
    "straight-through": (lambda: QATConfig(NVFP4WeightConfig(), straight_through="soft"), "straight_through"),
    "backward": (lambda: QATConfig("mxfp4", backward="quartet3"), "'quartet3'"),
    "seed": (lambda: QATConfig("mxfp4", backward="quartet", seed=-1), "seed must be an integer of 0 to"),
    "seed of a float": (lambda: QATConfig("mxfp4", backward="quartet", seed=1.5), "seed must be an integer of 0 to"),
    "engine": (lambda: QATConfig("nvfp4", engine="tgi"), "engine"),
    "gpu": (lambda: QATConfig("nvfp4", engine="vllm", gpu="a100"), "gpu"),
    "gpu alone": (lambda: QATConfig("nvfp4", gpu="h100"), "engine"),
    "activation": (lambda: NVFP4WeightConfig(activation="nvfp5"), "'nvfp5'"),
    "no activation": (lambda: NVFP4WeightConfig(activation=False), "activation"),
    "static": (lambda: NVFP4WeightConfig(outer="static"), "pts"),
    "pts": (lambda: NVFP4WeightConfig("static", "0.1"), "pts"),
    **{
        f"pts of {n}": (lambda n=n: NVFP4WeightConfig(pts=0.1, numerics=n), "pts")
        for n in ("ao", "te", "xx", "qutlass")
    },
    "no pts of qutlass": (lambda: NVFP4WeightConfig("static", numerics="qutlass"), "pts"),
    "outer of te": (lambda: NVFP4WeightConfig("static", 0.1, numerics="te"), "outer"),
    **{
        f"no outer of {n}": (lambda n=n: NVFP4WeightConfig("none", numerics=n), "outer")
        for n in ("te", "xx", "qutlass")
    },
    **{f"tile of {n}": (lambda n=n: NVFP4WeightConfig(tile=16, numerics=n), "tile") for n in ("ao", "xx", "qutlass")},
    "metric": (lambda: NVFP4WeightConfig(metric="mae"), "metric"),
    "outer of four_over_six": (lambda: NVFP4WeightConfig("none", rule="four_over_six"), "outer"),
    "pts of four_over_six": (lambda: NVFP4WeightConfig(pts=0.1, rule="four_over_six"), "pts"),
    "gridflip inputs": (lambda: GridFlipFP4WeightConfig(activation="gridflip"), "activation"),
    "a newer schema": (lambda: MXFP4WeightConfig(version=SCHEMA + 1), f"{SCHEMA + 1}"),
    "one bit": (lambda: IntxWeightConfig(1), "bits"),
    "no bits": (lambda: IntxWeightConfig(0, mapping="asymmetric"), "bits"),
    "mapping": (lambda: IntxWeightConfig(mapping="even"), "mapping"),
    "element": (lambda: MXFP8WeightConfig("e3m4"), "element"),
    "rule of quest": (lambda: MXFP8WeightConfig(rule="quest"), "rule"),
    "rule": (lambda: MXFP4WeightConfig(rule="up"), "rule"),
    "rules": (lambda: NVFP4WeightConfig(rule=["search"]), "rule"),
    "rule of te": (lambda: NVFP4WeightConfig(numerics="te", rule="four_over_six"), "numerics='te'"),
    "rule of xx": (lambda: MXFP4WeightConfig("quest", numerics="xx"), "rule"),
    "version": (lambda: MXFP4WeightConfig(version="1"), "version"),
    "bits": (lambda: IntxWeightConfig(9), "bits"),
    "bits of a bool": (lambda: IntxWeightConfig(True, mapping="asymmetric"), "bits"),
    "group": (lambda: IntxWeightConfig(4, 0), "group_size"),
    "group of text": (lambda: Int4WeightConfig("32"), "Int4WeightConfig: group_size"),
    "group or None": (lambda: IntxWeightConfig(4, "32"), "group_size"),
    "tile": (lambda: NVFP4WeightConfig(rule="four_over_six", tile=True), "tile"),
    "tile of 8": (lambda: GridFlipFP4WeightConfig(tile=8), "tile"),
    "alternating": (lambda: GridFlipFP4WeightConfig(alternating="no"), "alternating"),
    "alternating 1": (lambda: GridFlipFP4WeightConfig(alternating=1), "alternating"),
    "granularity": (lambda: FP8WeightConfig(granularity="column"), "granularity"),
}


@pytest.mark.parametrize(("make", "argument"), REFUSED.values(), ids=REFUSED)
def test_arguments_of_configs_are_refused_by_name(make: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        make()


def test_a_number_may_be_an_integer_and_a_config_of_ones_own_may_have_other_fields() -> None:
    assert GridFlipFP4WeightConfig(c=1).recipe().fprop_weight.name == "gridflip-c1.0"

    @dataclass
    class Mine(WeightConfig):
        steps: list[int] = field(default_factory=list)

        def weight_format(self) -> Format:
            return get_format("int8-row")

    assert Mine([1]).steps == [1]


@pytest.mark.parametrize("x", [torch.zeros(2, 65).bfloat16(), torch.zeros(2, 64).double()], ids=["width", "dtype"])
def test_wrong_inputs_name_the_layer(x: torch.Tensor) -> None:
    model = Block()
    quantize_(model, PREPARE)
    with pytest.raises(ValueError, match=r"^up: "):
        model(x)
