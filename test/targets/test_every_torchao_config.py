"""Every config that torchao's `quantize_` handles is supported and exact, or refused by name with a reason: nothing is
left unsaid.

The list is torchao's own source: each class that it registers a handler for. A new torchao with a new config fails here
first.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao
from support.linear_cases import BY_NAME
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.parq.quant.config_torchao import StretchedIntxWeightConfig
from torchao.prototype.qat import MXFakeQuantizeConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerBlock,
    PerGroup,
    PerRow,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
from torchao.quantization.quant_primitives import MappingType, ZeroPointDomain
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import Float8PackingFormat, IntxPackingFormat

from aoquant import QATConfig, quantize_
from aoquant.targets import REASONS, supported

ROOT = Path(torchao.__file__).parent
HANDLED = {
    name: ".".join(("torchao", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    for name in re.findall(r"^@register_quantize_module_handler\((\w+)\)", path.read_text(encoding="utf-8"), re.M)
}
del HANDLED["QATConfig"]  # not a base: what wraps one


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
    for config in (base, QATConfig(base)):
        with pytest.raises(ValueError, match=rf"0 \(64, 64\): {name} has no exact prepare: .{{10}}.*\. Use .+ instead"):
            quantize_(model, config)
    assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter


def test_an_unknown_config_of_torchaos_lists_the_nearest() -> None:
    cls = type("Int4WeightConfigOnly", (AOBaseConfig,), {"__module__": "torchao.quantization.quant_api"})
    with pytest.raises(ValueError, match=r"Int4WeightConfigOnly is not supported; near it: Int4WeightOnlyConfig"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), cls())


def test_a_namesake_that_is_not_torchaos_is_not_taken_for_it() -> None:
    cls = type("Int8WeightOnlyConfig", (AOBaseConfig,), {"__module__": "somebody.else"})
    with pytest.raises(ValueError, match="Int8WeightOnlyConfig is not supported"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), cls())


SYM, NOCLIP = MappingType.SYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
FP8_BLOCKS = Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])])
OPTIONS: dict[str, tuple[Any, str]] = {
    "int1 symmetric": (IntxWeightOnlyConfig(torch.int1, PerGroup(32), SYM), r"rounds every weight to 0.*use MappingType.ASYMMETRIC"),
    "int1 no clipping": (IntxWeightOnlyConfig(torch.int1, PerGroup(32), NOCLIP), "divides by it"),
    "scale dtype": (IntxWeightOnlyConfig(torch.int4, scale_dtype=torch.float64), "scale_dtype must be None or torch.float32"),
    "symmetric tokens": (
        Int8DynamicActivationIntxWeightConfig(torch.int4, act_mapping_type=SYM),
        r"act_mapping_type must be .*torchao's own convert takes no other; aoquant.IntxWeightConfig\(activation='intx8-row'\)",
    ),
    "ARM layout": (
        Int8DynamicActivationIntxWeightConfig(torch.int4, intx_packing_format=IntxPackingFormat.OPAQUE_ATEN_KLEIDIAI),
        "ARM kernels.*UNPACKED_TO_INT8, whose codes",
    ),
    "weight_only_decode": (
        Int8DynamicActivationInt8WeightConfig(weight_only_decode=True),
        "weight_only_decode must be False here, got True; torchao ignores it; Int8WeightOnlyConfig",
    ),
    "int8 columns": (Int8WeightOnlyConfig(granularity=PerRow(0)), r"PerRow\(dim=-1\)"),
    "fp8 columns": (Float8WeightOnlyConfig(granularity=PerRow(0)), r"granularity must be PerRow\(dim=-1\).*got PerRow\(dim=0\)"),
    "fp8 columns both": (Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(0)), r"got PerRow\(dim=0\)"),
    "fp8 emulation": (
        Float8DynamicActivationFloat8WeightConfig(mm_config=Float8MMConfig(emulate=True)),
        "torchao's inference ignores it",
    ),
    **{
        f"fp8 {layout.value}": (Float8DynamicActivationFloat8WeightConfig(packing_format=layout), "2:4 sparse layers need")
        for layout in Float8PackingFormat
        if layout != Float8PackingFormat.PLAIN
    },
    "fp8 blocks, N = 64": (FP8_BLOCKS, r"N a multiple of 128, got N = 64.*FP8WeightConfig\(granularity=\"block\"\)"),
    "MX blocks of 64": (MXDynamicActivationMXWeightConfig(block_size=64), "torchao's own convert fails with any other"),
    "MX e5m2 on a GPU": (
        MXDynamicActivationMXWeightConfig(activation_dtype=torch.float8_e5m2, weight_dtype=torch.float8_e5m2),
        "no MX kernel for e5m2: use KernelPreference.EMULATED",
    ),
    "MX torch": (MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.TORCH), "kernel_preference must be"),
    "stretched range": (StretchedIntxWeightConfig(b=2, quant_min=-2, quant_max=1), r"must be \(-1.5, 1.5\)"),
    "stretched bits": (StretchedIntxWeightConfig(b=8, quant_min=-127.5, quant_max=127.5), "overflow int8"),
    "stretched default": (StretchedIntxWeightConfig(), "b must be 1 or 2"),
}  # fmt: skip


@pytest.mark.parametrize(("base", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_refused_with_a_reason(base: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"0 \(64, 128\): .*{message}"):
        quantize_(model, QATConfig(base))
    assert type(model[0]) is nn.Linear


FAKE: dict[str, tuple[dict[str, Any], str]] = {
    "float zero points": (
        {"weight_config": IntxFakeQuantizeConfig(torch.int4, group_size=32, zero_point_domain=ZeroPointDomain.FLOAT)},
        "zero_point_domain must be",
    ),
    "eps": ({"weight_config": IntxFakeQuantizeConfig(torch.int4, group_size=32, eps=1e-6)}, "eps must be None"),
    "unsigned": ({"weight_config": IntxFakeQuantizeConfig(torch.uint4, group_size=32)}, "the dtype must be torch.int1"),
    "activation groups": (
        {"activation_config": IntxFakeQuantizeConfig(torch.int8, group_size=32)},
        "activation granularity must be PerToken",
    ),
    "int4 activations": ({"activation_config": Int4WeightFakeQuantizeConfig()}, "give it as weight_config"),
    "MX blocks of 64": ({"weight_config": MXFakeQuantizeConfig(block_size=64)}, "block_size must be 32"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), FAKE.values(), ids=FAKE)
def test_fake_quantise_options_are_refused_with_a_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_(nn.Sequential(nn.Linear(128, 64)), QATConfig(**arguments))


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
