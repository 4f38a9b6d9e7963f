"""Every config that torchao's `quantize_` handles is supported and exact, or refused by name with a reason: nothing is
left unsaid.

The list is torchao's own source: each class that it registers a handler for. A new torchao with a new config fails here
first.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao
import torchao.prototype.qat
import torchao.quantization.qat
from support.linear_cases import BY_NAME
from support.torchao_oracle import HANDLED
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.mx_formats import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from torchao.prototype.parq.quant.config_torchao import StretchedIntxWeightConfig
from torchao.prototype.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
)
from torchao.quantization.qat import FakeQuantizeConfig, IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import (
    FakeQuantizeConfigBase,
    Float8FakeQuantizeConfig,
    Int4WeightFakeQuantizeConfig,
    _infer_fake_quantize_configs,
)
from torchao.quantization.quant_primitives import MappingType, ZeroPointDomain
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import Float8PackingFormat, IntxPackingFormat

from aoquant import QATConfig, quantize_
from aoquant.targets import CALIBRATED, REASONS, resolve, supported


def test_the_list_is_torchaos_table() -> None:
    """What this process has imported is part of what the source says."""
    table = torchao.quantization.transform_module._QUANTIZE_CONFIG_HANDLER
    theirs = {c.__name__ for c in table if c.__module__.startswith("torchao.")}
    assert len(HANDLED) > 30 and theirs - {"QATConfig"} <= set(HANDLED)


def test_every_config_is_supported_or_refused_by_name() -> None:
    assert set(HANDLED) == set(supported()) | set(REASONS)
    assert not set(supported()) & set(REASONS)


ELSEWHERE = {  # name -> the file with its exact tests
    "PrototypeInt4WeightOnlyConfig": "test_int4_targets.py",
    "Float8DynamicActivationInt4WeightConfig": "test_int4_targets.py",
    "Int8StaticActivationInt8WeightConfig": "test_static_torchao.py",
    "Float8StaticActivationFloat8WeightConfig": "test_static_torchao.py",
}


@pytest.mark.parametrize("name", supported())
def test_every_supported_config_has_an_exact_case(name: str) -> None:
    if name in ELSEWHERE:
        assert name in (Path(__file__).parent / ELSEWHERE[name]).read_text(encoding="utf-8")
    else:
        assert name in {type(case.config).__name__ for case in BY_NAME.values()}


def config_called(name: str) -> Any:
    """An instance that nothing was asked of: of torchao's class, or of one that looks like it where that cannot be
    imported.
    """
    try:
        cls = getattr(importlib.import_module(HANDLED[name]), name)
    except ImportError:
        cls = type(name, (AOBaseConfig,), {"__module__": HANDLED[name]})
    return object.__new__(cls)


@pytest.mark.parametrize("name", REASONS)
def test_refusals_give_the_reason_and_what_to_use(name: str) -> None:
    model, base = nn.Sequential(nn.Linear(64, 64)), config_called(name)
    for config in (QATConfig(base),) if name in CALIBRATED else (base, QATConfig(base)):
        with pytest.raises(ValueError, match=rf"0 \(64, 64\): {name} "):
            quantize_(model, config)
    assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    ("name", "module"),
    [("Int4WeightConfigOnly", "torchao.quantization.quant_api"), ("Int8WeightOnlyConfig", "somebody.else")],
    ids=["unknown", "a namesake that is not torchao's"],
)
def test_other_configs_are_not_taken(name: str, module: str) -> None:
    cls = type(name, (AOBaseConfig,), {"__module__": module})
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), cls())


def test_a_config_that_is_not_known_is_told_what_is_near() -> None:
    cls = type("Stretched", (AOBaseConfig,), {"__module__": "torchao.quantization"})
    with pytest.raises(ValueError, match=r"near it: [^.]*StretchedIntxWeightConfig"):
        resolve(cls())


# the smallest (N, K) that a config takes in a dtype, and shapes and dtypes beside it that it does not take
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMITS: dict[str, tuple[Any, tuple[int, int, torch.dtype], list[tuple[int, int, torch.dtype]]]] = {
    "fp8 rows": (
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        (16, 16, BF16),
        [(24, 16, BF16), (16, 24, BF16), (16, 16, F32)],
    ),
    "fp8 tensor": (
        Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
        (16, 16, F32),
        [(24, 16, F32), (16, 24, F32)],
    ),
    "fp8 blocks": (
        Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])]),
        (128, 128, BF16),
        [(64, 128, BF16), (128, 64, BF16), (128, 128, F32)],
    ),
    "fp8 static": (Float8StaticActivationFloat8WeightConfig(), (16, 16, F32), [(24, 16, F32), (16, 24, F32)]),
    "nvfp4": (
        NVFP4DynamicActivationNVFP4WeightConfig(),
        (16, 16, F32),
        [(24, 16, F32), (16, 24, F32), (16, 16, F16)],
    ),
    "nvfp4 weight": (NVFP4WeightOnlyConfig(), (16, 16, F32), [(24, 16, F32), (16, 24, F32), (16, 16, F16)]),
    "mx": (MXDynamicActivationMXWeightConfig(), (1, 32, BF16), [(1, 48, BF16), (1, 32, F32)]),
    "int8 dynamic": (Int8DynamicActivationInt8WeightConfig(), (1, 2, F32), [(1, 1, F32)]),
    "int8 static": (
        Int8StaticActivationInt8WeightConfig(granularity=PerTensor()),
        (1, 2, F32),
        [(1, 1, F32)],
    ),
    "int4 plain": (Int4WeightOnlyConfig(64), (8, 64, BF16), [(4, 64, BF16), (8, 96, BF16), (8, 64, F16)]),
    "int4 plain, one group": (Int4WeightOnlyConfig(32), (8, 32, BF16), [(8, 64, BF16)]),
    "int4 preshuffled": (
        Int4WeightOnlyConfig(64, int4_packing_format="preshuffled"),
        (16, 64, BF16),
        [(8, 64, BF16), (16, 96, BF16), (16, 64, F16)],
    ),
    "int4 and fp8": (
        Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"),
        (8, 128, BF16),
        [(4, 128, BF16), (8, 64, BF16), (8, 128, F16)],
    ),
    "int4 on a CPU": (PrototypeInt4WeightOnlyConfig(32), (16, 32, F32), [(24, 32, F32), (16, 48, F32)]),
    "int4 tiles": (
        Int4WeightOnlyConfig(32, int4_packing_format="tile_packed_to_4d"),
        (1, 32, BF16),
        [(1, 48, BF16), (1, 32, F32)],
    ),
    "int4 tiles, HQQ": (
        Int4WeightOnlyConfig(32, int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq"),
        (8, 1024, BF16),
        [(4, 1024, BF16), (8, 512, BF16)],
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_stands_between_the_smallest_shape_and_those_beside_it(name: str) -> None:
    config, smallest, others = LIMITS[name]
    target = resolve(config)
    assert target.why_not(*smallest) is None
    for beside in others:
        assert target.why_not(*beside) is not None, beside


SYM, NOCLIP = MappingType.SYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
FP8_BLOCKS = Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])])
E5M2 = torch.float8_e5m2
OPTIONS: dict[str, Any] = {
    "int1 symmetric": IntxWeightOnlyConfig(torch.int1, PerGroup(32), SYM),
    "int1 no clipping": IntxWeightOnlyConfig(torch.int1, PerGroup(32), NOCLIP),
    "scale dtype": IntxWeightOnlyConfig(torch.int4, scale_dtype=torch.float64),
    "symmetric tokens": Int8DynamicActivationIntxWeightConfig(torch.int4, act_mapping_type=SYM),
    "ARM layout": Int8DynamicActivationIntxWeightConfig(
        torch.int4, intx_packing_format=IntxPackingFormat.OPAQUE_ATEN_KLEIDIAI
    ),
    "weight_only_decode": Int8DynamicActivationInt8WeightConfig(weight_only_decode=True),
    "int8 columns": Int8WeightOnlyConfig(granularity=PerRow(0)),
    "fp8 columns": Float8WeightOnlyConfig(granularity=PerRow(0)),
    "fp8 columns both": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(0)),
    "fp8 emulation": Float8DynamicActivationFloat8WeightConfig(mm_config=Float8MMConfig(emulate=True)),
    **{
        f"fp8 {layout.value}": Float8DynamicActivationFloat8WeightConfig(packing_format=layout)
        for layout in Float8PackingFormat
        if layout != Float8PackingFormat.PLAIN
    },
    "fp8 blocks, N = 64": FP8_BLOCKS,
    "MX blocks of 64": MXDynamicActivationMXWeightConfig(block_size=64),
    "MX e5m2 on a GPU": MXDynamicActivationMXWeightConfig(activation_dtype=E5M2, weight_dtype=E5M2),
    "MX torch": MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.TORCH),
    "stretched range": StretchedIntxWeightConfig(b=2, quant_min=-2, quant_max=1),
    "stretched bits": StretchedIntxWeightConfig(b=8, quant_min=-127.5, quant_max=127.5),
    "stretched default": StretchedIntxWeightConfig(),
    "stretched scale dtype": StretchedIntxWeightConfig(b=2, quant_min=-1.5, quant_max=1.5, scale_dtype=torch.float32),
}


@pytest.mark.parametrize("base", OPTIONS.values(), ids=OPTIONS)
def test_options_are_refused_with_a_reason(base: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"0 \(64, 128\): "):
        quantize_(model, QATConfig(base))
    assert type(model[0]) is nn.Linear


FAKE: dict[str, dict[str, Any]] = {
    "zero_point_domain": {
        "weight_config": IntxFakeQuantizeConfig(torch.int4, group_size=32, zero_point_domain=ZeroPointDomain.FLOAT)
    },
    "eps": {"weight_config": IntxFakeQuantizeConfig(torch.int4, group_size=32, eps=1e-6)},
    "dtype": {"weight_config": IntxFakeQuantizeConfig(torch.uint4, group_size=32)},
    "granularity": {"activation_config": IntxFakeQuantizeConfig(torch.int8, group_size=32)},
    "weight_config": {"activation_config": Int4WeightFakeQuantizeConfig()},
    "block_size": {"weight_config": MXFakeQuantizeConfig(block_size=64)},
    "Int4WeightFakeQuantizeConfig.activation_dtype": {"weight_config": Int4WeightFakeQuantizeConfig()},
    "activation_config=Float8FakeQuantizeConfig": {
        "weight_config": Int4WeightFakeQuantizeConfig(),
        "activation_config": IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
    },
    "beside Int4WeightFakeQuantizeConfig": {
        "weight_config": Int4WeightFakeQuantizeConfig(),
        "activation_config": Float8FakeQuantizeConfig(hp_value_ub=1.0),
    },
}


@pytest.mark.parametrize("option", FAKE)
def test_fake_quantise_options_are_refused_with_a_reason(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        quantize_(nn.Sequential(nn.Linear(128, 64)), QATConfig(**FAKE[option]))


INT4 = Int4WeightFakeQuantizeConfig
FAKE_TAKEN: dict[type, list[dict[str, Any]]] = {  # pairs that a class of fake-quantisation configs is taken in
    IntxFakeQuantizeConfig: [{"weight_config": IntxFakeQuantizeConfig(torch.int4, group_size=32)}],
    FakeQuantizeConfig: [{"weight_config": FakeQuantizeConfig(torch.int4, group_size=32)}],
    INT4: [
        {"weight_config": INT4(activation_dtype=torch.bfloat16)},
        {"weight_config": INT4(), "activation_config": Float8FakeQuantizeConfig()},
    ],
    **{
        cls: [{"weight_config": cls(), "activation_config": cls()}]
        for cls in (Float8FakeQuantizeConfig, MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig)
    },
}
FAKE_REFUSED = [FakeQuantizeConfigBase]


def fake_quantise_configs() -> set[type]:
    """Every class of such configs in torchao's modules of QAT."""
    found = set[type]()
    for package in (torchao.quantization.qat, torchao.prototype.qat):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found |= {cls for cls in vars(importlib.import_module(info.name)).values() if isinstance(cls, type)}
    return {cls for cls in found if issubclass(cls, FakeQuantizeConfigBase)}


def test_every_fake_quantise_config_is_taken_or_refused() -> None:
    """A class that a new torchao brings fails here first."""
    assert fake_quantise_configs() == {*FAKE_TAKEN, *FAKE_REFUSED}


@pytest.mark.parametrize("cls", FAKE_TAKEN)
def test_a_fake_quantise_config_converts_exactly(cls: type) -> None:
    for pair in FAKE_TAKEN[cls]:
        model, x = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16)), torch.randn(4, 128, dtype=torch.bfloat16)
        quantize_(model, QATConfig(**pair))
        y = model(x)
        quantize_(model, QATConfig(step="convert"))
        assert torch.equal(model(x), y)


@pytest.mark.parametrize("side", ["weight_config", "activation_config"])
@pytest.mark.parametrize("cls", FAKE_REFUSED)
def test_a_fake_quantise_config_is_refused_by_name(cls: type, side: str) -> None:
    with pytest.raises(ValueError, match=rf"0 \(64, 128\): .*{cls.__name__}"):
        quantize_(nn.Sequential(nn.Linear(128, 64)), QATConfig(**{side: cls()}))


def test_the_pair_that_torchao_infers_for_int4_and_fp8_is_the_layer_of_its_config() -> None:
    """torchao's own fake quantisation imitates the preshuffled layout."""
    base = Float8DynamicActivationInt4WeightConfig()
    activation, weight = _infer_fake_quantize_configs(base)
    pair = nn.Sequential(nn.Linear(256, 64, dtype=torch.bfloat16))
    whole, x = copy.deepcopy(pair), torch.randn(8, 256, dtype=torch.bfloat16)
    quantize_(pair, QATConfig(weight_config=weight, activation_config=activation))
    quantize_(whole, QATConfig(base))
    assert pair[0].prepared.recipe == whole[0].prepared.recipe
    assert torch.equal(pair(x), whole(x))


@pytest.mark.parametrize("preference", [KernelPreference.TORCH, KernelPreference.AUTO])
@pytest.mark.parametrize("fast", [True, False])
def test_fp8_says_how_its_kernel_adds_up(fast: bool, preference: KernelPreference) -> None:
    """Fast accumulation keeps 13 bits between the steps of a Hopper tensor core: other sums, hence another contract."""
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), mm_config=Float8MMConfig(use_fast_accum=fast), kernel_preference=preference
    )
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    quantize_(model, QATConfig(config))
    assert model[0].prepared.recipe.contract == ("fp8_scaled_mm" if fast else "fp8_scaled_mm_precise")
    quantize_(model, QATConfig(step="convert"))
    assert model[0].weight.mm_config.use_fast_accum is fast


@pytest.mark.parametrize(("per_tensor", "name"), [(True, "nvfp4"), (False, "nvfp4-none")])
def test_a_fake_config_of_nvfp4_says_whether_it_has_an_outer_scale(per_tensor: bool, name: str) -> None:
    model, fake = nn.Sequential(nn.Linear(128, 64)), NVFP4FakeQuantizeConfig(use_per_tensor_scale=per_tensor)
    quantize_(model, QATConfig(weight_config=fake, activation_config=fake))
    recipe = model[0].prepared.recipe
    assert recipe.fprop_weight.name == recipe.fprop_input.name == name
