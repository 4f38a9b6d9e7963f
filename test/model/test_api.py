"""The user surface: what prepare and convert keep, which layers they choose, and that errors leave the model alone."""

from __future__ import annotations

import copy
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
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat import QATConfig as TorchaoQATConfig
from torchao.quantization.quantize_.workflows import IntxUnpackedToInt8Tensor

import aoquant
from aoquant import Int4WeightConfig, MXFP4WeightConfig, NVFP4WeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.formats import Format, get_format
from aoquant.layers.qat import QATLinear

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
    with pytest.warns(UserWarning, match=r"left alone.*0 \(Scaled\)"):
        quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert type(model[0]) is Scaled
    assert type(model[1]) is QATLinear


def test_a_shared_module_is_prepared_once_and_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    model = nn.Sequential(first, second, first)
    quantize_(model, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert model[0].weight is model[1].weight
    x = torch.randn(2, 64)
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, PackedTensor)
    assert torch.equal(model(x), y)


def test_converting_a_weight_tied_to_an_embedding_is_refused() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(32, 64), "out": nn.Linear(64, 32, bias=False)})
    model["out"].weight = model["embed"].weight
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"out: its weight is tied \(embed.weight, out.weight\).*untie"):
        quantize_(model, Int4WeightConfig(32))
    assert snapshot(model) == before


def test_fqn_to_config_mixes_recipes_by_name_and_pattern() -> None:
    model = Block()
    configs = {"up": NVFP4WeightConfig(), r"re:d\w+n": MXFP4WeightConfig()}
    quantize_(model, FqnToConfig({k: QATConfig(c, step="prepare") for k, c in configs.items()}))
    assert (model.up.prepared.recipe.fprop_weight.name, model.down.prepared.recipe.fprop_weight.name) == (
        "nvfp4",
        "mxfp4",
    )
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    y = model(x)
    quantize_(model, QATConfig(FqnToConfig(configs), step="convert"))
    assert (model.up.weight.format, model.down.weight.format) == ("nvfp4", "mxfp4")
    assert torch.equal(model(x), y)


def test_fqn_to_config_none_and_default() -> None:
    model = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao deprecates _default
        config = FqnToConfig({"up": None, "_default": NVFP4WeightConfig()})
    quantize_(model, config)
    kinds = [isinstance(m.weight, PackedTensor) for m in (model.up, model.down, model.lm_head)]
    assert kinds == [False, True, False]


def test_fqn_to_config_parameter_name_wins_over_module_name() -> None:
    model = Block()
    quantize_(model, FqnToConfig({"up": NVFP4WeightConfig(), "up.weight": MXFP4WeightConfig()}))
    assert model.up.weight.format == "mxfp4"


def test_a_pattern_that_matches_nothing_warns_with_near_names() -> None:
    model = Block()
    with pytest.warns(UserWarning, match=r"'dwn' matches no linear layer; near it: .*down"):
        quantize_(model, FqnToConfig({"up": NVFP4WeightConfig(), "dwn": NVFP4WeightConfig()}))


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
    """HF's TorchAoConfig(QATConfig(step="prepare")) freezes each weight and then calls torchao's quantize_ on the
    layer.
    """
    layer = nn.Linear(64, 32).requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen weight was prepared and will not train"):
        torchao.quantization.quantize_(layer, QATConfig(Int4WeightConfig(32), step="prepare"))
    assert type(layer) is QATLinear


def test_torchaos_qatconfig_takes_our_configs() -> None:
    model = Block()
    torchao.quantization.quantize_(model, TorchaoQATConfig(NVFP4WeightConfig(), step="prepare"))
    assert type(model.up) is QATLinear
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    y = model(x)
    torchao.quantization.quantize_(model, TorchaoQATConfig(NVFP4WeightConfig(), step="convert"))
    assert isinstance(model.up.weight, PackedTensor)
    assert torch.equal(model(x), y)


def test_torchaos_qatconfig_takes_one_of_our_formats() -> None:
    """Beside an activation that is left in high precision, or is torchao's own."""
    model = nn.Sequential(nn.Linear(64, 32))
    config = TorchaoQATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare")
    config.weight_config = get_format("int4-g32")
    torchao.quantization.quantize_(model, config)
    assert type(model[0]) is QATLinear and model[0].prepared.recipe.fprop_weight.name == "int4-g32"


def test_torchaos_qatconfig_treats_torchaos_configs_as_before() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    base = IntxWeightOnlyConfig(torch.int4, PerGroup(32))
    torchao.quantization.quantize_(model, TorchaoQATConfig(base, step="prepare"))
    assert type(model[0]).__module__.startswith("torchao.")
    torchao.quantization.quantize_(model, TorchaoQATConfig(base, step="convert"))
    assert isinstance(model[0].weight, IntxUnpackedToInt8Tensor)


def test_our_quantize_takes_torchaos_qatconfig() -> None:
    model = Block()
    base = Int8WeightOnlyConfig()
    quantize_(model, TorchaoQATConfig(base, step="prepare"))
    assert type(model.up) is QATLinear
    quantize_(model, TorchaoQATConfig(base, step="convert"))
    assert type(model.up.weight).__name__ == "Int8Tensor"


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ("nvfp4", None),
        ("int4-g32", "int8-row-asym"),
        (aoquant.get_format("mxfp8"), "mxfp8"),
        (
            IntxFakeQuantizeConfig(torch.int4, group_size=32),
            IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        ),
    ],
    ids=["nvfp4", "int8-int4", "mxfp8", "torchao-intx"],
)
def test_weight_and_activation_configs(weight: Any, activation: Any) -> None:
    model = Block()
    quantize_(model, QATConfig(weight_config=weight, activation_config=activation, step="prepare"))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert isinstance(model.up.weight, PackedTensor)
    assert torch.equal(model(x), y)


def test_quantize_alone_equals_prepare_then_convert() -> None:
    one, two = Block(), Block()
    two.load_state_dict(one.state_dict())
    quantize_(one, NVFP4WeightConfig())
    quantize_(two, QATConfig(NVFP4WeightConfig(), step="prepare"))
    quantize_(two, QATConfig(step="convert"))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(one(x), two(x))


def test_meta_and_deepcopy() -> None:
    with torch.device("meta"):
        model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    quantize_(model, QATConfig(step="convert"))
    assert model.up.weight.qdata.shape == (128, 32)
    real = Block()
    quantize_(real, QATConfig(NVFP4WeightConfig(), step="prepare"))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(copy.deepcopy(real)(x), real(x))


def test_an_error_while_applying_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    before = snapshot(model)
    done = []

    def fail_at_the_second(*args: Any) -> Any:
        done.append(1)
        if len(done) == 2:
            raise MemoryError("out of memory")
        return original(*args)

    original = PackedTensor.from_encoded
    monkeypatch.setattr(PackedTensor, "from_encoded", fail_at_the_second)
    with pytest.raises(MemoryError):
        quantize_(model, QATConfig(step="convert"))
    assert len(done) == 2
    assert snapshot(model) == before
    model(torch.randn(2, 64, dtype=torch.bfloat16))


def test_repr_names_the_recipe() -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    assert "weight=nvfp4, input=nvfp4" in repr(model.up)
    quantize_(model, QATConfig(step="convert"))
    assert "PackedTensor" in repr(model.up)
    assert "nvfp4" in repr(model.up)


BAD = {
    "group does not divide K": (Int4WeightConfig(48), torch.bfloat16, r"up.*K to be a multiple of 48, got K = 64"),
    "MSLK plain with groups of 32": (Int4WeightOnlyConfig(32), torch.bfloat16, r"up.*wrong numbers.*got 32: use group_size 64"),
    "MSLK with float16": (Int4WeightOnlyConfig(64), torch.float16, r"up.*bfloat16 activations"),
    "dtype": (NVFP4WeightConfig(), torch.float64, r"up.*float32, bfloat16 or float16, got float64"),
    "fp8 rows in float32": (Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), torch.float32, r"up.*bfloat16 layers, got float32"),
    "a config that cannot be trained": (Int8MixedPrecisionTrainingConfig(), torch.bfloat16, r"up.*has no exact prepare"),
    "an option without exact numerics": (
        Int4WeightOnlyConfig(64, int4_packing_format="plain_int32"),
        torch.bfloat16,
        r"up.*int4_packing_format must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("prepare", [True, False], ids=["prepare", "quantize"])
@pytest.mark.parametrize(("base", "dtype", "message"), BAD.values(), ids=BAD)
def test_bad_layers_are_named_and_the_model_is_untouched(
    base: Any, dtype: torch.dtype, message: str, prepare: bool
) -> None:
    model = Block(dtype)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        quantize_(model, QATConfig(base, step="prepare") if prepare else base)
    assert snapshot(model) == before


def test_every_problem_is_in_one_error() -> None:
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 40), nn.Linear(40, 64))
    with pytest.raises(ValueError, match=r"(?s)2 layer\(s\).*unchanged.*0 \(64, 96\).*2 \(64, 40\)"):
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


def test_double_prepare() -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    with pytest.raises(ValueError, match=r"up.*is prepared already"):
        quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))


def test_quantising_twice() -> None:
    model = Block()
    quantize_(model, NVFP4WeightConfig())
    with pytest.raises(ValueError, match=r"up.*quantised already \(PackedTensor\)"):
        quantize_(model, NVFP4WeightConfig())


def test_convert_without_prepare() -> None:
    with pytest.raises(ValueError, match=r"no layer is prepared.*step='prepare'"):
        quantize_(Block(), QATConfig(NVFP4WeightConfig(), step="convert"))


def test_convert_with_another_config() -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    with pytest.raises(ValueError, match=r"up.*was prepared for.*nvfp4.*deploys.*mxfp4"):
        quantize_(model, QATConfig(MXFP4WeightConfig(), step="convert"))
    assert type(model.up) is QATLinear


def test_nothing_to_quantise() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear"):
        quantize_(nn.Sequential(nn.ReLU()), NVFP4WeightConfig())
    with pytest.raises(ValueError, match="none was chosen"):
        quantize_(Block(), NVFP4WeightConfig(), filter_fn=lambda module, fqn: False)
    with pytest.warns(UserWarning, match="matches no linear"), pytest.raises(ValueError, match="none was chosen"):
        quantize_(Block(), FqnToConfig({"re:nothing": NVFP4WeightConfig()}))


def test_configs_that_are_none() -> None:
    with pytest.raises(ValueError, match="got None"):
        quantize_(Block(), None)
    with pytest.raises(ValueError, match="got the class NVFP4WeightConfig: call it"):
        quantize_(Block(), NVFP4WeightConfig)
    with pytest.raises(ValueError, match=r"'re:up\(' is no regular expression"):
        quantize_(Block(), FqnToConfig({"re:up(": NVFP4WeightConfig()}))
    with pytest.raises(ValueError, match=r"needs layer names: use aoquant\.quantize_"):
        torchao.quantization.quantize_(Block(), QATConfig(FqnToConfig({"up": NVFP4WeightConfig()}), step="prepare"))


def test_conflicting_arguments() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="not both"):
        quantize_(model, FqnToConfig({"1": Int4WeightConfig(32)}), filter_fn=lambda module, fqn: True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": "prepare"}, "needs a base_config"),
        ({"base_config": NVFP4WeightConfig(), "step": "train"}, "step must be one of"),
        ({"base_config": NVFP4WeightConfig(), "weight_config": "nvfp4"}, "not both"),
        ({"base_config": IntxFakeQuantizeConfig(torch.int4, group_size=32)}, "must be a PTQ config"),
        ({"weight_config": "nvfp4", "step": "convert"}, "convert takes no weight_config"),
        ({"base_config": NVFP4WeightConfig(), "straight_through": "soft"}, "straight_through is one of"),
    ],
    ids=["nothing", "step", "both", "fake config", "convert", "straight-through"],
)  # fmt: skip
def test_bad_qat_configs(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QATConfig(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NVFP4WeightConfig(activation="nvfp5"), "no format is called 'nvfp5'; near it: nvfp4"),
        (lambda: NVFP4WeightConfig(outer="static"), "needs a finite pts"),
        (lambda: MXFP4WeightConfig(rule="up"), "rule must be one of"),
        (lambda: aoquant.IntxWeightConfig(9), "bits must be 2 to 8"),
        (lambda: aoquant.IntxWeightConfig(4, 0), "group_size must be an integer of at least 1, got 0"),
        (lambda: Int4WeightConfig("32"), "Int4WeightConfig: group_size takes an integer, got '32'"),
        (lambda: aoquant.IntxWeightConfig(4, "32"), "group_size takes an integer or None, got '32'"),
        (lambda: aoquant.IntxWeightConfig(True, mapping="asymmetric"), "bits takes an integer, got True"),
        (lambda: NVFP4WeightConfig(rule="four_over_six", tile=True), "tile takes an integer, got True"),
        (lambda: NVFP4WeightConfig("static", "0.1"), "pts takes a number or None, got '0.1'"),
        (lambda: NVFP4WeightConfig(activation=False), "activation takes a string or None, got False"),
        (lambda: NVFP4WeightConfig(rule=["search"]), "rule takes a string, got"),
        (lambda: MXFP4WeightConfig(version="1"), "version takes an integer, got '1'"),
        (
            lambda: aoquant.GridFlipFP4WeightConfig(alternating="no"),
            "GridFlipFP4WeightConfig: alternating takes True or False, got 'no'",
        ),
        (lambda: aoquant.GridFlipFP4WeightConfig(alternating=1), "alternating takes True or False, got 1"),
        (lambda: aoquant.GridFlipFP4WeightConfig(tile=8), "GridFlip: tile must be 1 or 16 rows, got 8"),
        (
            lambda: NVFP4WeightConfig(numerics="te", rule="four_over_six"),
            "with numerics='te', rule must be one of absmax, got 'four_over_six', which goes with numerics='ao'",
        ),
        (
            lambda: MXFP4WeightConfig("quest", numerics="xx"),
            "rule must be one of absmax, got 'quest', which goes with numerics='ao' or 'qutlass'",
        ),
        (lambda: aoquant.FP8WeightConfig(granularity="column"), "granularity must be one of"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_ptq_configs(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_may_be_an_integer_and_a_config_of_ones_own_may_have_other_fields() -> None:
    assert aoquant.GridFlipFP4WeightConfig(c=1).recipe().fprop_weight.name == "gridflip-c1.0"

    @dataclass
    class Mine(aoquant.config.WeightConfig):
        steps: list[int] = field(default_factory=list)

        def weight_format(self) -> Format:
            return get_format("int8-row")

    assert Mine([1]).steps == [1]


def test_wrong_inputs_name_the_layer() -> None:
    model = Block()
    quantize_(model, QATConfig(NVFP4WeightConfig(), step="prepare"))
    with pytest.raises(ValueError, match=r"up: .*K = 64"):
        model(torch.randn(2, 65, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"up: .*must be float32"):
        model(torch.randn(2, 64, dtype=torch.float64))


def test_torchaos_handler_errors_have_shapes() -> None:
    with pytest.raises(ValueError, match=r"nn.Linear \(128, 64\)"):
        torchao.quantization.quantize_(Block(), QATConfig(Int4WeightConfig(48), step="prepare"))
